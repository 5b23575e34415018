"""A store on a free port of rank 0's host, which the launcher itself announces to the other ranks.

The launchers of MPI carry a short text from rank 0 to all tasks (PMI, PMIx), and so does MPI. Here the text is the
store's address and its secret: a process that cannot read the launcher's own messages cannot join. A secret that the
user gave (PROCGROUP_JOB_KEY) is not announced. Rank 0 announces once in its lifetime, because it keeps its store.
"""

from __future__ import annotations

import hashlib
import ipaddress
import itertools
import os
import socket
import time
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

from procgroup import types
from procgroup.cluster import mpi, pmi, pmix, task_launcher
from procgroup.cluster.task_launcher import LauncherTask
from procgroup.errors import DistNetworkError, RendezvousError, RendezvousTimeout
from procgroup.process import environ
from procgroup.rendezvous import hosting
from procgroup.stores.store import Store
from procgroup.types import Timeout

if TYPE_CHECKING:
    from procgroup.stores.tcp import TCPStore

_ATTEMPT_SECONDS = 2.0
"""How long a rank tries one of the addresses before it tries the next."""

_SHORTEST_ATTEMPT_SECONDS = 0.1
_RESOLVE_SECONDS = 5.0
_MAX_HOSTS = 4
_BACKLOG = 128


class _Announcement(NamedTuple):
    """Where rank 0's store listens, under several names and addresses, and its secret; "" for the user's."""

    port: int
    job_key: str
    hosts: tuple[str, ...]

    def text(self) -> str:
        return ",".join([str(self.port), self.job_key, *self.hosts])

    @classmethod
    def read(cls, text: str) -> _Announcement:
        port, job_key, *hosts = text.split(",")
        return cls(int(port), job_key, tuple(hosts))


class Arrivals:
    """The ranks of the launcher's ``job`` that have come, as ``rank`` of ``size`` sees them from now on.

    Each waiting rank of a host listens on an abstract Unix socket: no file is left behind. A rank connects to the
    sockets of the others when it comes, and to those that it lacks when its time has passed. Of two ranks the later one
    so finds the earlier one, and the earlier one finds the later one while both wait. The end of a connection shows the
    end of a process.
    """

    def __init__(self, job: str, rank: int, size: int) -> None:
        self._job = hashlib.sha256(job.encode()).hexdigest()[:20]
        self._others = [other for other in range(size) if other != rank]
        self._found: dict[int, socket.socket] = {}
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        with suppress(OSError):  # without it, the others take this rank for one that is missing
            self._listener.bind(self._address(rank))
            self._listener.listen(_BACKLOG)
        self._look()

    def missing(self) -> list[int]:
        """Return the ranks that have never come, or else those that have come and whose processes have ended."""
        self._look()
        never_came = [other for other in self._others if other not in self._found]
        return never_came or [other for other, connection in self._found.items() if _has_ended(connection)]

    def close(self) -> None:
        """Show no more that this rank has come."""
        for one in (self._listener, *self._found.values()):
            one.close()

    def _address(self, rank: int) -> bytes:
        return f"\0procgroup-start-{self._job}-{rank}".encode()

    def _look(self) -> None:
        for other in self._others:
            if other in self._found:
                continue
            connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            connection.setblocking(False)
            try:
                connection.connect(self._address(other))
            except OSError:
                connection.close()
            else:
                self._found[other] = connection


def _has_ended(connection: socket.socket) -> bool:
    try:
        return connection.recv(1) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True


_known: dict[int, _Announcement] = {}
"""What was announced in this process, by its id: a forked child starts without."""

_spaces: dict[int, pmi.KeyValueSpace] = {}
_arrivals: dict[int, Arrivals] = {}


def can_announce(task: LauncherTask) -> bool:
    """Return whether this task's launcher carries announcements."""
    if task.launcher in (task_launcher.HYDRA, task_launcher.PMI):
        return pmi.descriptor() is not None
    return task.launcher is task_launcher.OPEN_MPI and pmix.library() is not None


def open_store(task: LauncherTask, *, rank: int, timeout: Timeout) -> Store:
    """Return rank 0's store, connected. All tasks of the launcher call it.

    Raises RendezvousError when not all tasks have called it in ``timeout``: RendezvousTimeout, which names the others,
    where all tasks are on one host. Raises DistNetworkError when the store is not reached, or the launcher announces
    nothing.
    """
    limit = types.seconds(timeout)
    deadline = time.monotonic() + limit
    hosted, mine = _host(task, limit) if rank == 0 else (None, None)
    if os.getpid() not in _known:
        _known[os.getpid()] = _Announcement.read(_broadcast(task, mine, rank, limit))
    return hosted if hosted is not None else _join(_known[os.getpid()], rank, limit, deadline)


def _host(task: LauncherTask, limit: float) -> tuple[TCPStore, str]:
    """Host the store on rank 0; return it, and the text that announces it."""
    hosts = _hosts(task)
    store, job_key = hosting.host_announced_store(hosts[0], limit)
    return store, _Announcement(store.port, job_key, hosts).text()


