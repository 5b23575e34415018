"""The built-in CPU backend: shared memory between ranks of one host, TCP where there is none.

The group's verbs are the native engine's own methods: one crossing into C++, in which everything that
a call needs happens.
"""

from __future__ import annotations

import hashlib
import secrets
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any

from procgroup import _native, environ
from procgroup.backends.mesh import Connection, Mesh, address_facing
from procgroup.backends.native_subgroup import Subgroups, bind_verbs, world_identity
from procgroup.cluster.cores import cores_by_affinity, usable_cores
from procgroup.errors import DistBackendError
from procgroup.groups.backend import Backend
from procgroup.stores.store import Store

# How long a rank that leaves waits for what it has issued: for its asynchronous calls, and for receivers
# of large messages. Peers that are lost or have left are not waited for.
_FLUSH_SECONDS = 30.0
_FLUSH_SLICE_SECONDS = 0.01
# How long leaving waits for callbacks that are running.
_CALLBACK_SECONDS = 1.0
# All ranks have met at the store before they connect: whoever takes longer than this has died on the way.
_CONNECT_SECONDS = 120.0


class NativeBackend:
    """One process group's engine on this rank.

    Creating it connects all ranks of the group through ``store`` and returns when every rank has; it
    raises DistNetworkError or StoreTimeout when that takes longer than ``timeout`` or 120 seconds.
    """

    transport: str
    identity = 0

    def __init__(
        self,
        store: Store,
        rank: int,
        size: int,
        *,
        name: str = "procgroup",
        group_name: str = "default",
        timeout: float = 1800.0,
        data_key: bytes | None = None,
        ranks_are_threads: bool = False,
    ) -> None:
        self.name = name
        self._completions: threading.Thread | None = None
        wanted = environ.PROCGROUP_TRANSPORT.get()
        limit = min(timeout, _CONNECT_SECONDS)
        mesh = Mesh(store, rank, size, _data_key(store, rank, data_key, limit), time.monotonic() + limit)
        self._engine = _native.Engine(rank, size, ranks_are_threads, wanted != "tcp")
        self._engine.set_cores(usable_cores(), size)
        self._engine.on_first_watch(self._start_completions)
        self._group = self._make_group(mesh, group_name, wanted)
        # The verbs of the Backend protocol, without a Python frame in between.
        bind_verbs(self, self._group)
        self._subgroups = Subgroups(self._engine, self.transport, group_name)

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

    def shutdown(self) -> None:
        self._flush()
        self._group.leave()
        self._engine.shutdown()
        if self._completions is not None and self._completions is not threading.current_thread():
            self._completions.join(_CALLBACK_SECONDS)

    def abort(self) -> None:
        self._engine.abort()  # what is in progress
        self._group.abort()  # what comes later

    def _flush(self) -> None:
        """Let issued calls end and hand over what was sent; in short slices, so that Ctrl-C is heard."""
        deadline = time.monotonic() + _FLUSH_SECONDS
        while not self._group.is_broken and time.monotonic() < deadline:
            if self._engine.flush(_FLUSH_SLICE_SECONDS) and self._group.is_idle:
                return
            time.sleep(_FLUSH_SLICE_SECONDS)

    def _make_group(self, mesh: Mesh, group_name: str, wanted: str) -> _native.Group:
        members = list(range(mesh.size))
        identity = world_identity(group_name, members)
        problem: str | None = "PROCGROUP_TRANSPORT=tcp"
        if wanted != "tcp":
            problem = self._share(mesh, identity, group_name)
            if problem is None:
                return self._group
            if wanted == "shm":
                raise DistBackendError(
                    f"rank {mesh.rank} of {mesh.size}: PROCGROUP_TRANSPORT=shm, but the ranks cannot share memory: "
                    f"{problem}. Start them on one host, or allow TCP with PROCGROUP_TRANSPORT=auto."
                )
            if mesh.rank == 0:
                print(f"procgroup: the ranks do not share memory, using TCP ({problem})", file=sys.stderr, flush=True)
        self.transport = "tcp"
        for connection in mesh.connect_sockets(address_facing(mesh.store)):
            self._engine.attach_socket(connection.peer, connection.socket.detach(), connection.pid)
        return _native.Group(self._engine, identity, group_name, members, mesh.rank, False)

    def _share(self, mesh: Mesh, identity: int, group_name: str) -> str | None:
        """Set up shared memory with every rank; return why that is not possible, or None."""
        problem: str | None = self._engine.arena_problem or None
        if problem is None:
            try:
                members = list(range(mesh.size))
                self._group = _native.Group(self._engine, identity, group_name, members, mesh.rank, True)
            except (OSError, RuntimeError) as error:
                problem = str(error)
        problem = mesh.agree("arena", problem)
        if problem is not None:
            return problem
        connections = mesh.connect_shared(self._engine.arena_descriptor, self._group.offset)
        if isinstance(connections, str):
            return connections
        problem = mesh.agree("attached", self._attach(connections))
        if problem is not None:
            raise DistBackendError(
                f"rank {mesh.rank} of {mesh.size}: the ranks could not map each other's memory: {problem}"
            )
        self._engine.set_cores(_cores_together(mesh.cores), mesh.size)
        self.transport = "shared memory"
        return None

    def _attach(self, connections: list[Connection]) -> str | None:
        """Map the arenas of all other ranks; return why that failed, or None."""
        offsets = [self._group.offset] * (len(connections) + 1)
        waiting = list(connections)
        try:
            while waiting:
                connection = waiting.pop()
                assert connection.arena is not None
                offsets[connection.peer] = connection.offset
                self._engine.attach_shared(connection.peer, connection.arena, connection.socket.detach())
            self._group.attach(offsets)
        except (OSError, RuntimeError, IndexError) as error:
            for connection in waiting:
                connection.close()
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


def _data_key(store: Store, rank: int, given: bytes | None, limit: float) -> bytes:
    """The key that data connections prove: derived from the job's, or a random one that rank 0 hands out."""
    if given is not None:
        return hashlib.sha256(b"procgroup data key\0" + given).digest()
    if rank == 0:
        store.set("data_key", secrets.token_bytes(32))
    return store.get("data_key", limit)


def _cores_together(cores: dict[int, list[int]]) -> int:
    """How many cores the ranks of one host can keep busy together: each may be bound to others."""
    own = usable_cores()
    if own < cores_by_affinity():
        return own
    return len(set().union(*cores.values()))
