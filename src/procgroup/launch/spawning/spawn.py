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
import os
from collections.abc import Callable, Iterable, Mapping
from multiprocessing.connection import Connection
from multiprocessing.context import BaseContext
from multiprocessing.process import BaseProcess
from typing import Any, Literal, overload

from procgroup.environ import MASTER_ADDR, MASTER_PORT, PROCGROUP_JOB_KEY, PROCGROUP_STORE_KEY, Variable
from procgroup.launch.nodes.hosted_store import HostedStore
from procgroup.launch.ranks.die_with_parent import die_with_parent, die_with_writer
from procgroup.launch.spawning.lasting_starter import LastingStarter
from procgroup.launch.spawning.process_context import INTERRUPT_SECONDS, ProcessContext, SpawnContext
from procgroup.launch.spawning.spawn_errors import (
    ProcessException,
    ProcessExitedException,
    ProcessRaisedException,
    Record,
)
from procgroup.process_end import note_exception

__all__ = [
    "ProcessContext",
    "ProcessException",
    "ProcessExitedException",
    "ProcessRaisedException",
    "SpawnContext",
    "spawn",
    "start_processes",
]


@overload
def spawn(
    fn: Callable[..., object],
    args: Iterable[Any] = (),
    nprocs: int = 1,
    join: Literal[True] = True,
    daemon: bool = False,
    start_method: str = "spawn",
) -> None: ...


@overload
def spawn(
    fn: Callable[..., object],
    args: Iterable[Any] = (),
    nprocs: int = 1,
    join: Literal[False] = ...,
    daemon: bool = False,
    start_method: str = "spawn",
) -> SpawnContext: ...


@overload
def spawn(
    fn: Callable[..., object],
    args: Iterable[Any] = (),
    nprocs: int = 1,
    join: bool = ...,
    daemon: bool = False,
    start_method: str = "spawn",
) -> SpawnContext | None: ...


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


@overload
def start_processes(
    fn: Callable[..., object],
    args: Iterable[Any] = (),
    nprocs: int = 1,
    join: Literal[True] = True,
    daemon: bool = False,
    start_method: str = "spawn",
) -> None: ...


@overload
def start_processes(
    fn: Callable[..., object],
    args: Iterable[Any] = (),
    nprocs: int = 1,
    join: Literal[False] = ...,
    daemon: bool = False,
    start_method: str = "spawn",
) -> SpawnContext: ...


@overload
def start_processes(
    fn: Callable[..., object],
    args: Iterable[Any] = (),
    nprocs: int = 1,
    join: bool = ...,
    daemon: bool = False,
    start_method: str = "spawn",
) -> SpawnContext | None: ...


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
    hosts = nprocs > 0 and not MASTER_ADDR.is_set() and not MASTER_PORT.is_set()
    store = HostedStore(job_key=PROCGROUP_JOB_KEY.get()) if hosts else None
    environment = store.environment(_key_variable()) if store else {}
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


def _key_variable() -> Variable[str]:
    """Return where children find the store's secret.

    A secret of the user is the whole job's. One that is made here is this store's alone: children that meet
    elsewhere, perhaps with those of another ``spawn``, must not have a secret that the others lack.
    """
    return PROCGROUP_JOB_KEY if PROCGROUP_JOB_KEY.is_set() else PROCGROUP_STORE_KEY


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
        note_exception(error)
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
