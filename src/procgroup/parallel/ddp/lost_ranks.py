"""What DistributedDataParallel does when a rank is lost: raise, go on in a smaller group, or fill the group up again.

An *exchange* is what the ranks do together as one: average the gradients of a round, copy the buffers of a rank, or
call a function of the program::

    attempt     collectives, and what can be done again; on GPUs with a barrier, which waits for their end
    barrier     a rank that is in it has all *results* of the exchange
    committed   the program goes on

A rank that is lost leaves the others at most one exchange apart: nobody commits one before all have its results. They
make a smaller group, and exchange how many exchanges each has committed and whether it has the results of the next one.
An exchange that a rank has committed, or of which all ranks have the results, counts; another one is attempted again by
all.

With ``on_lost_rank="replace"`` they also agree on the round after which they *fill up* the group. At the beginning of
the next forward all ranks have the same parameters, and the program is between two steps. There the ranks that have
stayed make the group again, which waits for a new process in the place of each lost one. That process has built its
model meanwhile; it gets the parameters, the buffers, the counts of exchanges, and the states of ``share_state``.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

from procgroup.api.lifecycle import get_new_ranks, reconfigure
from procgroup.api.shrinking import shrink_group
from procgroup.errors import ArgumentError, GroupBroken, PeerFailed, PeerLost
from procgroup.groups import objects
from procgroup.groups.group import ProcessGroup
from procgroup.parallel.pytorch import torch
from procgroup.parallel.rank_comparison import gather
from procgroup.process import log

Result = TypeVar("Result")

RAISE, SHRINK, REPLACE = CHOICES = ("raise", "shrink", "replace")

RANK_WAS_LOST = (PeerLost, PeerFailed)


def require_choice(on_lost_rank: str, is_default_group: bool) -> None:
    """Raise ValueError if ``on_lost_rank`` is unknown, or if it is not supported for this group."""
    if on_lost_rank not in CHOICES:
        raise ValueError(f"expected on_lost_rank to be one of {', '.join(CHOICES)}, got {on_lost_rank!r}")
    if on_lost_rank != RAISE and not is_default_group:
        raise ValueError(
            f"on_lost_rank={on_lost_rank!r} is for the default group of procgroup, which is made anew. Leave out "
            "process_group and device_mesh, and start with procgroup.init_process_group."
        )


class Model(Protocol):
    """A wrapped model. It is referenced weakly."""

    def _change_group(self, group: ProcessGroup) -> None:
        """Use another group from now on."""

    def _send_model(self, group: ProcessGroup, root: int) -> None:
        """Compare the ranks' models, and copy that of a group rank to all of them."""


class Exchanges:
    """The exchanges of the models that share a group, on this rank: see ``exchanges_of``."""

    def __init__(self, group: ProcessGroup) -> None:
        self.group: ProcessGroup = group
        self.rounds: int = 0
        """Rounds that this rank has committed."""
        self.has_begun_round: bool = False
        """Whether this rank has begun the forward of the next round."""
        self.committed: int = 0
        self._models: weakref.WeakSet[Model] = weakref.WeakSet()
        self._fills_up = False
        self._is_running = False
        self._fill_up_after: int | None = None
        self._has_results = False

    def add_model(self, model: Model, *, fills_up: bool) -> None:
        """Change the group of a model together with this one."""
        self._models.add(model)
        self._fills_up = self._fills_up or fills_up

    @property
    def is_fill_up_due(self) -> bool:
        """Whether the next forward begins with new processes in the place of the lost ones."""
        after = self._fill_up_after
        return after is not None and after <= self.rounds and not self.has_begun_round

    def run(self, attempt: Callable[[], Result], rewind: Callable[[], None] = lambda: None) -> Result:
        """Make an exchange, on all ranks; ``rewind`` prepares another attempt. Return what the last attempt returned.

        Exceptions other than those of lost ranks are the caller's. Raises RuntimeError inside of an exchange.
        """
        if self._is_running:
            raise RuntimeError("retry() and a forward or backward of the model cannot be inside of one another")
        self._is_running = True
        try:
            return self._run(attempt, rewind)
        finally:
            self._is_running = self._has_results = False

    def _run(self, attempt: Callable[[], Result], rewind: Callable[[], None]) -> Result:
        while True:
            self._has_results = False
            try:
                result = attempt()
                if "cuda" in self.group.backends:
                    self.group.barrier()  # calls of NCCL have only been queued: here they end
                self._has_results = True
                self.group.barrier()
                break
            except (GroupBroken, *RANK_WAS_LOST) as error:
                if isinstance(error, GroupBroken) and not self.group.calls.has_lost_member:
                    raise
                if self._recover(error):
                    break
            rewind()
        self.committed += 1
        return result

    def use(self, group: ProcessGroup) -> None:
        """Make the exchanges on another group from now on."""
        self.group = group
        for model in self._models:
            model._change_group(group)

    def end_round(self) -> None:
        """Count a round that has been committed."""
        self.rounds += 1
        self.has_begun_round = False

    def continue_after(self, committed: int, rounds: int) -> None:
        """Go on in a complete group, whose ranks have committed that many exchanges and rounds."""
        self.committed, self.rounds = committed, rounds
        self._fill_up_after = None

    def _recover(self, lost: Exception) -> bool:
        """Make a group of the ranks that live, and use it. Return whether the interrupted exchange counts."""
        before = self.group.size()
        while True:
            made = shrink_group()
            self.use(made)
            try:
                states = gather(made, [self.committed, self._has_results, self.rounds + self.has_begun_round])
                break
            except RANK_WAS_LOST:  # another one: begin again
                continue
        log.warning(f"DistributedDataParallel goes on with {made.size()} of {before} ranks: {lost}")
        if self._fills_up:
            self._fill_up_after = max(rounds for _, _, rounds in states)
        newest = max(committed for committed, _, _ in states)
        if newest > self.committed:
            assert self._has_results
            return True
        return all(has_results and committed == newest for committed, has_results, _ in states)


