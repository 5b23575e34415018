"""Ranks that are threads of one process: the native engine, connected without a store, a socket or a handshake.

Every rank has an engine of its own, as in a process of its own, and bytes really move from one to the other: through
memory, or through a pair of sockets for each two ranks to test the network's code.
"""

from __future__ import annotations

import itertools
import os
import socket
from collections.abc import Sequence

from procgroup import _native
from procgroup.backends.native import WorldGroup, make_engine
from procgroup.backends.native_group import world_identity
from procgroup.errors import DistBackendError
from procgroup.process import environ, log

TRANSPORTS = ("auto", "shm", "tcp")


class ThreadGroup(WorldGroup):
    """The group of all ranks on one of them, a thread. ``connect_threads`` makes them."""

    def __init__(
        self,
        engine: _native.Engine,
        group: _native.Group,
        threads: _native.RankThreads,
        *,
        name: str,
        group_name: str,
        hosts: Sequence[int],
    ) -> None:
        super().__init__(engine, group, hosts, name=name, group_name=group_name)
        self._threads = threads
        engine.set_rank_threads(threads)

    def admit_this_thread(self) -> None:
        """Register this thread as one of the ranks, or as one that only awaits them.

        While no other thread runs Python, a cycle of ranks that wait for each other is reported as a deadlock.
        """
        self._threads.add_this()


def connect_threads(
    size: int,
    *,
    name: str = "procgroup",
    group_name: str = "default",
    transport: str | None = None,
    hosts: Sequence[int] | None = None,
) -> list[ThreadGroup]:
    """Return the members of a group of ``size`` ranks, for threads of this process.

    ``transport`` is "shm", "tcp" or "auto", by default the value of PROCGROUP_TRANSPORT. ``hosts`` has a number for
    each rank: ranks with different numbers share no memory, as if they were on different hosts. Raises ValueError for
    another transport, DistBackendError when "shm" is requested and the system refuses memory.
    """
    wanted = transport or environ.PROCGROUP_TRANSPORT.get()
    if wanted not in TRANSPORTS:
        raise ValueError(f"Expected parameter `transport` to be one of {', '.join(TRANSPORTS)}, got {transport!r}.")
    shared = wanted != "tcp"
    engines = _make_engines(size, shared)
    problem = next((engine.arena_problem for engine in engines if engine.arena_problem), "")
    if problem:
        engines = _without_memory(engines, wanted, problem)
        shared = False
    hosts = hosts or [0] * size
    places = [list(hosts).index(host) for host in hosts] if shared else list(range(size))
    _attach(engines, places)
    threads = _native.RankThreads()
    groups = _make_groups(engines, group_name, places)
    return [
        ThreadGroup(engine, group, threads, name=name, group_name=group_name, hosts=places)
        for engine, group in zip(engines, groups, strict=True)
    ]


def _make_engines(size: int, shared: bool) -> list[_native.Engine]:
    return [make_engine(rank, size, shared, is_thread=True) for rank in range(size)]


def _without_memory(engines: list[_native.Engine], wanted: str, problem: str) -> list[_native.Engine]:
    for engine in engines:
        engine.shutdown()
    if wanted == "shm":
        raise DistBackendError(
            f"PROCGROUP_TRANSPORT=shm, but the ranks cannot share memory: {problem}. "
            "Free memory, or allow sockets with PROCGROUP_TRANSPORT=auto."
        )
    log.warning(f"the ranks do not share memory, using sockets ({problem})")
    return _make_engines(len(engines), False)


def _attach(engines: list[_native.Engine], hosts: list[int]) -> None:
    for (rank, engine), (peer, other) in itertools.combinations(enumerate(engines), 2):
        if hosts[rank] == hosts[peer]:
            engine.attach_thread(peer, other)
            other.attach_thread(rank, engine)
        else:
            mine, theirs = socket.socketpair()
            engine.attach_socket(peer, mine.detach(), os.getpid())
            other.attach_socket(rank, theirs.detach(), os.getpid())


def _make_groups(engines: list[_native.Engine], name: str, hosts: list[int]) -> list[_native.Group]:
    members = list(range(len(engines)))
    identity = world_identity(name, members)
    groups = [_native.Group(engine, identity, name, members, rank, hosts) for rank, engine in enumerate(engines)]
    offsets = [group.offset for group in groups]
    for group in groups:
        group.attach(offsets, hosts)
    return groups
