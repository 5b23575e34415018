"""Who hosts the TCP store of a rendezvous, and for how long.

Rank 0 hosts it, unless the launcher does. A process that hosts one keeps it until it exits, also after
destroy_process_group and after an initialisation that failed: a rank that is quicker to initialise
again must find the same store, not one that is about to end. When the process ends with an
exception, the store ends with it, and the others receive the failure at once.

Everything about TCPStore is imported when it is needed: a world of 1 does without the native module.
"""

from __future__ import annotations

import errno
import os
import secrets
import socket
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from procgroup import types
from procgroup.errors import DistError, DistNetworkError, RendezvousConflict
from procgroup.process import environ, log
from procgroup.stores.start_up import Member, read_member
from procgroup.stores.store import Store
from procgroup.types import Timeout

if TYPE_CHECKING:
    from procgroup.stores.tcp import TCPStore

_lock = threading.Lock()
_hosted: dict[tuple[int, str, int], TCPStore] = {}
_of_rank_0: weakref.WeakSet[Store] = weakref.WeakSet()
"""Stores of this process whose server is in the process of rank 0."""

_made_keys: set[str] = set()
"""Secrets that this process made as rank 0."""

_HOST_KEY = "rendezvous/host"
_HOST_SECONDS = 5.0
_REPEAT_SECONDS = 60.0

LOOK_AT_RANK_0 = (
    "Look at the output of rank 0; or the start has failed before this rank came, which the output of the others says."
)


def open_store(host: str, port: int, *, rank: int, timeout: Timeout) -> Store:
    """Return the store at host:port, connected; on rank 0, host it there, unless the launcher does.

    Raises DistNetworkError when the address is taken by another program or is not reached in ``timeout``, and
    RendezvousConflict where another rank 0 of this job hosts the store.
    """
    from procgroup.stores.tcp import TCPStore

    limit = types.seconds(timeout)
    report_after = environ.PROCGROUP_WAIT_REPORT_SECONDS.get()
    launcher_store = launcher_store_address(host, port)
    if launcher_store is not None:
        host, port = launcher_store
        if environ.PROCGROUP_STORE_KEY.is_set():
            os.environ[environ.PROCGROUP_JOB_KEY.name] = environ.PROCGROUP_STORE_KEY.get()
    elif rank == 0:
        return host_store(host, port, limit)
    host_name = "rank 0" if launcher_store is None else "the launcher"
    line = f"rank {rank} has not reached the store at {host}:{port}, which {host_name} hosts; it tries for {limit:g} s"
    try:
        with reporting(line, report_after):
            store = TCPStore(host, port, is_master=False, timeout=limit, wait_for_workers=False)
    except DistNetworkError as error:
        if launcher_store is None:
            error.args = (f"{error} Rank 0 hosts this store, and has not come or has ended. {LOOK_AT_RANK_0}",)
        raise
    if launcher_store is None:
        note_rank_0_hosts(store)
    return store


@contextmanager
def reporting(line: str, first: float) -> Iterator[None]:
    """Warn with ``line`` while this goes on: after ``first`` seconds (0: never), and once a minute from then on."""
    has_ended = threading.Event()

    def report() -> None:
        pause = first
        while not has_ended.wait(min(pause, threading.TIMEOUT_MAX)):
            log.warning(line)
            pause = _REPEAT_SECONDS

    reporter = threading.Thread(target=report, name="procgroup-start", daemon=True)
    if first > 0:
        with suppress(RuntimeError):  # without memory for a thread there is no line, which ends nothing
            reporter.start()
    try:
        yield
    finally:
        has_ended.set()
        if reporter.is_alive():
            reporter.join()


def use_job_key(job_key: str) -> None:
    """Prove this secret from now on, which rank 0 has made and announced; announce it where this process is rank 0."""
    os.environ[environ.PROCGROUP_JOB_KEY.name] = job_key
    _made_keys.add(job_key)


