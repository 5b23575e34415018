"""Makes and destroys the default group: joins rendezvous, backends and groups."""

from __future__ import annotations

import hmac
import os
import socket
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, NamedTuple

from procgroup import types
from procgroup.api import default_group, exit_hooks
from procgroup.api.default_group import is_foreign, resolve
from procgroup.api.options import NCCL_TIMEOUT, Timeouts, read_backend, read_deterministic, read_timeouts
from procgroup.backends import registry
from procgroup.errors import (
    CollectiveTimeout,
    PeerFailed,
    PeerLost,
    RendezvousConflict,
    RendezvousError,
    RendezvousTimeout,
)
from procgroup.groups.group import ProcessGroup
from procgroup.process import environ, log, process_end
from procgroup.rendezvous import hosting, urls
from procgroup.rendezvous.handlers import rendezvous
from procgroup.rendezvous.join import JoinedWorld, join
from procgroup.stores.prefix import PrefixStore
from procgroup.stores.store import Store
from procgroup.types import DEFAULT_TIMEOUT, Timeout

GROUP_NAME = "0"
"""The default group's name, as in torch.distributed: groups are numbered as they are made."""

# The least time for another attempt to make a group: a shorter one could not name the missing ranks, as the last did.
_LEAST_SECONDS = 0.5


def init_process_group(
    backend: str | None = None,
    init_method: str | None = None,
    timeout: Timeout | None = None,
    world_size: int = -1,
    rank: int = -1,
    store: Store | None = None,
    group_name: str = "",
    pg_options: Any = None,
    device_id: Any = None,
    deterministic: str | None = None,
) -> None:
    """Find the other ranks and make the default group.

    ``init_method`` is env:// (the default), tcp://host:port, file:///path, slurm:// or mpi://; ``store`` may be given
    instead, with ``rank`` and ``world_size``. Keywords win over the environment. ``timeout`` is a timedelta or seconds,
    30 minutes by default; ``pg_options={"init_method_timeout": ...}`` sets another one for this call, and so does
    ``with timeout(...)`` where no ``timeout`` is given. With ``deterministic="order"``, reductions combine in rank
    order, whatever the size, transport and version: the same inputs then give the same bits everywhere, also in groups
    made later on. ``backend`` is "gloo", procgroup's own transport, "mpi", "nccl", or one for each kind of device, as
    in "cpu:gloo,cuda:nccl"; None means "gloo" and, if NCCL is installed, "nccl" for arrays on GPUs. With ``device_id``,
    the GPU of this rank, NCCL connects the ranks now, otherwise in the first call; ``pg_options`` may have fields of
    nccl.core.NCCLConfig, or be one. With "nccl" calls may take 10 minutes by default. ``group_name`` is taken for
    compatibility.

    Raises ValueError for a second call, IncompleteEnvironment (a ValueError) for missing variables, AssertionError for
    a store without ``rank`` and ``world_size`` or with ``init_method``, RendezvousError if the ranks do not find each
    other. After a failure there is no default group, and init_process_group can be called again. A store hosted by this
    process stays open until the process exits, so that ranks that try again meet there.
    """
    slot = default_group.slot()
    if slot.group is not None and slot.group.is_usable():
        raise ValueError("trying to initialize the default process group twice! Call destroy_process_group first.")
    config = read_backend(backend, device_id, pg_options)
    timeouts = read_timeouts(timeout, pg_options, NCCL_TIMEOUT if config.name == "nccl" else DEFAULT_TIMEOUT)
    in_rank_order = read_deterministic(deterministic, pg_options)
    config.load()
    started = time.monotonic()
    found, own, rank, world_size = _find_store(init_method, store, rank, world_size, timeouts)
    start = _Start(config, found, rank, world_size, timeouts, in_rank_order)
    if slot is default_group.PROCESS_SLOT:
        log.set_rank(rank)
    try:
        slot.group = start.make(started)
    except BaseException:
        if own:
            hosting.close_unless_hosted(found)
        raise
    process_end.forget_failure()
    slot.was_used = True
    slot.start = start
    exit_hooks.watch(slot.group, found if own else None)
    if slot is default_group.PROCESS_SLOT:
        exit_hooks.install_excepthook(rank)


