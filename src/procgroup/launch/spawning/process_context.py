"""The context that joins processes which were started together, and decides which failure is reported."""

from __future__ import annotations

import multiprocessing.connection
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess

from procgroup.launch.nodes.hosted_store import HostedStore
from procgroup.launch.spawning.spawn_errors import Record, SpawnFailure

TERMINATE_SECONDS = 30.0
"""How long processes have to end after SIGTERM when ``join`` gets no grace period."""

INTERRUPT_SECONDS = 2.0
"""The same after Ctrl-C."""

UNKILLABLE_SECONDS = 30.0
"""How long to wait for a process after SIGKILL; one that hangs in the kernel is left."""

SETTLE_SECONDS = 2.0
"""How long a failure that blames another process waits for that process's own."""


class ProcessContext:
    """Processes that were started together. Keep it as long as they run: it hosts their store.

    ``processes`` are the multiprocessing processes; ``sentinels`` maps the sentinel of each that has not been
    joined to its index.
    """

    def __init__(
        self, processes: Sequence[BaseProcess], reports: Sequence[Connection], store: HostedStore | None = None
    ) -> None:
        self.processes: list[BaseProcess] = list(processes)
        self.sentinels: dict[int, int] = {process.sentinel: index for index, process in enumerate(processes)}
        self._reports = list(reports)
        self._records: dict[int, Record] = {}
        self._store = store
        self._ends: dict[int, float] = {}
        self._first: SpawnFailure | None = None

    def pids(self) -> list[int | None]:
        """Return the process ids, in order."""
        return [process.pid for process in self.processes]

    def join(self, timeout: float | None = None, grace_period: float | None = None) -> bool:
        """Wait until a process ends, at most ``timeout`` seconds; return whether all have ended well.

        To wait for all, call it until it returns True. When a process failed, the others get
        ``grace_period`` seconds to end by themselves, then SIGTERM, then the same again (30 s without one),
        then SIGKILL; then ProcessRaisedException or ProcessExitedException is raised for the failure that
        happened first.
        """
        if self._first is None:
            try:
                self._collect(timeout)
                self._first = self._find_first()
                if self._first is None:
                    return self._all_ended()
                self._wait_for_all(grace_period or 0.0)
            except BaseException:
                self.end(INTERRUPT_SECONDS)
                raise
            self.end(TERMINATE_SECONDS if grace_period is None else grace_period)
        raise self._first.exception()

    def end(self, seconds: float) -> None:
        """End the processes that still run: ask, wait so many seconds, kill. Then let go of everything."""
        for process in self.processes:
            if process.is_alive():
                process.terminate()
        try:
            self._wait_for_all(seconds)
        finally:
            for process in self.processes:
                if process.is_alive():
                    process.kill()
                process.join(UNKILLABLE_SECONDS)
            self.sentinels.clear()
            self._release()

    def _all_ended(self) -> bool:
        if not self.sentinels:
            self._release()
        return not self.sentinels

    def _release(self) -> None:
        if self._store is not None:
            self._store.close()
        for report in self._reports:
            report.close()

    def _collect(self, timeout: float | None) -> None:
        """Wait for the next end, and note when it was seen."""
        waited_for = list(self.sentinels)
        for sentinel in multiprocessing.connection.wait(waited_for, timeout) if waited_for else []:
            assert isinstance(sentinel, int)
            index = self.sentinels.pop(sentinel)
            self._ends[index] = time.monotonic()
            self.processes[index].join()

    def _wait_for_all(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while self.sentinels and (remaining := deadline - time.monotonic()) > 0:
            self._collect(remaining)

    def _find_first(self) -> SpawnFailure | None:
        """Return the failure that happened first; while all blame another process, give that one a moment."""
        deadline = time.monotonic() + SETTLE_SECONDS
        while (failures := self._failures()) and all(failure.secondary for failure in failures) and self.sentinels:
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                break
            self._collect(remaining)
        return min(failures, key=lambda failure: (failure.secondary, failure.time), default=None)

    def _failures(self) -> list[SpawnFailure]:
        """Return the failures after an end, those of processes included that are still on their way out."""
        if not any(self.processes[index].exitcode for index in self._ends):
            return []
        failures = []
        for index, process in enumerate(self.processes):
            record = self._record(index)
            if record is not None:
                failures.append(SpawnFailure(index, process.pid or 0, 1, record.time, record))
            elif index in self._ends and process.exitcode:
                failures.append(SpawnFailure(index, process.pid or 0, process.exitcode, self._ends[index], None))
        return failures

    def _record(self, index: int) -> Record | None:
        if index not in self._records and (record := Record.receive(self._reports[index])) is not None:
            self._records[index] = record
        return self._records.get(index)


class SpawnContext(ProcessContext):
    """The context that ``spawn`` and ``start_processes`` return."""
