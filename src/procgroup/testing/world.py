"""A world of ranks that are threads of this process: one process group for each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta

from procgroup import types
from procgroup.api import exit_hooks
from procgroup.api.lifecycle import GROUP_NAME
from procgroup.backends import registry
from procgroup.backends.threads import ThreadGroup, connect_threads
from procgroup.groups.group import ProcessGroup
from procgroup.stores.hash import HashStore
from procgroup.stores.prefix import PrefixStore
from procgroup.types import Timeout


@contextmanager
def connected_groups(
    size: int,
    *,
    timeout: Timeout = types.DEFAULT_TIMEOUT,
    transport: str | None = None,
    hosts: Sequence[int] | None = None,
    backend: str | None = None,
) -> Iterator[list[ProcessGroup]]:
    """Give one process group per rank, connected with each other, for threads or for asynchronous calls of one thread.

    ``timeout`` is what each call may take. ``transport`` is "shm", "tcp" or "auto", by default what
    PROCGROUP_TRANSPORT says. ``hosts`` has a number for each rank: ranks with different numbers share no memory, as if
    they ran on different hosts. ``backend`` is that of init_process_group. Leaving the context ends the groups. Raises
    ValueError for a size below 1, and unless ``hosts`` has ``size`` numbers.
    """
    groups = make_groups(size, types.seconds(timeout), transport, hosts, backend)
    try:
        yield groups
    finally:
        for group in groups:
            exit_hooks.leave(group)


def make_groups(
    size: int, seconds: float, transport: str | None, hosts: Sequence[int] | None = None, backend: str | None = None
) -> list[ProcessGroup]:
    """Make the default groups of all ranks; their owner ends each with ``exit_hooks.leave``."""
    if size < 1:
        raise ValueError(f"Expected parameter `size` to be at least 1, got {size}.")
    if hosts is not None and len(hosts) != size:
        raise ValueError(f"Expected parameter `hosts` to have a number for each of {size} ranks, got {hosts!r}.")
    config = registry.parse(backend)
    store = HashStore()
    engines = connect_threads(size, name=config.name, group_name=GROUP_NAME, transport=transport, hosts=hosts)

    def make(rank: int) -> ProcessGroup:
        group_store = PrefixStore("default_pg/0", store.clone())
        group_store.set_timeout(timedelta(seconds=seconds))
        return ProcessGroup(
            engines[rank],
            group_store,
            rank=rank,
            members=range(size),
            group_name=GROUP_NAME,
            timeout=timedelta(seconds=seconds),
            backend_config=str(config),
            group_desc="default_pg",
            make_backends=config.make_backends,
        )

    with ThreadPoolExecutor(size) as pool:  # a backend may get ready together with those of the other ranks
        groups = list(pool.map(make, range(size)))
    for group in groups:
        exit_hooks.watch(group, None)
    return groups


def admit_this_thread(group: ProcessGroup) -> None:
    """Say that this thread is a rank of the group's world, or only awaits the ranks: see ThreadGroup."""
    engine: object = group.engine
    if isinstance(engine, ThreadGroup):
        engine.admit_this_thread()


def leave_at_once(group: ProcessGroup, error: BaseException) -> None:
    """End a group whose rank has failed, so that the other ranks receive the failure now."""
    exit_hooks.fail(group, error)
    exit_hooks.leave(group)
