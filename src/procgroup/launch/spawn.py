"""Run a function in several processes: ``spawn``, ``start_processes``, and the context that joins them.

::

    parent                                             child i
    StoreServer (unless MASTER_ADDR/PORT are set)
    Process(...).start()  ──environment, fn, args──>   die_with_parent; fn(i, *args)
    ProcessContext.join() <──exit status, Record────   ends

The first failure is reported, by the time at which it happened, not by the order in which processes end. The
kernel ends the children when the parent is killed; Ctrl-C in ``join`` ends them within INTERRUPT_SECONDS.
"""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from multiprocessing.connection import Connection
from multiprocessing.context import BaseContext
from multiprocessing.process import BaseProcess
from typing import Any

from procgroup.environ import MASTER_ADDR, MASTER_PORT
from procgroup.launch.die_with_parent import die_with_parent, die_with_writer
from procgroup.launch.hosted_store import HostedStore
from procgroup.launch.lasting_starter import LastingStarter
from procgroup.launch.spawn_errors import (
    ProcessException,
    ProcessExitedException,
    ProcessRaisedException,
    Record,
    SpawnFailure,
)

__all__ = [
    "ProcessContext",
    "ProcessException",
    "ProcessExitedException",
    "ProcessRaisedException",
    "SpawnContext",
    "spawn",
    "start_processes",
]

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
        self.processes = list(processes)
        self.sentinels = {process.sentinel: index for index, process in enumerate(processes)}
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


def spawn(
    fn: Callable[..., object],
    args: Iterable[Any] = (),
    nprocs: int = 1,
    join: bool = True,
    daemon: bool = False,
    start_method: str = "spawn",
) -> SpawnContext | None:
    """Run ``fn(i, *args)`` in ``nprocs`` processes, i from 0; with ``join`` wait for all of them.

    Returns None after joining, else the context. Raises ProcessRaisedException or ProcessExitedException for
    the failure that happened first. ``fn`` and ``args`` have to be picklable (except with ``fork``), and a
    script has to guard the call by ``if __name__ == "__main__":``.

    Without MASTER_ADDR and MASTER_PORT in the environment the caller hosts a store on a free port of the
    loopback interface, and the children's environment leads to it.
    """
    return start_processes(fn, args, nprocs, join, daemon, start_method)


def start_processes(
    fn: Callable[..., object],
    args: Iterable[Any] = (),
    nprocs: int = 1,
    join: bool = True,
    daemon: bool = False,
    start_method: str = "spawn",
) -> SpawnContext | None:
    """Do what ``spawn`` does, with any start method: spawn, fork or forkserver.

    Raises ValueError for an unknown start method or a negative number of processes.
    """
    if nprocs < 0:
        raise ValueError(f"expected nprocs to be at least 0, got {nprocs}")
    context = multiprocessing.get_context(start_method)
    started = _start(context, fn, tuple(args), nprocs, daemon)
    if not join:
        return started
    while not started.join():
        pass
    return None


def _start(
    context: BaseContext, fn: Callable[..., object], args: tuple[Any, ...], nprocs: int, daemon: bool
) -> SpawnContext:
    store = None if nprocs == 0 or MASTER_ADDR.is_set() or MASTER_PORT.is_set() else HostedStore()
    environment = store.environment() if store else {}
    # Under forkserver the children's parent is a server that lives as long as they do.
    parent_pid = None if context.get_start_method() == "forkserver" else os.getpid()
    processes: list[BaseProcess] = []
    reports: list[Connection] = []
    try:
        for index in range(nprocs):
            report, child_report = context.Pipe(duplex=False)
            reports.append(report)
            arguments = (fn, index, args, child_report, parent_pid, environment)
            process: BaseProcess = context.Process(target=_run, args=arguments, daemon=daemon)  # type: ignore[attr-defined]
            _STARTER.start(process)
            child_report.close()
            processes.append(process)
        return SpawnContext(processes, reports, store)
    except BaseException:
        SpawnContext(processes, reports, store).end(INTERRUPT_SECONDS)
        raise


def _run(
    fn: Callable[..., object],
    index: int,
    args: tuple[Any, ...],
    report: Connection,
    parent_pid: int | None,
    environment: Mapping[str, str],
) -> None:
    """Be a child: run the function, and report when it raises."""
    try:
        _die_with_caller(parent_pid)
        os.environ.update(environment)
        fn(index, *args)
    except KeyboardInterrupt:
        pass  # The parent ends all its children, and reports the interrupt once.
    except SystemExit:
        raise
    except BaseException as error:
        Record.of(error).send(report)
        raise SystemExit(1) from None


def _die_with_caller(parent_pid: int | None) -> None:
    """End with the process that called ``spawn``, whether it is the parent or a fork server's client."""
    caller = multiprocessing.parent_process()
    if parent_pid is not None:
        die_with_parent(parent_pid)
    elif caller is not None:
        die_with_writer(caller.sentinel)


_STARTER = LastingStarter()