_EXCHANGES: weakref.WeakSet[Exchanges] = weakref.WeakSet()


def exchanges_of(group: ProcessGroup) -> Exchanges:
    """Return the exchanges of all models of a group: the group changes for all of them at once."""
    for known in _EXCHANGES:
        if known.group is group:
            return known
    made = Exchanges(group)
    _EXCHANGES.add(made)
    return made


class LostRanks:
    """What one model does about lost ranks; whether this process is new, and the states that new ones get."""

    def __init__(self, group: ProcessGroup, on_lost_rank: str, model: Model) -> None:
        self.exchanges: Exchanges = exchanges_of(group)
        self.exchanges.add_model(model, fills_up=on_lost_rank == REPLACE)
        self.is_new: bool = on_lost_rank == REPLACE and group.rank() in get_new_ranks(group)
        """Whether this process has taken the place of a lost one, and has not made its first exchange."""
        self._model = weakref.ref(model)
        self._shared: list[Any] = []
        self._count = 0
        """How many objects' states a new process gets, by ``share``."""

    def receive_model(self) -> None:
        """Get the model from a rank that has stayed: in a new process, when the model is wrapped."""
        self._count = self._send_model(self.exchanges.group)

    def share(self, states: Sequence[Any]) -> None:
        """Let new ranks get these objects' states; in a new process, get them."""
        for state in states:
            if not (hasattr(state, "state_dict") and hasattr(state, "load_state_dict")):
                raise TypeError(f"expected objects with state_dict() and load_state_dict(), got {state!r}")
        if self.is_new:
            if len(states) != self._count or not states or self._shared:
                raise ArgumentError(
                    f"share_state got {len(states)} objects, and the other ranks share {self._count}. Call it once, "
                    "with the same objects on all ranks."
                )
            self._send_states(self.exchanges.group, states)
        self._shared += states

    def fill_up(self) -> None:
        """Make the group again, with a new process in the place of each lost one, and give those the state."""
        group = reconfigure()
        self.exchanges.use(group)
        self._send_model(group)
        if self._shared:
            self._send_states(group, self._shared)

    def require_state(self) -> None:
        """Raise RuntimeError in a new process that has not got the state that the other ranks share."""
        if self._count > len(self._shared):
            raise RuntimeError(
                f"the other ranks share the state of {self._count} objects with this new one. Call "
                "share_state on every rank, before the first forward."
            )

    def _send_model(self, group: ProcessGroup) -> int:
        """Send the model and the counts to new ranks. Return how many objects share their states with them."""
        sender = _sender(group)
        if (model := self._model()) is not None:
            model._send_model(group, sender)
        counts = gather(group, [self.exchanges.committed, self.exchanges.rounds, len(self._shared)])
        committed, rounds, shared = counts[sender]
        self.exchanges.continue_after(committed, rounds)
        return int(shared)

    def _send_states(self, group: ProcessGroup, states: Sequence[Any]) -> None:
        sender = _sender(group)
        own: Any = [None] * len(states)
        if group.rank() == sender:
            # In host memory: a new process may have another GPU, and loads the tensors to it.
            own = [state.state_dict() for state in states]
            own = torch.utils._pytree.tree_map_only(torch.Tensor, torch.Tensor.cpu, own)
        received = objects.broadcast(group, own, sender, group.seconds_of(None), safe=True)
        if group.rank() in get_new_ranks(group):
            for state, values in zip(states, received, strict=True):
                state.load_state_dict(values)


def _sender(group: ProcessGroup) -> int:
    """Return the first group rank that has stayed."""
    new = get_new_ranks(group)
    return next(rank for rank in range(group.size()) if rank not in new)
