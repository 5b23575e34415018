"""The join hook of DistributedDataParallel: a rank without inputs takes part in the other ranks' collectives.

Within procgroup's ``Join``, each forward that copies buffers and each backward is announced separately. Within torch's
``Join``, ranks synchronize once per iteration of the first joinable: a forward announces all collectives until the next
forward.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, ClassVar

from procgroup.groups.group import ProcessGroup
from procgroup.parallel.ddp.module_buffers import ModuleBuffers
from procgroup.parallel.ddp.reducer import Reducer
from procgroup.parallel.join import JOINED, Join, JoinHook, active_ranks, exchange_codes
from procgroup.parallel.pytorch import torch
from procgroup.types import PremulSum, ReduceOp

FORWARD, BUFFERS, BACKWARD, BUFFERS_AND_BACKWARD = 2, 3, 4, 5


class ModelJoinHook(JoinHook):
    """Takes part in the collectives of one model with zero gradients."""

    NAMES: ClassVar[dict[int, str]] = {
        **JoinHook.NAMES,
        FORWARD: "in a forward",
        BUFFERS: "in a forward that copies buffers",
        BACKWARD: "in a backward",
    }

    def __init__(
        self,
        group: ProcessGroup,
        reducer: Reducer,
        buffers: ModuleBuffers | None,
        *,
        copy_from: Callable[[int], None],
        divide_by_initial_world_size: bool = True,
    ) -> None:
        """``copy_from`` is a method that copies a rank's model to all ranks. Its object is referenced weakly."""
        self._group = group
        self._reducer = reducer
        self._buffers = buffers
        self._copy_from = weakref.WeakMethod(copy_from)
        self._divides_by_all = divide_by_initial_world_size

    def enter(self, context: Join) -> None:
        self._reducer.announce = self._announce_backward

    def join(self) -> None:
        self._reducer.prepare()  # the others may wait for the end of a backward that failed on this rank

    def leave(self) -> None:
        self._reducer.announce = None
        self._reducer.op = ReduceOp.AVG

    def announce_forward(self, copies_buffers: bool) -> int:
        """Announce a forward if joined ranks need to know of it; return the rank whose buffers are copied."""
        assert self._join is not None
        if copies_buffers or self._join.throws:
            self._announce(BUFFERS if copies_buffers else FORWARD)
        return self._join.active[0]

    def announce_iteration(self, joinable: Any, copies_buffers: bool, is_round: bool) -> int:
        """Announce, within torch's Join, the collectives until the next forward; return the rank of the buffers."""
        work = torch.distributed.algorithms.join.Join.notify_join_context(joinable)
        if work is not None:
            work.wait()
        codes = {(False, False): FORWARD, (True, False): BUFFERS, (False, True): BACKWARD}
        code = codes.get((copies_buffers, is_round), BUFFERS_AND_BACKWARD)
        active = active_ranks(exchange_codes(self._group, code))
        self._set_divisor(active)
        return active[0]

    def main_hook(self) -> None:
        """Take part in one iteration within torch's Join."""
        codes = exchange_codes(self._group, JOINED)
        self._take_part(max(codes), active_ranks(codes))

    def shadow(self, code: int) -> None:
        assert self._join is not None
        self._take_part(code, self._join.active)

    def post_hook(self, is_last_joiner: bool) -> None:
        """Copy the model of a rank that joined last to all ranks: the others have not taken its last steps."""
        last = torch.tensor([self._group.rank() if is_last_joiner else -1], device="cpu")
        self._group.all_reduce(last, ReduceOp.MAX)
        copy_from = self._copy_from()
        if copy_from is not None:
            copy_from(int(last))

    def _announce_backward(self) -> None:
        assert self._join is not None
        self._announce(BACKWARD)
        self._set_divisor(self._join.active)

    def _take_part(self, code: int, active: list[int]) -> None:
        if code in (BUFFERS, BUFFERS_AND_BACKWARD) and self._buffers is not None:
            self._buffers.broadcast(active[0])
        if code in (BACKWARD, BUFFERS_AND_BACKWARD):
            self._set_divisor(active)
            self._reducer.contribute_zeros()

    def _set_divisor(self, active: list[int]) -> None:
        self._reducer.op = ReduceOp.AVG if self._divides_by_all else PremulSum(1 / len(active))
