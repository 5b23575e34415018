"""The built-in CPU backend: shared memory between ranks of one host, TCP between hosts and where there is no memory.

The group's verbs are the native engine's own methods: one crossing into C++, in which everything that
a call needs happens.
"""

from __future__ import annotations

import hashlib
import sys
import threading
from collections.abc import Sequence
from typing import Any

from procgroup import _native, environ
from procgroup.backends.connecting import Details
from procgroup.backends.mesh import Links, Mesh
from procgroup.backends.native_subgroup import (
    Subgroups,
    bind_verbs,
    calls_in_progress,
    transport_between,
    world_identity,
)
from procgroup.backends.route import route_to
from procgroup.cluster.cores import cores_by_affinity, usable_cores
from procgroup.errors import DistBackendError, DistNetworkError
from procgroup.groups.backend import FLUSH_SECONDS, Backend
from procgroup.process_end import note_failure, wait_for_others
from procgroup.stores.start_up import StartUp

_FLUSH_SLICE_SECONDS = 0.01
# How long leaving waits for callbacks that are running.
_CALLBACK_SECONDS = 1.0
# All ranks have met at the store before they connect: whoever takes longer than this has died on the way.
_CONNECT_SECONDS = 120.0


class NativeBackend:
    """One process group's engine on this rank.

    Creating it connects all ranks of the group through a store and returns when every rank has. Raises PeerLost or
    PeerFailed when another rank is gone meanwhile, CollectiveTimeout that names the ranks that are missing after
    ``timeout`` or 120 seconds, DistNetworkError when the ranks cannot connect.
    """

    transport: str
    identity = 0

    def __init__(
        self,
        start_up: StartUp,
        *,
        name: str = "procgroup",
        group_name: str = "default",
        timeout: float = 1800.0,
        data_key: bytes,
        global_ranks: Sequence[int] | None = None,
    ) -> None:
        self.name = name
        self._completions: threading.Thread | None = None
        wanted = environ.PROCGROUP_TRANSPORT.get()
        start_up.restart_timeout(min(timeout, _CONNECT_SECONDS))
        mesh = Mesh(start_up, hashlib.sha256(b"procgroup data key\0" + data_key).digest())
        self._cores = usable_cores()
        self._engine = self._make_engine(mesh, wanted != "tcp", global_ranks)
        self._hosts = list(range(mesh.size))
        self._group = self._connect(mesh, group_name, wanted, global_ranks)
        self._engine.on_first_watch(self._start_completions)
        self.transport: str = transport_between(self._hosts)
        # The verbs of the Backend protocol, without a Python frame in between.
        bind_verbs(self, self._group)
        self._subgroups = Subgroups(self._engine, self._hosts, group_name, global_ranks)

    def make_subgroup(self, ranks: Sequence[int], *, op: str, name: str, group_name: str, timeout: float) -> Backend:
        return self._subgroups.make(
            self.identity, list(ranks), op=op, name=name, group_name=group_name, timeout=timeout
        )

    def reduce_in_rank_order(self) -> None:
        self._group.reduce_in_rank_order()
        self._subgroups.in_rank_order = True

    def records(self) -> list[dict[str, Any]]:
        """Return the last calls of this rank, oldest first: op, sequence, call, state, started_ns, ended_ns.

        Times are on the monotonic clock; ``ended_ns`` is 0 while the call runs. Raises ForkedProcessError
        in a forked child.
        """
        return self._engine.records()

    def allocate(self, nbytes: int, *, copied_by_fork: bool = False) -> Any | None:
        """Return writable memory that the other ranks of this host read in place; None where there is none.

        A forked child shares it, or, with ``copied_by_fork``, writes into copies of its own.
        """
        return _native.allocate(self._engine, nbytes, copied_by_fork)

    def shutdown(self, reason: str = "", flush: float = FLUSH_SECONDS) -> None:
        self._flush(flush)
        if reason:
            self._engine.fail(reason, False)
        if self._group.is_broken:
            note_failure()
        self._group.leave()
        self._engine.shutdown()
        if self._completions is not None and self._completions is not threading.current_thread():
            self._completions.join(_CALLBACK_SECONDS)

    def abort(self) -> None:
        note_failure()
        self._engine.fail("its default group was aborted", True)  # what is in progress, here and on the others
        self._group.abort()  # what comes later

    def fail(self, reason: str, at_once: bool) -> None:
        self._engine.fail(reason, at_once)

    def _flush(self, seconds: float) -> None:
        """Let issued calls end and hand over what was sent; in short slices, so that Ctrl-C is heard."""
        wait_for_others(
            lambda: self._group.is_broken or (self._engine.flush(_FLUSH_SLICE_SECONDS) and self._group.is_idle),
            seconds,
            lambda: f"rank {self._engine.rank} leaves its groups and waits for {calls_in_progress(self._engine)}",
            pause=_FLUSH_SLICE_SECONDS,
        )

    def _make_engine(self, mesh: Mesh, shared: bool, global_ranks: Sequence[int] | None) -> _native.Engine:
        engine = _native.Engine(mesh.rank, mesh.size, False, shared)
        engine.set_cores(self._cores, mesh.size)
        engine.set_wait_report(environ.PROCGROUP_WAIT_REPORT_SECONDS.get())
        if global_ranks is not None:
            engine.set_global_ranks(list(global_ranks))
        return engine

    def _connect(self, mesh: Mesh, group_name: str, wanted: str, global_ranks: Sequence[int] | None) -> _native.Group:
        """Connect with every rank, and make the group of all."""
        members = list(range(mesh.size))
        identity = world_identity(group_name, members)
        problem = "PROCGROUP_TRANSPORT=tcp" if wanted == "tcp" else self._engine.arena_problem
        try:
            group = _native.Group(self._engine, identity, group_name, members, mesh.rank, [])
        except (OSError, RuntimeError) as error:  # shared memory is refused: go on with memory of this process alone
            problem = str(error)
            self._engine.shutdown()
            self._engine = self._make_engine(mesh, False, global_ranks)
            group = _native.Group(self._engine, identity, group_name, members, mesh.rank, [])
        offered = None if problem else (self._engine.arena_descriptor, self._engine.arena_bell)
        details = Details(group.offset, offered)
        try:
            links = mesh.connect(details, None if wanted == "shm" else route_to(mesh.store), problem)
        except DistNetworkError as error:
            if wanted != "shm":
                raise
            raise DistBackendError(
                f"rank {mesh.rank} of {mesh.size}: PROCGROUP_TRANSPORT=shm, but the ranks cannot share memory: "
                f"{problem or error}. Start them on one host, or allow TCP with PROCGROUP_TRANSPORT=auto."
            ) from error
        self._hosts = links.hosts
        problem = mesh.agree("attached", self._attach(links, group)) or ""
        if problem:
            raise DistBackendError(
                f"rank {mesh.rank} of {mesh.size}: the ranks could not map each other's memory: {problem}"
            )
        together = [rank for rank, host in enumerate(links.hosts) if host == links.hosts[mesh.rank]]
        if len(together) > 1:
            cores = _cores_together(self._cores, [links.cores[rank] for rank in together])
            self._engine.set_cores(cores, len(together))
        if mesh.rank == 0 and wanted != "tcp" and (apart := _ranks_apart(links)):
            print(f"procgroup: {apart}", file=sys.stderr, flush=True)
        return group

    def _attach(self, links: Links, group: _native.Group) -> str | None:
        """Map the arenas of the ranks of this host, and use the sockets of the others; return why that failed."""
        waiting = list(links.connections)
        names = links.host_names
        offsets = [0] * self._engine.world_size
        try:
            while waiting:
                one = waiting.pop()
                if one.arena is None:
                    self._engine.attach_socket(one.peer, one.socket.detach(), one.pid)
                    if names[one.peer] != names[self._engine.rank]:
                        self._engine.set_host(one.peer, names[one.peer])
                else:
                    offsets[one.peer] = one.offset
                    self._engine.attach_shared(one.peer, *one.arena, one.socket.detach())
            offsets[self._engine.rank] = group.offset
            group.attach(offsets, links.hosts)
        except (OSError, RuntimeError, IndexError) as error:
            for one in waiting:
                one.close()
            return str(error)
        return None

    def _start_completions(self) -> None:
        """Start the thread that calls what was registered with ``Operation.on_completion``."""
        if self._completions is None:
            engine = self._engine

            def run() -> None:
                while engine.run_completions(0.5):
                    pass

            self._completions = threading.Thread(target=run, name="procgroup-completions", daemon=True)
            self._completions.start()


def _cores_together(own: int, cores: list[list[int]]) -> int:
    """How many cores the ranks of one host can keep busy together: each may be bound to others."""
    if own < cores_by_affinity():
        return own
    return len(set().union(*cores))


def _ranks_apart(links: Links) -> str:
    """Say which host's ranks do not share memory with each other, and why; "" when on every host they do."""
    for name in links.host_names:
        ranks = [rank for rank, other in enumerate(links.host_names) if other == name]
        if len({links.hosts[rank] for rank in ranks}) > 1:
            reason = links.problem or "they cannot reach each other's Unix sockets, as in containers"
            return f"the ranks on {name} do not all share memory, using TCP between them ({reason})"
    return ""
