"""The context that joins processes which were started together, and raises the failure that the others follow from."""

from __future__ import annotations

import contextlib
import multiprocessing.connection
import os
import signal
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from multiprocessing.process import BaseProcess
from typing import TYPE_CHECKING

from procgroup.cluster.control_group import OutOfMemoryKills
from procgroup.errors import ProcessException, ProcessExitedException, ProcessRaisedException
from procgroup.launch.deadlines import CAUSE_SECONDS, INTERRUPT_SECONDS, SHUTDOWN_SECONDS, UNKILLABLE_SECONDS
from procgroup.launch.hosted_store import HostedStore
from procgroup.launch.spawning.child import ChildReport, receive_report

if TYPE_CHECKING:
    from procgroup.launch.failures.failure import RankFailure


class ProcessContext:
    """Processes that were started together. Keep this object as long as they run: it hosts their store.

    ``processes`` are the multiprocessing processes; ``sentinels`` maps the sentinel of each that has not been
    joined to its index. ``reports`` are the receiving ends of the children's reports, and ``kills_before`` the
    counters from before the start.
    """

    def __init__(
        self,
        processes: Sequence[BaseProcess],
        reports: Sequence[Connection],
        store: HostedStore | None,
        kills_before: OutOfMemoryKills,
    ) -> None:
        self.processes: list[BaseProcess] = list(processes)
        self.sentinels: dict[int, int] = {process.sentinel: index for index, process in enumerate(processes)}
        self._pidfds: dict[int, int] = _open_pidfds(self.processes)
        self._reports = list(reports)
        self._received: dict[int, ChildReport] = {}
        self._store = store
        self._kills_before = kills_before
        self._ends: dict[int, float] = {}
        self._first: RankFailure | None = None

    def pids(self) -> list[int | None]:
        """Return the process ids, in order."""
        return [process.pid for process in self.processes]

    def join(self, timeout: float | None = None, grace_period: float | None = None) -> bool:
        """Wait until a process ends, at most ``timeout`` seconds; return whether all have succeeded.

        To wait for all, call it until it returns True. When a process failed, the others get
        ``grace_period`` seconds to end by themselves, then SIGTERM, then the same again (30 s without one),
        then SIGKILL; then ProcessRaisedException or ProcessExitedException is raised for the failure that
        the others follow from.
        """
        if self._first is None:
            try:
                self._collect(timeout)
                self._first = self._find_first()
                if self._first is None:
                    if not self.sentinels:
                        self._release()
                    return not self.sentinels
                self._wait_for_all(grace_period or 0.0)
            except BaseException:
                self.end(INTERRUPT_SECONDS)
                raise
            self.end(SHUTDOWN_SECONDS if grace_period is None else grace_period)
        raise _exception(self._first)

    def end(self, seconds: float) -> None:
        """End the running processes: SIGTERM, so many seconds, SIGKILL. Then release all resources."""
        for process in self.processes:
            if process.is_alive():
                process.terminate()
        try:
            self._wait_for_all(seconds)
        finally:
            for process in self.processes:
                if process.is_alive():
                    process.kill()
            self._wait_for_all(UNKILLABLE_SECONDS)
            self.sentinels.clear()
            self._release()

    def _release(self) -> None:
        if self._store is not None:
            self._store.close()
        for report in self._reports:
            report.close()
        while self._pidfds:
            os.close(self._pidfds.popitem()[1])

    def _collect(self, timeout: float | None) -> None:
        """Wait until a process ends, and record the time."""
        if self.sentinels and not self._record_ends():
            multiprocessing.connection.wait([*self.sentinels, *self._pidfds.values()], timeout)
            self._record_ends()

    def _record_ends(self) -> bool:
        """Record the processes that have ended since the last call; return whether there are any."""
        ended = [item for item in self.sentinels.items() if self.processes[item[1]].exitcode is not None]
        for sentinel, index in ended:
            del self.sentinels[sentinel]
            self._ends[index] = time.monotonic()
            if index in self._pidfds:
                os.close(self._pidfds.pop(index))
        return bool(ended)

    def _wait_for_all(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while self.sentinels and (remaining := deadline - time.monotonic()) > 0:
            self._collect(remaining)

    def _find_first(self) -> RankFailure | None:
        """Return the failure that the others follow from; while all blame another process, await its own."""
        if not any(self.processes[index].exitcode for index in self._ends):
            return None
        from procgroup.launch.failures.report import first_failure  # needed after a failure only

        failures = self._failures()
        deadline = time.monotonic() + CAUSE_SECONDS
        while self.sentinels and all(failure.is_secondary for failure in failures):
            if (remaining := deadline - time.monotonic()) <= 0:
                break
            self._collect(remaining)
            failures = self._failures()
        return first_failure(failures)

    def _failures(self) -> list[RankFailure]:
        """Return the failures so far, including processes that have reported an exception and not yet ended."""
        from procgroup.launch.failures.failure import RankFailure

        kills = OutOfMemoryKills.so_far().since(self._kills_before)
        failures = []
        for index, process in enumerate(self.processes):
            report = self._report(index)
            if report is None and not (index in self._ends and process.exitcode):
                continue
            failures.append(
                RankFailure(
                    rank=index,
                    pid=process.pid or 0,
                    exit_code=process.exitcode or 1,
                    time=report.time if report else self._ends[index],
                    stderr="",
                    kills=kills,
                    record=report and report.record,
                )
            )
        return failures

    def _report(self, index: int) -> ChildReport | None:
        if index not in self._received and (report := receive_report(self._reports[index])) is not None:
            self._received[index] = report
        return self._received.get(index)


class SpawnContext(ProcessContext):
    """The context that ``spawn`` and ``start_processes`` return."""


def _open_pidfds(processes: Sequence[BaseProcess]) -> dict[int, int]:
    """Return a pidfd of each process by index; it is readable once the process has ended.

    A process's sentinel is not readable while children live that the process has forked, because they inherit the
    sentinel's other end. For processes of a fork server, the server holds the other end.
    """
    pidfds = {}
    for index, process in enumerate(processes):
        if process.pid is not None and not isinstance(process, ForkServerProcess):
            with contextlib.suppress(OSError):  # the process has ended, and multiprocessing has reaped it
                pidfds[index] = os.pidfd_open(process.pid)
    return pidfds


def _exception(first: RankFailure) -> ProcessException:
    """Return the exception of ``join``: torch's text, and whether the kernel killed the process for want of memory."""
    ending = f"signal {first.signal_name}" if first.signal_name else f"exit code {first.exit_code}"
    kills = first.kills if first.exit_code == -signal.SIGKILL else None
    memory = f"; {kills.verdict}" if kills is not None and kills.any_of_group else ""
    return process_exception(first, f"Process {first.rank}", f"process {first.rank} terminated with {ending}{memory}")


def process_exception(failure: RankFailure, process: str, ending: str) -> ProcessException:
    """Return the exception of the parent for a failure; ``ending`` is its text where the function did not raise.

    ``process`` names the process in the text that holds its traceback.
    """
    if failure.exception:
        text = f"\n\n-- {process} terminated with the following error:\n{failure.evidence}"
        return ProcessRaisedException(text, failure.rank, failure.pid)
    return ProcessExitedException(ending, failure.rank, failure.pid, failure.exit_code, failure.signal_name)
