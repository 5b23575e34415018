"""The ranks of this node: start them, watch them, pass signals on, end them.

A supervisor runs one round of ranks at a time. It does not decide about rounds: one_node.py does for a job of one node,
nodes/agent.py for one node of several. Both call ``wait`` in a loop of one thread, which waits without polling for the
ranks' pipes and exits (pidfd), the launcher's outputs and signals.

A signal to the launcher goes to the ranks. A second Ctrl-C kills them at once.
"""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from types import FrameType
from typing import TYPE_CHECKING, Any, NamedTuple

from procgroup.launch.deadlines import shutdown_seconds
from procgroup.launch.hosted_store import HostedStore, WorkerStore
from procgroup.launch.output.job_output import JobOutput
from procgroup.launch.program import CommandProgram, RankRound
from procgroup.launch.ranks.rank_process import HungRanks
from procgroup.launch.ranks.worker_group import WorkerGroup

if TYPE_CHECKING:
    from procgroup.launch.failures.failure import RankFailure


class JobOutcome(NamedTuple):
    """The end of a job on this node: its exit status, the failures that ended it, and the ranks that ran here last."""

    status: int
    failures: Sequence[RankFailure]
    ranks: Sequence[int]


class Supervisor:
    """Runs the ranks of this node. Use as a context manager in the main thread; its end kills the ranks.

    ``group`` are the ranks of the last round that began here. ``received`` is the first signal that ends the ranks.
    ``notice`` is how many seconds the ranks then got to end by themselves, in the place of SIGTERM; 0 without a notice.
    """

    def __init__(self, program: CommandProgram, output: JobOutput) -> None:
        self.program = program
        self.output = output
        self.group: WorkerGroup = WorkerGroup((), -1, output.say)
        self.received: signal.Signals | None = None
        self.notice: float = 0.0
        self._shutdown = program.plan.shutdown
        self._ending = frozenset(program.plan.signals)
        self._inbox = SignalInbox(with_forwarded(program.plan.signals))
        self._store: HostedStore | None = None

    def __enter__(self) -> Supervisor:
        self._inbox.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self.kill()
            if self._store is not None:
                self._store.close()
                self._store = None  # its descriptors end with it, and this object is part of reference cycles
            self.group.close()
        finally:
            self._inbox.__exit__()

    def kill(self) -> None:
        """Kill the ranks without waiting for their end."""
        for rank in self.group.ranks:
            rank.signal(signal.SIGKILL)

    def host(self, address: str) -> WorkerStore:
        """Host the store of the next round's ranks in the place of the last one.

        Raises OSError with the reason.
        """
        earlier, self._store = self._store, None
        try:
            self._store = self.program.host(address)
        except (OSError, RuntimeError) as error:
            raise OSError(f"{socket.gethostname()} cannot host the ranks' store: {error}") from error
        finally:
            if earlier is not None:
                earlier.close()
        return self._store.record()

    def start(self, round_: RankRound) -> None:
        """Start the ranks of a round; a signal that ends them ends the start, too."""
        plan = self.program.plan
        self.group.close()
        self.group = WorkerGroup(
            self.program.plans(round_, self.output),
            round_.number,
            self.output.say,
            node_rank=round_.node_rank,
            host=round_.host,
            awaits_cause=len(round_.processes) > 1,
            hung=HungRanks(plan.hang, self.output.last_reports, self.output.say),
            replacements=plan.replacements,
            keeps_going=plan.keeps_going,
        )
        self.group.start(self._has_ending_signal)
        if self.group.incomplete:
            self.output.say(self.group.incomplete)

    def forget(self) -> None:
        """Forget the last round, whose ranks have ended."""
        self.group.close()
        self.group = WorkerGroup((), -1, self.output.say)

    def wait(
        self, report_seconds: float, *, restarts: int, until: float | None = None, wake: Iterable[int] = ()
    ) -> None:
        """Wait for an event and handle it.

        The wait ends at the time.monotonic() ``until``, and when a descriptor of ``wake`` can be read. After a failure
        the other ranks have ``report_seconds`` to raise errors of their own. ``restarts`` is shown.
        """
        group = self.group
        if group.ranks and self.output.status is not None:
            self.output.status.count(len(group.living), len(group.ranks), restarts)
        times = [instant for instant in (until, group.next_event()) if instant is not None]
        timeout = max(0.0, min(times) - time.monotonic()) if times else None
        ends = [rank.descriptor for rank in group.living]
        self.output.move_bytes(group.streams, [self._inbox.descriptor, *wake, *ends], timeout)
        self._handle_signals()
        group.watch(report_seconds)

    def end(self) -> None:
        """Send SIGTERM to the ranks, and plan to kill those that have not ended in time."""
        self.group.end(signal.SIGTERM, shutdown_seconds(self._shutdown))

    def failure_here(self) -> tuple[str, int]:
        """Return why this node's ranks failed, in one line, and the exit status of the first failure."""
        failures = self.group.failures
        if not failures:
            return self.group.incomplete, 1
        from procgroup.launch.failures.report import first_failure, summary  # needed after a failure only

        return summary(failures), first_failure(failures).exit_status

    def report(self, failures: Sequence[RankFailure], reason: str = "") -> None:
        """Print the end of a job that failed, after the ranks' output: its failures, or the ``reason`` without any."""
        self.output.move_bytes((), (), 0.0)  # an output that cannot be written is reported before
        if failures:
            from procgroup.launch.failures.report import report

            ranks = self.group.ranks
            ended = [rank.rank for rank in ranks if rank.ended_by_launcher]
            left = [rank.rank for rank in ranks if rank.rank not in ended and rank.ending and not rank.ending.exit_code]
            report(failures, ended, left, socket.gethostname(), self.output)
        elif reason and reason != self.group.incomplete:
            self.output.say(f"the job has ended: {reason}")

    def finish(self, status: int, failures: Sequence[RankFailure] = ()) -> JobOutcome:
        """Write all pending output and return how the job has ended; a signal decides the status.

        The output is dropped after a signal where its reader does not read.
        """

        def was_interrupted() -> bool:  # the ranks have ended, so a signal is for the launcher alone
            ending = [number for number in self._inbox.take() if number in self._ending]
            self.received = self.received or (ending[0] if ending else None)
            return self.received is not None

        was_interrupted()
        self.output.flush(self.group.streams, self._inbox.descriptor, was_interrupted)
        status = status if self.received is None else 128 + self.received
        return JobOutcome(status, failures, [rank.rank for rank in self.group.ranks])

    def _has_ending_signal(self) -> bool:
        self._handle_signals()
        return self.received is not None

    def _handle_signals(self) -> None:
        """End the ranks on the first signal; kill them on a Ctrl-C after it; forward all other signals."""
        for number in self._inbox.take():
            if number not in self._ending:
                self.group.forward(number)
            elif self.received is None:
                self.received = number
                self.output.say(f"{number.name}: ending {self._count_ranks()}")
                self._end_by(number)
            elif number is signal.SIGINT:
                self.output.say(f"SIGINT again: killing {self._count_ranks()}")
                self.group.kill()
            else:
                self.group.forward(number)

    def _end_by(self, number: signal.Signals) -> None:
        """Send the signal to the ranks; in the place of SIGTERM give ranks that call ``preempted`` the notice."""
        grace = shutdown_seconds(self._shutdown, number)
        if number is signal.SIGTERM and self.group.preempt(grace):
            self.notice = grace
        else:
            self.group.end(number, grace)

    def _count_ranks(self) -> str:
        number = len(self.group.living)
        return "1 rank" if number == 1 else f"{number} ranks"