class _Start(NamedTuple):
    """How a default group is made, and made again."""

    config: registry.BackendConfig
    store: Store
    rank: int
    world_size: int
    timeouts: Timeouts
    in_rank_order: bool

    def make(self, started: float, *, goes_on: bool = False) -> ProcessGroup:
        """Meet the other ranks and make the group. ``goes_on``: this process was in it before."""
        members = range(self.world_size)
        made, world = _make_group(
            self.config, self.store, self.rank, members, self.timeouts, started, self.store, goes_on=goes_on
        )
        if self.in_rank_order:
            made.reduce_in_rank_order()
        if log.is_enabled(log.INFO):
            count = len({member.host for member in world.members}) if world else 1
            hosts = "1 host" if count == 1 else f"{count} hosts"
            log.info(f"{_describe(made)}, {hosts}, after {time.monotonic() - started:.2f} s", self.rank)
        return made


def reconfigure(timeout: Timeout | None = None) -> ProcessGroup:
    """Make the default group again, with a new process in place of each lost one, and return it.

    Every surviving rank calls it, also after a call has failed because a rank was lost, and after ``shrink_group``. The
    new processes call init_process_group; ``procgroup run --replace`` starts them. The ranks are numbered as at the
    start of the job, and a new process has the rank of the lost one. Calls in progress end on all ranks, and groups
    that were made from the default group end. A rank that is lost meanwhile has to be replaced, too. The new processes
    begin without the others' data: ``get_new_ranks`` returns their ranks, so that another rank can send them data.
    ``timeout`` limits the wait for the other ranks; the default is that of init_process_group.

    Raises ValueError without a default group, RendezvousTimeout, which names the missing ranks.
    """
    slot = default_group.slot()
    old = default_group.current()
    start: _Start = slot.start
    limit = start.timeouts.rendezvous if timeout is None else timedelta(seconds=types.seconds(timeout))
    deadline = time.monotonic() + limit.total_seconds()
    if old.is_usable():
        old.calls.abort()
    store = exit_hooks.let_go(old)
    old.shutdown(None, 0.0)
    try:
        slot.group = _make_again(start, deadline)
    finally:
        exit_hooks.watch(slot.group or old, store)
    process_end.forget_failure()
    return slot.group


def _make_again(start: _Start, deadline: float) -> ProcessGroup:
    """Make the group; begin again when a rank is lost meanwhile, until the deadline."""
    while True:
        left = timedelta(seconds=max(deadline - time.monotonic(), 0.0))
        attempt = start._replace(timeouts=start.timeouts._replace(rendezvous=left, start=left))
        try:
            return attempt.make(time.monotonic(), goes_on=True)
        except (RendezvousConflict, RendezvousTimeout):
            raise
        except (PeerLost, PeerFailed, CollectiveTimeout, RendezvousError):
            if time.monotonic() >= deadline - _LEAST_SECONDS:
                raise


def get_new_ranks(group: ProcessGroup | None = None) -> tuple[int, ...]:
    """Return the ranks of ``group`` whose processes replaced lost ones in its last ``reconfigure``.

    Empty if every process of the group is new, and if no process is.
    """
    return resolve(group).new_ranks


def make_group(
    store: Store,
    rank: int,
    members: Sequence[int],
    *,
    group_name: str,
    timeout: Timeout,
    meeting: Store,
    started: float,
    config: registry.BackendConfig,
) -> ProcessGroup:
    """Meet the other ranks at ``meeting`` and return a group, not the default one, whose store is ``store``.

    ``members[r]`` is the global rank of group rank ``r``; this process has group rank ``rank``. ``timeout`` counts from
    the time.monotonic() ``started``. ``config`` names the backends of the arrays. The caller closes the stores; the
    group leaves in order at the process's end. Raises what init_process_group raises.
    """
    timeouts = read_timeouts(timeout, None)
    made, _ = _make_group(config, store, rank, members, timeouts, started, meeting, group_name)
    exit_hooks.watch(made, None)
    return made


