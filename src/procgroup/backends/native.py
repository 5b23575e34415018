"""The built-in CPU backend: shared memory between ranks of one host, TCP between hosts and where there is no memory.

The calls of a group are methods of the native group: each enters C++ once, which does everything that the call needs.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import threading
from collections.abc import Collection, Sequence

from procgroup import _native
from procgroup.backends import peer_network
from procgroup.backends.connecting import Details
from procgroup.backends.native_group import NativeGroup, Subgroups, calls_in_progress, transport_between, world_identity
from procgroup.backends.peer_network import Links, route_to
from procgroup.cluster.control_group import cores_by_affinity, usable_cores
from procgroup.errors import DistBackendError, DistNetworkError
from procgroup.groups.engine import FLUSH_SECONDS
from procgroup.process import environ, flight_records, log, stack_signal
from procgroup.process.exit_reason import ExitReason
from procgroup.process.process_end import note_failure, wait_for_others
from procgroup.stores.start_up import StartUp

_FLUSH_SLICE_SECONDS = 0.01
# How long a rank that leaves waits for running callbacks.
_CALLBACK_SECONDS = 1.0
# All ranks have joined at the store before they connect, so a rank that takes longer has died meanwhile.
_CONNECT_SECONDS = 120.0


def connect(
    start_up: StartUp,
    *,
    name: str = "procgroup",
    group_name: str = "default",
    timeout: float = 1800.0,
    data_key: bytes,
    global_ranks: Sequence[int] | None = None,
) -> WorldGroup:
    """Connect all ranks of a group through a store; return that group on this rank when every rank has connected.

    Raises PeerLost or PeerFailed when another rank is lost meanwhile, CollectiveTimeout that names the ranks that are
    missing ``timeout`` seconds after the start began, or 120 seconds from now, and DistNetworkError when the ranks
    cannot connect.
    """
    start_up.limit_connecting(timeout, _CONNECT_SECONDS)
    key = hashlib.sha256(b"procgroup data key\0" + data_key).digest()
    job = hashlib.sha256(b"procgroup job\0" + data_key).hexdigest()[:10]
    wanted = environ.PROCGROUP_TRANSPORT.get()
    rank, size = start_up.me.rank, start_up.me.size
    members = list(range(size))
    identity = world_identity(group_name, members)
    engine = make_engine(rank, size, wanted != "tcp", global_ranks, job=job)
    problem = "PROCGROUP_TRANSPORT=tcp" if wanted == "tcp" else engine.arena_problem
    try:
        group = _native.Group(engine, identity, group_name, members, rank, [])
    except (OSError, RuntimeError) as error:  # shared memory is refused: go on with memory of this process alone
        problem = str(error)
        engine.shutdown()
        engine = make_engine(rank, size, False, global_ranks, job=job)
        group = _native.Group(engine, identity, group_name, members, rank, [])
    if not problem and engine.record_descriptor < 0:
        problem = "there is no memory for the flight record"
    offered = None if problem else (engine.arena_descriptor, engine.arena_bell, engine.record_descriptor)
    route = None if wanted == "shm" else route_to(start_up.store)
    try:
        links = peer_network.connect(start_up, key, Details(group.offset, offered), route, problem)
    except DistNetworkError as error:
        if wanted != "shm":
            raise
        raise DistBackendError(
            f"rank {rank} of {size}: PROCGROUP_TRANSPORT=shm, but the ranks cannot share memory: "
            f"{problem or error}. Start them on one host, or allow TCP with PROCGROUP_TRANSPORT=auto."
        ) from error
    problem = start_up.agree("attached", _attach(engine, links, group)) or ""
    if problem:
        raise DistBackendError(f"rank {rank} of {size}: the ranks could not map each other's memory: {problem}")
    together = [other for other, host in enumerate(links.hosts) if host == links.hosts[rank]]
    if len(together) > 1:
        engine.set_cores(_cores_together([links.cores[other] for other in together]), len(together))
    log.debug(f"connected to {size - 1} ranks, of which {len(together) - 1} share memory with this one")
    if rank == 0 and wanted != "tcp" and (apart := _ranks_apart(links)):
        log.warning(apart)
    return WorldGroup(engine, group, links.hosts, name=name, group_name=group_name, global_ranks=global_ranks)


os.register_at_fork(after_in_child=_native.forget_own_threads)


def alone(*, name: str = "procgroup", group_name: str = "default") -> WorldGroup:
    """Return a group of one rank, without a store."""
    engine = make_engine(0, 1, False, job=secrets.token_hex(5))
    group = _native.Group(engine, world_identity(group_name, [0]), group_name, [0], 0, [0])
    group.attach([group.offset], [0])
    return WorldGroup(engine, group, [0], name=name, group_name=group_name)


class WorldGroup(NativeGroup):
    """The group of all ranks of an engine, which are connected; ``hosts`` numbers the host of each."""

    def __init__(
        self,
        engine: _native.Engine,
        group: _native.Group,
        hosts: Sequence[int],
        *,
        name: str,
        group_name: str,
        global_ranks: Sequence[int] | None = None,
    ) -> None:
        subgroups = Subgroups(engine, hosts, group_name, global_ranks)
        super().__init__(subgroups, engine, group, 0, range(len(hosts)), name, transport_between(hosts))
        self._completions: threading.Thread | None = None
        engine.on_first_watch(self._start_completions)

    def shrink(self, excluded: Collection[int], *, name: str, group_name: str, timeout: float) -> SurvivorGroup:
        return self.shrink_to(self, [rank for rank in self.members if rank not in excluded], name, group_name, timeout)

    def shrink_to(
        self, parent: NativeGroup, members: Sequence[int], name: str, group_name: str, timeout: float
    ) -> SurvivorGroup:
        """Make the group that takes the place of ``parent``, the group of all ranks until now."""
        made = self._subgroups.make_of_survivors(
            parent.identity, members, name=name, group_name=group_name, timeout=timeout
        )
        self._subgroups.renumber(made.members)
        made.calls.rename_ranks()
        return SurvivorGroup(self, made)

    def reduce_in_rank_order(self) -> None:
        self.calls.reduce_in_rank_order()
        self._subgroups.in_rank_order = True

    def shutdown(self, reason: ExitReason | None = None, flush: float = FLUSH_SECONDS) -> None:
        self._flush(flush)
        if reason is not None:
            self.fail(reason, False)
        if self.calls.is_broken:
            note_failure()
        self.calls.leave()
        self._engine.shutdown()
        if self._completions is not None and self._completions is not threading.current_thread():
            self._completions.join(_CALLBACK_SECONDS)

    def abort(self) -> None:
        note_failure()
        self._engine.fail("its default group was aborted", True)  # calls in progress, here and on the other ranks
        self.calls.abort()  # later calls

    def _flush(self, seconds: float) -> None:
        """Wait for issued calls and flush sent data, in short slices, so that Ctrl-C is handled.

        Ranks that have not taken what was sent are stopped or cannot be reached: the end of the process, which may host
        the store, does not wait as long for them again.
        """
        is_done = wait_for_others(
            lambda: self.calls.is_broken or (self._engine.flush(_FLUSH_SLICE_SECONDS) and self.calls.is_idle),
            seconds,
            lambda: f"rank {self._engine.rank} leaves its groups and waits for {calls_in_progress(self._engine)}",
            pause=_FLUSH_SLICE_SECONDS,
        )
        if not is_done and self._engine.unsent_to:
            note_failure()

    def _start_completions(self) -> None:
        """Start the thread that runs the callbacks of ``Operation.on_completion``."""
        if self._completions is None:
            engine = self._engine

            def run() -> None:
                _native.add_own_thread()
                while engine.run_completions(0.5):
                    pass

            self._completions = threading.Thread(target=run, name="procgroup-completions", daemon=True)
            self._completions.start()


class SurvivorGroup(NativeGroup):
    """The group of the ranks that live on, in place of the group of all ranks, whose engine ends with this one."""

    def __init__(self, whole: WorldGroup, made: NativeGroup) -> None:
        super().__init__(
            made._subgroups, made._engine, made.calls, made.identity, made.members, made.name, made.transport
        )
        self._whole = whole

    def shrink(self, excluded: Collection[int], *, name: str, group_name: str, timeout: float) -> SurvivorGroup:
        members = [member for rank, member in enumerate(self.members) if rank not in excluded]
        return self._whole.shrink_to(self, members, name, group_name, timeout)

    def shutdown(self, reason: ExitReason | None = None, flush: float = FLUSH_SECONDS) -> None:
        super().shutdown(reason, flush)
        self._whole.shutdown(reason, flush)

    def abort(self) -> None:
        self._whole.abort()
        super().abort()


def make_engine(
    rank: int,
    size: int,
    shared: bool,
    global_ranks: Sequence[int] | None = None,
    *,
    is_thread: bool = False,
    job: str = "",
) -> _native.Engine:
    """Return this rank's engine, not yet connected; ``shared`` offers memory to the ranks of this host.

    ``job``, the same on all ranks, is where its flight record is kept; "" keeps it in memory alone.
    """
    global_rank = rank if global_ranks is None else global_ranks[rank]
    record = flight_records.new_file(job, global_rank) if job else ""
    engine = _native.Engine(
        rank,
        size,
        is_thread,
        shared,
        record=record,
        job=flight_records.job_name(),
        program=flight_records.program(),
        global_rank=global_rank,
        global_size=size,
    )
    stack_signal.install()
    engine.set_cores(usable_cores(), size)
    engine.set_wait_report(environ.PROCGROUP_WAIT_REPORT_SECONDS.get())
    if global_ranks is not None:
        engine.set_global_ranks(list(global_ranks))
    return engine


def _attach(engine: _native.Engine, links: Links, group: _native.Group) -> str | None:
    """Map the arenas of the ranks of this host, and use the sockets of the others; return why that failed."""
    waiting = list(links.connections)
    names = links.host_names
    offsets = [0] * engine.world_size
    try:
        while waiting:
            one = waiting.pop()
            if one.arena is None:
                engine.attach_socket(one.peer, one.socket.detach(), one.pid)
                if names[one.peer] != names[engine.rank]:
                    engine.set_host(one.peer, names[one.peer])
            else:
                offsets[one.peer] = one.offset
                engine.attach_shared(one.peer, *one.arena, one.socket.detach())
        offsets[engine.rank] = group.offset
        group.attach(offsets, links.hosts)
    except (OSError, RuntimeError, IndexError) as error:
        for one in waiting:
            one.close()
        return str(error)
    return None


def _cores_together(cores: list[list[int]]) -> int:
    """Return the number of cores that the ranks of one host can use together; each rank may be bound to other cores."""
    own = usable_cores()
    if own < cores_by_affinity():
        return own
    return len(set().union(*cores))


def _ranks_apart(links: Links) -> str:
    """Return which host's ranks do not share memory with each other, and why; "" when they do on every host."""
    for name in links.host_names:
        ranks = [rank for rank, other in enumerate(links.host_names) if other == name]
        if len({links.hosts[rank] for rank in ranks}) > 1:
            reason = links.problem or "they cannot reach each other's Unix sockets, as in containers"
            return f"the ranks on {name} do not all share memory, using TCP between them ({reason})"
    return ""