_FORWARDED = (signal.SIGUSR1, signal.SIGUSR2)


def with_forwarded(ending: Sequence[signal.Signals]) -> list[signal.Signals]:
    """Return the signals that end the ranks, and those that are only forwarded to them."""
    return [*ending, *(number for number in _FORWARDED if number not in ending)]


class WakePipe:
    """A loop waits until ``descriptor`` can be read; ``wake`` makes it readable, from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._is_closed = False
        self.descriptor: int
        self.write_end: int
        self.descriptor, self.write_end = os.pipe()
        os.set_blocking(self.descriptor, False)
        os.set_blocking(self.write_end, False)

    def wake(self) -> None:
        """End the loop's wait, or its next one; do nothing after ``close``."""
        with self._lock, suppress(BlockingIOError):  # the pipe is full, so the loop does not wait
            if not self._is_closed:
                os.write(self.write_end, b".")

    def drain(self) -> None:
        """Forget the wakes that have come, so that the loop can wait again."""
        with suppress(BlockingIOError):
            while os.read(self.descriptor, 4096):
                pass

    def close(self) -> None:
        """Close both ends, while other threads may still call ``wake``."""
        with self._lock:
            self._is_closed = True
            os.close(self.descriptor)
            os.close(self.write_end)


class SignalInbox:
    """Collects the given signals; each makes ``descriptor`` readable.

    A SIGHUP that is ignored on entry (``nohup``) stays ignored. Use as a context manager in the main thread; the end
    restores the earlier handlers.
    """

    def __init__(self, numbers: Sequence[signal.Signals]) -> None:
        if threading.current_thread() is not threading.main_thread():
            raise RuntimeError(
                "the launcher was called in a thread other than the main one, where Python delivers no signals; "
                "call it in the main thread"
            )
        is_ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
        self._numbers = [number for number in numbers if not (number is signal.SIGHUP and is_ignored)]
        self._received: list[signal.Signals] = []
        self._earlier: dict[signal.Signals, Any] = {}
        self._wakes = WakePipe()
        self.descriptor: int = self._wakes.descriptor

    def __enter__(self) -> SignalInbox:
        self._earlier_wakeup = signal.set_wakeup_fd(self._wakes.write_end, warn_on_full_buffer=False)
        for number in self._numbers:
            self._earlier[number] = signal.signal(number, self._receive)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._earlier.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._earlier_wakeup)
        self._wakes.close()

    def take(self) -> list[signal.Signals]:
        """Return the signals that have come since the last call, in order."""
        self._wakes.drain()
        received, self._received = self._received, []
        return received

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self._received.append(signal.Signals(number))
