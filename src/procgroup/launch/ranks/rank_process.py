"""The process of one rank: its start, its output, its end."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import resource
import signal
import subprocess
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from procgroup import _native
from procgroup.launch.deadlines import HANG_LOOK_SECONDS, HANG_REPORT_SECONDS
from procgroup.launch.output.job_output import RankOutput, StreamOutput
from procgroup.launch.output.sinks import PipeReader
from procgroup.process.environ import PROCGROUP_NOTICE

TAIL_BYTES = 64 * 1024

_HEADER = b"Traceback (most recent call last):"
_FRAME = re.compile(r'  File "([^"]+)", line (\d+)')
_HELD_BYTES = 64 * 1024


class RankPlan(NamedTuple):
    """How to start one rank; ``rank`` is the global rank, ``cpus`` the CPUs to which it is bound (empty: all)."""

    command: Sequence[str]
    environment: Mapping[str, str]
    output: RankOutput
    rank: int
    cpus: Collection[int] = ()


class Ending(NamedTuple):
    """How a rank ended: ``exit_code`` (negative for a signal), when (monotonic seconds), its peak memory in bytes."""

    exit_code: int
    time: float
    peak_memory: int


class InterruptFilter:
    """Shortens the traceback of a Ctrl-C, of which N ranks would print N; holds it back until the rank has ended.

    While ``active`` is False it passes everything; it is set once an interrupt has been sent to the rank.
    """

    def __init__(self) -> None:
        self.active = False
        self._held = b""

    def feed(self, data: bytes) -> bytes:
        """Take written data; return the part that may be shown now."""
        if not self.active:
            return data
        self._held += data
        start = self._held.find(_HEADER)
        if start < 0:
            start = self._held.rfind(b"\n") + 1
        if len(self._held) - start > _HELD_BYTES:
            start = len(self._held)
        shown, self._held = self._held[:start], self._held[start:]
        return shown

    def finish(self) -> bytes:
        """Return the data held back: an uncaught KeyboardInterrupt as one line, other text unchanged."""
        if not self._held:
            return b""
        from procgroup.launch.failures.evidence import RANK_PREFIX, TRACEBACK_HEADER  # for an interrupt only

        held, self._held = self._held, b""
        lines = RANK_PREFIX.sub("", held.decode(errors="replace")).rstrip().splitlines()
        if not lines or lines[0] != TRACEBACK_HEADER or not lines[-1].startswith("KeyboardInterrupt"):
            return held
        frames = [match.groups() for match in map(_FRAME.match, lines) if match]
        place = " at {}, line {}".format(*frames[-1]) if frames else ""
        return f"KeyboardInterrupt{place}\n".encode()


class OutputStream(PipeReader):
    """One stream of a rank, read from a pipe; ``tail`` is the end of the data read."""

    def __init__(self, descriptor: int, output: StreamOutput) -> None:
        super().__init__(descriptor, output.sink)
        self.tail: bytearray = bytearray()
        self.traceback_time: float | None = None
        self.interrupts: InterruptFilter = InterruptFilter()
        self._output = output

    def _finish(self) -> None:
        self._output.show(self.interrupts.finish())
        self._output.finish()

    def _take(self, data: bytes) -> None:
        if _HEADER in self.tail[-len(_HEADER) :] + data:
            self.traceback_time = time.monotonic()
        self.tail += data
        del self.tail[:-TAIL_BYTES]
        self._output.show(self.interrupts.feed(data))
        self._output.keep(data)


class RankProcess:
    """A rank's process, in a session and process group of its own.

    Rank 0 inherits the launcher's stdin, the others have an empty one. ``notice`` is the descriptor of the preemption
    notice. ``killed_for`` is the reason why the launcher killed it as a failed rank.
    """

    def __init__(self, plan: RankPlan, notice: int) -> None:
        self.rank: int = plan.rank
        self.error_file: str = plan.output.error_file
        self.ending: Ending | None = None
        self.ended_by_launcher = False
        self.killed_for: str = ""
        out, err = os.pipe(), os.pipe()
        self.streams: list[OutputStream] = [
            OutputStream(pipe[0], stream) for pipe, stream in zip((out, err), plan.output.streams, strict=True)
        ]
        try:
            self._process = subprocess.Popen(
                dying_with_this_process(plan.command, plan.cpus),
                env={**plan.environment, PROCGROUP_NOTICE.name: str(notice)},
                stdin=None if plan.rank == 0 else subprocess.DEVNULL,
                stdout=out[1],
                stderr=err[1],
                start_new_session=True,
                pass_fds=[notice],
            )
        finally:
            os.close(out[1])
            os.close(err[1])
        self.pid: int = self._process.pid
        try:
            # Readable once the process has ended; its pid is not used again until it is reaped.
            self.descriptor: int = os.pidfd_open(self.pid)
        except OSError:
            self._process.kill()
            self._process.wait()
            raise

    @property
    def stderr(self) -> OutputStream:
        return self.streams[1]

    def signal(self, number: int) -> None:
        """Send a signal to the rank's process group; nothing happens when the rank has ended."""
        if self.ending is None:
            self.stderr.interrupts.active |= number == signal.SIGINT
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, number)

    def reap(self) -> bool:
        """Return whether the rank has ended; if so, kill the rest of its process group.

        The group is signalled before the rank's exit status is collected: until then the kernel gives
        its pid to no other process.
        """
        if self.ending is None:
            if os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
                return False
            self.signal(signal.SIGKILL)
            _, status, usage = os.wait4(self.pid, 0)
            os.close(self.descriptor)
            self._process.returncode = os.waitstatus_to_exitcode(status)
            self.ending = Ending(self._process.returncode, time.monotonic(), usage.ru_maxrss * 1024)
            for stream in self.streams:
                stream.drain()
        return True