def note_rank_0_hosts(store: Store) -> None:
    """Keep in mind that this store ends with the process of rank 0."""
    _of_rank_0.add(store)


def ends_with_rank_0(store: Store) -> bool:
    """Return whether the store that open_store or another rendezvous returned ends with the process of rank 0."""
    with _lock:
        return store in _of_rank_0 or any(store is hosted for hosted in _hosted.values())


def host_of(store: Store, seconds: float) -> Member | None:
    """Return the rank whose process hosts a store that open_store returned; None where no rank does.

    If the store does not answer within ``seconds``, as when that process has just ended, the record's pid is 0.
    """
    if store not in _of_rank_0:
        return None
    with suppress(DistError):
        return read_member(store.get(_HOST_KEY, min(seconds, _HOST_SECONDS)).decode(errors="replace"))
    return Member(0, 0, getattr(store, "host", "?"), 0, "", True)


def close_unless_hosted(store: Store) -> None:
    """Close a store that open_store or another rendezvous returned; one that this process hosts stays."""
    with _lock:
        is_hosted = any(store is hosted for hosted in _hosted.values())
    if not is_hosted:
        store.close()


def host_store(host: str, port: int, limit: float) -> TCPStore:
    """Return the store that this process hosts there, the same each time; ``port`` 0 is any free one."""
    from procgroup.stores.tcp import TCPStore

    with _lock:
        place = (os.getpid(), host, port)
        if place not in _hosted:
            try:
                store = TCPStore(host, port, is_master=True, timeout=limit, wait_for_workers=False)
            except DistNetworkError as error:
                is_taken = isinstance(error.__cause__, OSError) and error.__cause__.errno == errno.EADDRINUSE
                if not is_taken or (other := _other_rank_0(host, port, limit)) is None:
                    raise
                raise RendezvousConflict(
                    f"rank 0 is there already: {other.process()} hosts the store at {host}:{port}, where this "
                    f"process (pid {os.getpid()}) was to host it. Start each rank once; or choose another port "
                    "for another job."
                ) from error
            store.set(_HOST_KEY, Member(0, 0, socket.gethostname(), os.getpid(), secrets.token_hex(8), True).line())
            _hosted[place] = store
        return _hosted[place]


def _other_rank_0(host: str, port: int, limit: float) -> Member | None:
    """Return the rank 0 of this job that hosts a store there; None where something else listens, or nothing."""
    from procgroup.stores.tcp import TCPStore

    seconds = min(limit, _HOST_SECONDS)
    with suppress(DistError):
        store = TCPStore(host, port, is_master=False, timeout=seconds, wait_for_workers=False)
        try:
            return read_member(store.get(_HOST_KEY, seconds).decode(errors="replace"))
        finally:
            store.close()
    return None


def host_announced_store(host: str, limit: float) -> tuple[TCPStore, str]:
    """Host a store at a free port, on rank 0; return it, and the secret to announce to the other ranks.

    The secret is made here, the same for the life of the process, and set as PROCGROUP_JOB_KEY. A secret that the
    user gave there is not announced: "" is returned.
    """
    if not environ.PROCGROUP_JOB_KEY.is_set():
        os.environ[environ.PROCGROUP_JOB_KEY.name] = secrets.token_hex(32)
        _made_keys.add(environ.PROCGROUP_JOB_KEY.get())
    key = environ.PROCGROUP_JOB_KEY.get()
    return host_store(host, 0, limit), key if key in _made_keys else ""


def launcher_store_address(host: str, port: int) -> tuple[str, int] | None:
    """Return the address of the store that procgroup's launcher hosts for the ranks that meet here; else None."""
    store = environ.PROCGROUP_STORE.get()
    if not store or (environ.PROCGROUP_MASTER.get() or store) != f"{host}:{port}":
        return None
    name, _, number = store.rpartition(":")
    return name, int(number)