def destroy_process_group(group: ProcessGroup | None = None, timeout: Timeout | None = None) -> None:
    """Leave a group (None: the default one) in order; what was sent still arrives. Other ranks need not call it.

    Issued calls have ``timeout``, a timedelta or seconds, to complete, and then fail. The default is 30 s, or 1 s while
    an exception is handled. Destroying a group again does nothing. Raises AssertionError if there never was a default
    group, DistBackendError inside a backend's transfer, which must not wait, and the error of a call that failed after
    it returned (on a GPU, or a small call with a root) if no later call has raised it.
    """
    if is_foreign(group):
        return
    slot = default_group.slot()
    if group is None and slot.group is None:
        if not slot.was_used:
            raise AssertionError("Process group cannot be None: call init_process_group first.")
        return
    # Not above: this module can be imported where the engine cannot be loaded.
    from procgroup._native import require_outside_transfer

    require_outside_transfer("destroy_process_group")
    chosen = resolve(group)
    chosen.await_others()
    try:
        exit_hooks.leave(chosen, None if timeout is None else types.seconds(timeout))
    finally:
        if chosen is slot.group and not chosen.is_usable():
            slot.group = None
            if slot is default_group.PROCESS_SLOT:
                exit_hooks.remove_excepthook()


def is_initialized() -> bool:
    """Return whether there is a default group."""
    return default_group.slot().group is not None


def _describe(group: ProcessGroup) -> str:
    where = f"rank {group.rank()} of {group.size()} on {socket.gethostname()} (pid {os.getpid()})"
    limit = group.timeout.total_seconds()
    return f"{where}: backend {group.backend_config}, {group.transport}, calls may take {limit:g} s"


def _find_store(
    init_method: str | None, store: Store | None, rank: int, world_size: int, timeouts: Timeouts
) -> tuple[Store, bool, int, int]:
    """Return (store, whether it is ours to close, rank, world size)."""
    if store is not None:
        if init_method is not None:
            raise AssertionError(
                f"Cannot specify both init_method and store. Leave one out; got init_method={init_method!r}."
            )
        if not world_size > 0:
            raise AssertionError(f"world_size must be positive if using store, got {world_size}: pass world_size=")
        if not rank >= 0:
            raise AssertionError(f"rank must be non-negative if using store, got {rank}: pass rank=")
        urls.check(rank, world_size)
        return store, False, rank, world_size
    if init_method is None:
        init_method = environ.PROCGROUP_INIT_METHOD.get() or environ.TORCH_DISTRIBUTED_INIT_METHOD.get() or "env://"
    found, rank, world_size = next(rendezvous(init_method, rank, world_size, timeout=timeouts.rendezvous))
    return found, True, rank, world_size


def _make_group(
    config: registry.BackendConfig,
    store: Store,
    rank: int,
    members: Sequence[int],
    timeouts: Timeouts,
    started: float,
    meeting: Store,
    group_name: str = GROUP_NAME,
    *,
    goes_on: bool = False,
) -> tuple[ProcessGroup, JoinedWorld | None]:
    """Meet the other ranks at ``meeting``; return their group with ``store``, and the world: None for a single rank."""
    size = len(members)
    registry.check_engine(size)
    from procgroup.backends import native  # which check_engine has loaded

    world: JoinedWorld | None = None
    engine: native.WorldGroup
    if size == 1:
        engine = native.alone(name=config.name, group_name=group_name)
    else:
        world = join(meeting, rank, size, timeouts.rendezvous, group=group_name, started=started, goes_on=goes_on)
        # Data connections prove both the job's secret, if there is one, and this round's.
        job_key = environ.PROCGROUP_JOB_KEY.get().encode()
        try:
            engine = native.connect(
                world.start_up,
                name=config.name,
                group_name=group_name,
                timeout=timeouts.start.total_seconds(),
                data_key=hmac.digest(job_key, b"procgroup data " + world.key, "sha256"),
                global_ranks=members,
            )
        except BaseException as error:
            world.start_up.report_failure(error)
            raise
        world.start_up.leave()
    group_store = PrefixStore(f"default_pg/{world.round if world else 0}", store)
    group_store.set_timeout(timeouts.calls)
    made = ProcessGroup(
        engine,
        group_store,
        rank=rank,
        members=members,
        group_name=group_name,
        timeout=timeouts.calls,
        backend_config=str(config),
        group_desc="default_pg",
        make_backends=config.make_backends,
        store_ends_with=0 if hosting.ends_with_rank_0(store) else None,
    )
    made.new_ranks = world.new_ranks if world is not None else ()
    return made, world
