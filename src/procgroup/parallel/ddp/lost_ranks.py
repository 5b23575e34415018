"""What DistributedDataParallel does when a rank is lost: raise, go on in a smaller group, or fill the group up again.

A rank that is lost is replaced at the beginning of a forward: there all ranks have the same parameters, and the program
is between two steps. The ranks that have stayed make the group anew, which waits for the new process. That process has
built its model meanwhile; it gets the parameters, the buffers, the counts of exchanges, and what was given to
``share_state``.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

from procgroup.api.lifecycle import get_new_ranks, reconfigure
from procgroup.errors import ArgumentError
from procgroup.groups import objects
from procgroup.groups.group import ProcessGroup
from procgroup.parallel.ddp.exchanges import Exchanges, exchanges_of
from procgroup.parallel.pytorch import torch
from procgroup.parallel.rank_comparison import gather

RAISE, SHRINK, REPLACE = CHOICES = ("raise", "shrink", "replace")


def require_choice(on_lost_rank: str, is_default_group: bool, has_hook: bool = False) -> None:
    """Raise ValueError for a choice that is none, or that cannot be with this group, RuntimeError with a hook."""
    if on_lost_rank not in CHOICES:
        raise ValueError(f"expected on_lost_rank to be one of {', '.join(CHOICES)}, got {on_lost_rank!r}")
    if on_lost_rank == RAISE:
        return
    if not is_default_group:
        raise ValueError(
            f"on_lost_rank={on_lost_rank!r} is for the default group of procgroup, which is made anew. Leave out "
            "process_group and device_mesh, and start with procgroup.init_process_group."
        )
    if has_hook:
        raise RuntimeError(
            f"on_lost_rank={on_lost_rank!r} cannot be used with communication hooks: what a hook has done cannot be "
            "undone for another attempt."
        )


class LostRanks:
    """The ranks of one model: which of them are new, and what new ones get."""

    def __init__(
        self,
        group: ProcessGroup,
        on_lost_rank: str,
        change_group: Callable[[ProcessGroup], None],
        send_model: Callable[[ProcessGroup, int], None],
    ) -> None:
        """``send_model`` compares the ranks' models, and copies that of a group rank to all of them.

        Both functions are methods, whose object is referenced weakly.
        """
        self.exchanges: Exchanges = exchanges_of(group)
        self.exchanges.add_model(change_group, fills_up=on_lost_rank == REPLACE)
        self.is_new: bool = on_lost_rank == REPLACE and group.rank() in get_new_ranks(group)
        """Whether this process has taken the place of a lost one, and has not made its first exchange."""
        self._send_model = weakref.WeakMethod(send_model)
        self._shared: list[Any] = []
        self._awaits_state = False
        self._count = 0

    def enter(self) -> None:
        """Get the model from a rank that has stayed: in a new process, when the model is wrapped."""
        self._welcome(self.exchanges.group)
        self._awaits_state = self._count > 0

    def share(self, states: Sequence[Any]) -> None:
        """Let new ranks get these objects' states; in a new process, get them."""
        for state in states:
            if not (hasattr(state, "state_dict") and hasattr(state, "load_state_dict")):
                raise TypeError(f"expected objects with state_dict() and load_state_dict(), got {state!r}")
        if not self.is_new:
            self._shared += states
            return
        if len(states) != self._count or not self._awaits_state:
            raise ArgumentError(
                f"share_state got {len(states)} objects, and the other ranks share {self._count}. Call it once, with "
                "the same objects on all ranks."
            )
        self._send_states(self.exchanges.group, states)
        self._shared += states
        self._awaits_state = False

    def fill_up(self) -> None:
        """Make the group anew, with a new process in the place of each lost one, and give those the state."""
        group = reconfigure()
        self.exchanges.use(group)
        self._welcome(group)
        if self._shared:
            self._send_states(group, self._shared)

    def require_state(self) -> None:
        """Raise RuntimeError in a new process that has not got the state that the other ranks share."""
        if self._awaits_state:
            raise RuntimeError(
                f"the other ranks share the state of {self._count} objects with this new one. Call "
                "share_state on every rank, before the first forward."
            )

    def _welcome(self, group: ProcessGroup) -> None:
        """Send the model and the counts to new ranks."""
        if (send_model := self._send_model()) is not None:
            send_model(group, _sender(group))
        counts = gather(group, [self.exchanges.committed, self.exchanges.rounds, len(self._shared)])
        committed, rounds, self._count = counts[_sender(group)]
        self.exchanges.begin(committed, rounds)

    def _send_states(self, group: ProcessGroup, states: Sequence[Any]) -> None:
        sender = _sender(group)
        own = [_in_host_memory(state.state_dict()) if group.rank() == sender else None for state in states]
        received = objects.broadcast(group, own, sender, group.seconds_of(None), safe=True)
        if group.rank() in get_new_ranks(group):
            for state, values in zip(states, received, strict=True):
                state.load_state_dict(values)


def _in_host_memory(state: Any) -> Any:
    """Return a state whose tensors are in host memory: a new process may have another GPU, and loads them to it."""
    return torch.utils._pytree.tree_map_only(torch.Tensor, torch.Tensor.cpu, state)


def _sender(group: ProcessGroup) -> int:
    """Return the first group rank that has stayed."""
    new = get_new_ranks(group)
    return next(rank for rank in range(group.size()) if rank not in new)
