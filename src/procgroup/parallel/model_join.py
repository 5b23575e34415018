"""What a rank that has no more inputs does for a DistributedDataParallel of the others: see ``join``.

In procgroup's own Join each forward that copies buffers and each backward is announced by itself. torch's Join asks
once per iteration of its first joinable: there a forward says everything that comes until the next one.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, ClassVar

from procgroup.groups.group import ProcessGroup
from procgroup.parallel.join import JOINED, JoinContext, JoinHook, Roll
from procgroup.parallel.module_buffers import ModuleBuffers
from procgroup.parallel.pytorch import torch
from procgroup.parallel.reducer import Reducer
from procgroup.types import PremulSum, ReduceOp

FORWARD, BUFFERS, BACKWARD, BUFFERS_AND_BACKWARD = 2, 3, 4, 5


class ModelJoinHook(JoinHook):
    """Answers for one model, with zero gradients."""

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
        """``copy_from``, a method, copies a rank's model to all; its owner is not kept alive."""
        self._group = group
        self._reducer = reducer
        self._buffers = buffers
        self._copy_from = weakref.WeakMethod(copy_from)
        self._divides_by_all = divide_by_initial_world_size
        self._context: JoinContext | None = None
        self._roll = Roll(group)  # for torch's Join, which does not tell who still trains

    def enter(self, context: JoinContext) -> None:
        self._context = context
        self._reducer.announce = self._announce_backward

    def join(self) -> None:
        self._reducer.prepare()  # the others may wait for the end of a backward that has failed here

    def leave(self) -> None:
        self._context = self._reducer.announce = None
        self._reducer.op = ReduceOp.AVG

    def announce_forward(self, copies_buffers: bool) -> int:
        """Say that a forward begins, where that matters to others; return the rank whose buffers count."""
        assert self._context is not None
        if copies_buffers or self._context.throws:
            self._context.announce(BUFFERS if copies_buffers else FORWARD)
        return self._context.active[0]

    def announce_iteration(self, joinable: Any, copies_buffers: bool, is_round: bool) -> int:
        """Say in torch's Join what comes until the next forward; return the rank whose buffers count."""
        work = torch.distributed.algorithms.join.Join.notify_join_context(joinable)
        if work is not None:
            work.wait()
        said = {(False, False): FORWARD, (True, False): BUFFERS, (False, True): BACKWARD}
        self._roll.call(said.get((copies_buffers, is_round), BUFFERS_AND_BACKWARD))
        self._choose_divisor(self._roll)
        return self._roll.active[0]

    def main_hook(self) -> None:
        """Answer one iteration in torch's Join."""
        told = self._roll.call(JOINED)
        self._answer(max(told), self._roll)

    def answer(self, what: int) -> None:
        assert self._context is not None
        self._answer(what, self._context)

    def post_hook(self, is_last_joiner: bool) -> None:
        """Give all ranks the model of one that came last: the others have not taken its last steps."""
        last = torch.tensor([self._group.rank() if is_last_joiner else -1])
        self._group.all_reduce(last, ReduceOp.MAX)
        copy_from = self._copy_from()
        if copy_from is not None:
            copy_from(int(last))

    def _announce_backward(self) -> None:
        assert self._context is not None
        self._context.announce(BACKWARD)
        self._choose_divisor(self._context)

    def _answer(self, what: int, who: JoinContext | Roll) -> None:
        if what in (BUFFERS, BUFFERS_AND_BACKWARD) and self._buffers is not None:
            self._buffers.broadcast(who.active[0])
        if what in (BACKWARD, BUFFERS_AND_BACKWARD):
            self._choose_divisor(who)
            self._reducer.answer()

    def _choose_divisor(self, who: JoinContext | Roll) -> None:
        self._reducer.op = ReduceOp.AVG if self._divides_by_all else PremulSum(1 / len(who.active))