def dying_with_this_process(command: Iterable[str], cpus: Iterable[int] = ()) -> list[str]:
    """Return the command that runs ``command`` in a child that the kernel kills when this process ends.

    ``cpus`` are those that the child may run on, by default all; where the system refuses them, the child says so on
    stderr and goes on. See native/launch/die_with_parent.cpp.
    """
    program = Path(_native.__file__).with_name("die_with_parent")
    return [str(program), str(os.getpid()), ",".join(map(str, sorted(cpus))), *command]


def describe_error(error: OSError) -> str:
    """Return the text of an error of starting a process; for too many open files, the limit and how to raise it."""
    if error.errno != errno.EMFILE:
        return str(error)
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return f"this process may have no more than {limit} open files; raise the limit with: ulimit -n"


# Of /proc/PID/stat; see proc(5).
_STOPPED, _STUCK = "Tt", "D"


class HungRanks:
    """Reports the ranks of a round that hang, and kills them after ``timeout`` seconds (None: never).

    ``last_reports`` is the time of each rank's last call of ``procgroup.report``, in monotonic seconds.
    """

    def __init__(self, timeout: float | None, last_reports: Mapping[int, float], say: Callable[[str], None]) -> None:
        began = time.monotonic()
        self.next_look: float = began + HANG_LOOK_SECONDS
        self._timeout = timeout
        self._no_report_by: float | None = None if timeout is None else began + max(timeout, HANG_REPORT_SECONDS)
        self._last_reports = last_reports
        self._say = say
        self._since: dict[int, tuple[str, float]] = {}
        self._reported: set[int] = set()

    def look(self, ranks: Sequence[RankProcess]) -> None:
        """Check the running ranks, if the next check is due."""
        now = time.monotonic()
        if now < self.next_look:
            return
        self.next_look = now + HANG_LOOK_SECONDS
        for rank in ranks:
            self._look_at(rank, now)
        if self._no_report_by is not None and now >= self._no_report_by:
            self._no_report_by = None
            self._say_reports_are_missing()

    def _say_reports_are_missing(self) -> None:
        """Print, where no rank has reported, that a rank in an endless loop cannot be told from one that works."""
        if not self._last_reports:
            self._say(
                f"--hang-timeout {self._timeout:g}: no rank of this node has called procgroup.report yet, so only "
                "ranks that are stopped or stuck in the kernel count as hanging"
            )

    def _look_at(self, rank: RankProcess, now: float) -> None:
        state = process_state(rank.pid)
        kind = next((kind for kind in (_STOPPED, _STUCK) if state and state in kind), "")
        if kind != self._since.get(rank.pid, ("", 0.0))[0]:
            self._since[rank.pid] = (kind, now)
            self._reported.discard(rank.pid)
        seconds = now - self._since[rank.pid][1] if kind else 0.0
        if seconds >= HANG_REPORT_SECONDS and rank.pid not in self._reported:
            self._reported.add(rank.pid)
            self._say(f"rank {rank.rank} (pid {rank.pid}) {_describe(kind, rank.pid)} for {seconds:.0f} s")
        silent = now - self._last_reports.get(rank.rank, now)
        if self._timeout is not None and max(seconds, silent) >= self._timeout and not rank.killed_for:
            what = f"it {_describe(kind, rank.pid)}" if seconds >= silent else "it has not called procgroup.report"
            rank.killed_for = f"{what} for {max(seconds, silent):.0f} s (--hang-timeout {self._timeout:g})"
            self._say(f"killing rank {rank.rank} (pid {rank.pid}): {rank.killed_for}")
            rank.signal(signal.SIGKILL)


def process_state(pid: int) -> str:
    """Return the letter of the process's state, as in /proc/PID/stat; "" for one that has ended."""
    try:
        # The name is in parentheses and may contain any character.
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return ""


def _describe(kind: str, pid: int) -> str:
    if kind == _STOPPED:
        return f"has been stopped (kill -CONT {pid} lets it go on)"
    try:
        where = Path(f"/proc/{pid}/wchan").read_text().strip("0\n")
    except OSError:
        where = ""
    return f"has been stuck in the kernel (state D{f', in {where}' if where else ''})"
