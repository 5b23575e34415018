"""The agent: starts the ranks of one host, shows what they write, and ends them together.

One thread, one loop, no polling: it waits on the ranks' pipes, its own outputs and its signals (SIGCHLD among
them). A job ends in one of these ways; the times are the longest that each step waits::

    all ranks end with 0 ─────────────────────────────────────────────────────> 0
    a rank fails ──REPORT_SECONDS──> SIGTERM ──shutdown_timeout──> SIGKILL ───> the first failure's status
    the launcher gets a signal ────> same signal ──grace──────────> SIGKILL ──> 128 + signal
        Ctrl-C after it ───────────> SIGKILL at once
    a rank cannot be started ──────> SIGKILL at once ─────────────────────────> 1

After a failure the other ranks first get a moment to say themselves whom they lost; that costs nothing when
they end by themselves. Every signal goes to a rank's whole process group. A second Ctrl-C shows that somebody has
no more patience; other signals that come again are only passed on. When the agent itself is killed, the kernel
kills the ranks (``die_with_parent``), which is why they are started from the thread that lives as long as the
process.
"""

from __future__ import annotations

import selectors
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from procgroup.cluster.out_of_memory import OutOfMemoryKills
from procgroup.environ import TORCHELASTIC_ERROR_FILE
from procgroup.launch.job_output import JobOutput, RankOutput
from procgroup.launch.output import Sink
from procgroup.launch.rank_process import RankProcess, Stream
from procgroup.launch.signals import SignalInbox

if TYPE_CHECKING:
    from procgroup.launch.failure import Failure

REPORT_SECONDS = 2.0
"""How long the other ranks have, after the first failure, to report it themselves."""

INTERRUPT_SECONDS = 2.0
"""How long ranks have to end after Ctrl-C, when no shutdown timeout was asked for."""

SHUTDOWN_SECONDS = 30.0
"""How long ranks have to end after SIGTERM, when no shutdown timeout was asked for."""

FLUSH_SECONDS = 1.0
"""How long, after a signal, to try to write what the reader of the output does not take."""

_UNKILLABLE_SECONDS = 30.0
_PENDING_BYTES = 1 << 20


@dataclass(frozen=True)
class RankPlan:
    """What to start as one rank."""

    command: Sequence[str]
    environment: Mapping[str, str]
    output: RankOutput