def _hosts(task: LauncherTask) -> tuple[str, ...]:
    """Return the names and addresses of this host, the first of which rank 0 itself listens at."""
    if task.is_on_one_host:
        return ("127.0.0.1",)
    from procgroup.stores.addresses import outward_address, resolve

    name = os.environ.get("PMI_HOSTNAME") or os.environ.get("PMIX_HOSTNAME") or socket.gethostname()
    resolved = resolve(name, _RESOLVE_SECONDS)
    addresses = filter(None, (*resolved, outward_address()))
    outward = [address for address in addresses if not ipaddress.ip_address(address).is_loopback]
    found = dict.fromkeys([name, *outward] if resolved else outward)
    return tuple(found)[:_MAX_HOSTS] or (name,)


def _broadcast(task: LauncherTask, mine: str | None, rank: int, limit: float) -> str:
    space = _space(task)
    try:
        _show_arrival(task, space.open(mine, time.monotonic() + limit) if space else os.environ.get("PMIX_NAMESPACE"))
        found = _by_launcher(task, space, mine, limit)
    except TimeoutError as error:
        text = (
            f"rank {rank} of {task.world_size}: not all tasks of {task.launcher.name} have come to their "
            f"init_process_group after {limit:g} s ({error}). Each task has to call it, once; look at the output of "
            "those that did not."
        )
        raise _with_names(task, rank, limit, text) from None
    if arrivals := _arrivals.pop(os.getpid(), None):
        arrivals.close()
    return found


def _by_launcher(task: LauncherTask, space: pmi.KeyValueSpace | None, mine: str | None, limit: float) -> str:
    if space is not None:
        return space.broadcast(mine, limit)
    if mpi.is_loaded():
        # A second client of PMIx, beside MPI's own in this process, disturbs MPI between hosts.
        return mpi.broadcast(mine, limit)
    library = pmix.library()
    assert library is not None, "can_announce has found it"
    return pmix.broadcast(library, mine, limit)


def _space(task: LauncherTask) -> pmi.KeyValueSpace | None:
    """Return the launcher's key-value space; None under Open MPI, which has another way."""
    if task.launcher is task_launcher.OPEN_MPI:
        return None
    descriptor = pmi.descriptor()
    if descriptor is None:
        raise DistNetworkError("PMI_FD names no open socket of this process, by which mpiexec joins its tasks")
    return _spaces.setdefault(os.getpid(), pmi.KeyValueSpace(descriptor))


def _show_arrival(task: LauncherTask, job: str | None) -> None:
    """Show the other ranks that this one has come, where all are on this host; again after a start that has failed."""
    if not job or not task.is_on_one_host or os.getpid() in _arrivals:
        return
    assert task.rank is not None
    assert task.world_size is not None
    _arrivals[os.getpid()] = Arrivals(job, task.rank, task.world_size)


def _with_names(task: LauncherTask, rank: int, limit: float, text: str) -> RendezvousError:
    """Return the error for a start to which not all tasks have come, which names the missing ranks if they are known.

    This rank goes on to show that it has come: the others, whose time passes later, ask for it.
    """
    arrivals = _arrivals.get(os.getpid())
    missing = arrivals.missing() if arrivals is not None else []
    if not missing or task.world_size is None:
        return RendezvousError(text)
    host = socket.gethostname()
    joined = {other: host for other in range(task.world_size) if other not in missing}
    error = RendezvousTimeout(missing=missing, joined=joined, size=task.world_size, seconds=limit)
    error.args = (f"{text} {error}",)
    return error


def _join(announced: _Announcement, rank: int, limit: float, deadline: float) -> Store:
    from procgroup.stores.tcp import TCPStore

    if announced.job_key:
        os.environ[environ.PROCGROUP_JOB_KEY.name] = announced.job_key
    refused = 0
    for host in itertools.cycle(announced.hosts):
        until = deadline if len(announced.hosts) == 1 else min(deadline, time.monotonic() + _ATTEMPT_SECONDS)
        seconds = max(until - time.monotonic(), _SHORTEST_ATTEMPT_SECONDS)
        try:
            store = TCPStore(host, announced.port, is_master=False, timeout=seconds, wait_for_workers=False)
        except DistNetworkError as error:
            # An attempt that ends before its time was refused for good, as by a store with another key.
            refused = refused + 1 if time.monotonic() < until else 0
            if time.monotonic() >= deadline or refused == len(announced.hosts):
                raise DistNetworkError(
                    f"rank {rank} did not get to rank 0's store at port {announced.port} of "
                    f"{', '.join(announced.hosts)}, which the launcher announced: {error}"
                ) from error
        else:
            store.set_timeout(limit)
            hosting.note_rank_0_hosts(store)
            return store
    raise AssertionError("a cycle of addresses does not end")
