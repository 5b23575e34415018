"""Run a function in several processes: ``spawn``, ``start_processes``, and the context that joins them.

::

    parent                                             child i
    StoreServer (unless MASTER_ADDR/PORT are set)
    Process(...).start()  ──environment, fn, args──>   die_with_parent; fn(i, *args)
    ProcessContext.join() <──exit status, Report────   ends

The processes are multiprocessing's, because only these can inherit its queues, locks and shared memory, and be forked.
The first failure is found as in ``procgroup run``: by cause, then by time. The kernel kills the children when the
parent is killed; Ctrl-C in ``join`` ends them within INTERRUPT_SECONDS.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Callable, Iterable
from multiprocessing.connection import Connection
from multiprocessing.context import BaseContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from pickle import PicklingError
from typing import Any, Literal, overload

from procgroup.cluster.control_group import OutOfMemoryKills
from procgroup.errors import ProcessException, ProcessExitedException, ProcessRaisedException
from procgroup.launch.deadlines import INTERRUPT_SECONDS
from procgroup.launch.hosted_store import HostedStore
from procgroup.launch.spawning import child
from procgroup.launch.spawning.lasting_starter import LastingStarter
from procgroup.launch.spawning.process_context import ProcessContext, SpawnContext
from procgroup.process.environ import MASTER_ADDR, MASTER_PORT, PROCGROUP_JOB_KEY, PROCGROUP_STORE_KEY

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
    the failure that the others follow from; ValueError for a start method other than spawn, fork and forkserver,
    and for a negative number of processes. ``fn`` and ``args`` have to be picklable (except with ``fork``), and a
    script has to guard the call by ``if __name__ == "__main__":``.

    Without MASTER_ADDR and MASTER_PORT in the environment the caller hosts a store on a free port of the
    loopback interface, and the children's environment leads to it.
    """
    if nprocs < 0:
        raise ValueError(f"expected nprocs to be at least 0, got {nprocs}")
    context = multiprocessing.get_context(start_method)
    if start_method != "fork":
        _require_importable(fn)
    started = _start(context, fn, tuple(args), nprocs, daemon)
    if not join:
        return started
    while not started.join():
        pass
    return None


start_processes = spawn
"""torch.multiprocessing's name for any start method."""


def _start(
    context: BaseContext, fn: Callable[..., object], args: tuple[Any, ...], nprocs: int, daemon: bool
) -> SpawnContext:
    hosts = nprocs > 0 and not MASTER_ADDR.is_set() and not MASTER_PORT.is_set()
    store = HostedStore(job_key=PROCGROUP_JOB_KEY.get()) if hosts else None
    # A secret of the user belongs to the whole job. A secret that is made here belongs to this store only: children
    # that meet elsewhere, perhaps with those of another ``spawn``, must not use a secret that the others lack.
    key_variable = PROCGROUP_JOB_KEY if PROCGROUP_JOB_KEY.is_set() else PROCGROUP_STORE_KEY
    environment = store.record().environment(key_variable) if store else {}
    # Under forkserver the children's parent is a server that lives as long as they do.
    parent_pid = None if context.get_start_method() == "forkserver" else os.getpid()
    kills_before = OutOfMemoryKills.so_far()
    processes: list[BaseProcess] = []
    reports: list[Connection] = []
    try:
        for index in range(nprocs):
            report, child_report = context.Pipe(duplex=False)
            reports.append(report)
            arguments = (fn, index, args, child_report, parent_pid, environment)
            process: BaseProcess = context.Process(target=child.run, args=arguments, daemon=daemon)  # type: ignore[attr-defined]
            try:
                _STARTER.start(process, processes)
            except (PicklingError, AttributeError, TypeError) as error:  # pickle raises all of these
                raise type(error)(f"spawn cannot give `fn` and `args` to a process: {error}. {_ADVICE}") from error
            child_report.close()
        return SpawnContext(processes, reports, store, kills_before)
    except BaseException:
        SpawnContext(processes, reports, store, kills_before).end(INTERRUPT_SECONDS)
        raise


def _require_importable(fn: Callable[..., object]) -> None:
    """Raise PicklingError where the processes could not import ``fn``: they import the program by its file."""
    main = sys.modules["__main__"]
    file = getattr(main, "__file__", None)
    has_file = getattr(main, "__spec__", None) is not None or (file is not None and Path(file).exists())
    if not has_file and (file is not None or getattr(fn, "__module__", None) == "__main__"):
        name = getattr(fn, "__qualname__", repr(fn))
        raise PicklingError(
            f"spawn: the processes cannot import `{name}`, because its program is in no file. {_ADVICE}"
        )


_STARTER = LastingStarter()

_ADVICE = (
    "Define `fn` at the top level of a module, and import it from there. In a notebook or a shell, pass "
    'start_method="fork", or run ranks as threads: procgroup.testing.run_ranks(fn, nprocs).'
)