class Agent:
    """Runs the planned ranks to their common end. ``shutdown_timeout`` is in seconds; None: the defaults above."""

    def __init__(
        self,
        plans: Sequence[RankPlan],
        output: JobOutput,
        signals: Sequence[signal.Signals],
        shutdown_timeout: float | None = None,
    ) -> None:
        self._plans = plans
        self._signals = signals
        self._shutdown_timeout = shutdown_timeout
        self._output = output
        self._ranks: list[RankProcess] = []
        self._failures: list[Failure] = []
        self._kills_before = OutOfMemoryKills.so_far()
        self._received: signal.Signals | None = None
        self._next_step: tuple[float, Callable[[], None]] | None = None
        self._given_up = False
        self._incomplete = False

    def run(self) -> int:
        """Start the ranks, wait for the end of all, report; return the exit status of the job."""
        with SignalInbox(self._signals) as inbox:
            try:
                self._start(inbox)
                while self._living() and not self._given_up:
                    self._turn(inbox)
                status = self._conclude()
                self._flush(inbox)
                return status if self._received is None else 128 + self._received
            finally:
                for rank in self._ranks:
                    rank.signal(signal.SIGKILL)

    def _start(self, inbox: SignalInbox) -> None:
        for number, plan in enumerate(self._plans):
            self._heed(inbox)
            if self._received is not None:
                return
            try:
                self._ranks.append(
                    RankProcess(
                        number,
                        plan.command,
                        plan.environment,
                        plan.output,
                        standard_input=number == 0,
                    )
                )
            except OSError as error:
                self._say(f"cannot start rank {number} of {len(self._plans)}: {error}")
                self._incomplete = True
                self._kill()
                return

    def _living(self) -> list[RankProcess]:
        return [rank for rank in self._ranks if rank.ending is None]

    def _turn(self, inbox: SignalInbox) -> None:
        """Wait for the next thing to happen and deal with it."""
        times = [time for time in (self._next_step and self._next_step[0], self._output.due) if time is not None]
        self._output.status.count(len(self._living()), len(self._plans), 0)
        self._move_bytes(inbox, max(0.0, min(times) - time.monotonic()) if times else None)
        self._output.tick()
        self._heed(inbox)
        for rank in self._living():
            if rank.reap():
                self._judge(rank)
        if self._next_step is not None and time.monotonic() >= self._next_step[0]:
            _, step = self._next_step
            self._next_step = None
            step()

    def _move_bytes(self, inbox: SignalInbox, timeout: float | None) -> None:
        """Read what ranks wrote and write what fits; while an output is behind, its readers wait."""
        with selectors.PollSelector() as selector:
            selector.register(inbox.descriptor, selectors.EVENT_READ)
            if self._output.progress is not None:
                selector.register(self._output.progress.descriptor, selectors.EVENT_READ, self._output)
            for sink in set(self._output.sinks):
                if sink.pending:
                    selector.register(sink.descriptor, selectors.EVENT_WRITE, sink)
            for stream in self._open_streams():
                if stream.sink.pending < _PENDING_BYTES:
                    selector.register(stream.descriptor, selectors.EVENT_READ, stream)
            for key, _ in selector.select(timeout):
                if isinstance(key.data, Stream):
                    key.data.read_some()
                elif isinstance(key.data, Sink):
                    key.data.write_some()
                elif isinstance(key.data, JobOutput):
                    key.data.take_progress()

    def _open_streams(self) -> list[Stream]:
        """Return the open streams; close those whose output is gone, so that its ranks learn it from their writes."""
        streams = [stream for rank in self._ranks for stream in rank.streams if stream.open]
        for stream in streams:
            if stream.sink.broken:
                stream.close()
        return [stream for stream in streams if stream.open]

    def _heed(self, inbox: SignalInbox) -> None:
        """End the ranks by the first signal that comes; kill them by a Ctrl-C after it."""
        for number in inbox.take():
            if self._received is None:
                self._received = number
                self._say(f"{number.name}: ending {_count(self._living())}")
                default = INTERRUPT_SECONDS if number is signal.SIGINT else SHUTDOWN_SECONDS
                self._end(number, default)
            elif number is signal.SIGINT:
                self._say(f"SIGINT again: killing {_count(self._living())}")
                self._kill()
            else:
                for rank in self._living():
                    rank.signal(number)

    def _judge(self, rank: RankProcess) -> None:
        """Look at a rank that has just ended; the first failure begins the end of the others."""
        assert rank.ending is not None
        if rank.ending.exit_code == 0 or rank.told_to_end:
            return
        from procgroup.launch.error_file import read_error_file  # these are needed after a failure only
        from procgroup.launch.failure import Failure

        shown = rank.stderr.traceback_time if rank.ending.exit_code == 1 else None
        failure = Failure(
            rank=rank.rank,
            pid=rank.pid,
            exit_code=rank.ending.exit_code,
            time=shown or rank.ending.time,
            stderr=rank.stderr.tail.decode(errors="replace"),
            peak_memory=rank.ending.peak_memory,
            kills=OutOfMemoryKills.so_far().since(self._kills_before),
            record=read_error_file(Path(rank.error_file)) if rank.error_file else None,
        )
        self._failures.append(failure)
        if len(self._failures) == 1:
            self._schedule(REPORT_SECONDS, lambda: self._end(signal.SIGTERM, SHUTDOWN_SECONDS))

    def _end(self, number: signal.Signals, default_timeout: float) -> None:
        """Ask every living rank to end, and plan to kill those that do not."""
        for rank in self._living():
            rank.told_to_end = True
            rank.signal(number)
        self._schedule(default_timeout if self._shutdown_timeout is None else self._shutdown_timeout, self._kill)

    def _kill(self) -> None:
        for rank in self._living():
            rank.told_to_end = True
            rank.signal(signal.SIGKILL)
        self._schedule(_UNKILLABLE_SECONDS, self._give_up)

    def _give_up(self) -> None:
        """Stop waiting for ranks that even SIGKILL does not end: they hang in the kernel."""
        for rank in self._living():
            self._say(f"rank {rank.rank} (pid {rank.pid}) hangs in the kernel and cannot be killed; leaving it")
        self._given_up = True

    def _schedule(self, seconds: float, step: Callable[[], None]) -> None:
        self._next_step = (time.monotonic() + seconds, step)

    def _conclude(self) -> int:
        """Put the report, unless a signal ended the job, behind the ranks' output; return the exit status."""
        self._output.finish()
        if not self._failures or self._received is not None:
            return 1 if self._given_up or self._incomplete else 0
        from procgroup.launch.report import describe, first_failure

        first = first_failure(self._failures)
        ended = [rank.rank for rank in self._ranks if rank.told_to_end]
        left = [rank.rank for rank in self._ranks if not rank.told_to_end and rank.ending and not rank.ending.exit_code]
        report = describe(self._failures, ended, left, socket.gethostname())
        self._output.sinks[1].put_lines(None, report.encode(errors="replace"))
        self._pass_on(first)
        return first.exit_status

    def _pass_on(self, first: Failure) -> None:
        """Leave the first failure in the launcher's own error file, for whoever started the launcher."""
        if path := TORCHELASTIC_ERROR_FILE.get():
            from procgroup.launch.error_file import pass_on

            try:
                pass_on(
                    Path(path),
                    first.record,
                    message=first.reason,
                    traceback=first.evidence,
                    exit_code=first.exit_code,
                )
            except OSError as error:
                self._say(f"cannot write TORCHELASTIC_ERROR_FILE={path}: {error.strerror}")

    def _flush(self, inbox: SignalInbox) -> None:
        """Write what is still to be written; somebody who has sent a signal need not wait for it long."""
        began = time.monotonic()
        while any(sink.pending for sink in self._output.sinks):
            self._received = next(iter(inbox.take()), self._received)
            if self._received is not None and time.monotonic() - began > FLUSH_SECONDS:
                break
            self._move_bytes(inbox, FLUSH_SECONDS)

    def _say(self, text: str) -> None:
        self._output.say(text)


def _count(ranks: Sequence[RankProcess]) -> str:
    return "1 rank" if len(ranks) == 1 else f"{len(ranks)} ranks"


def say(text: str) -> None:
    """Write one line of the launcher's own to stderr."""
    print(f"procgroup run: {text}", file=sys.stderr, flush=True)
