"""Training on inputs of which some ranks have more than others.

A rank that has no more inputs *joins*: until all have joined, it answers every collective of those that still train.
So that it knows which one comes, each of them is announced: all ranks exchange one byte each, and a few microseconds
are gone.
"""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType

from procgroup.groups.group import ProcessGroup
from procgroup.parallel.module_buffers import ModuleBuffers
from procgroup.parallel.reducer import Reducer
from procgroup.parallel.training_errors import InputsExhausted, RanksApart
from procgroup.types import PremulSum, ReduceOp

JOINED, FORWARD, BUFFERS, BACKWARD = 1, 2, 3, 4
_NAMES = {
    JOINED: "at the end of its inputs",
    FORWARD: "in a forward",
    BUFFERS: "in a forward that copies buffers",
    BACKWARD: "in a backward",
}


class Join:
    """What ``DistributedDataParallel.join`` returns: the context in which the ranks train."""

    def __init__(
        self,
        group: ProcessGroup,
        reducer: Reducer,
        buffers: ModuleBuffers | None,
        *,
        divide_by_initial_world_size: bool,
        throw_on_early_termination: bool,
        enter: Callable[[Join | None], None],
        end: Callable[[int], None],
    ) -> None:
        """``enter`` is told when the context begins and, with None, ends; ``end`` copies a rank's model to all."""
        self._group = group
        self._reducer = reducer
        self._buffers = buffers
        self._divides_by_all = divide_by_initial_world_size
        self._throws = throw_on_early_termination
        self._enter = enter
        self._end = end
        self._active = list(range(group.size()))

    def __enter__(self) -> Join:
        self._enter(self)
        self._reducer.announce = self._announce_backward
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                self._answer_until_all_have_joined()
        finally:
            self._reducer.announce = None
            self._reducer.op = ReduceOp.AVG
            self._enter(None)

    def announce_forward(self, copies_buffers: bool) -> int:
        """Say that a forward begins, where that matters to others; return the rank whose buffers count."""
        if copies_buffers or self._throws:
            self._announce(BUFFERS if copies_buffers else FORWARD)
        return self._active[0]

    def _announce_backward(self) -> None:
        self._announce(BACKWARD)
        self._choose_divisor()

    def _choose_divisor(self) -> None:
        self._reducer.op = ReduceOp.AVG if self._divides_by_all else PremulSum(1 / len(self._active))

    def _announce(self, what: int) -> int:
        """Tell all ranks what comes on this one; return what comes on those that still train, JOINED when none does."""
        told = bytearray(self._group.size())
        told[self._group.rank()] = what
        self._group.all_reduce(told, ReduceOp.MAX)
        active = [rank for rank, code in enumerate(told) if code != JOINED]
        if not active:
            return JOINED
        self._active = active
        if self._throws and len(active) < len(told):
            raise InputsExhausted(ranks=[rank for rank in range(len(told)) if rank not in active])
        if len({told[rank] for rank in active}) > 1:
            raise RanksApart(places={rank: _NAMES[code] for rank, code in enumerate(told)})
        return told[active[0]]

    def _answer_until_all_have_joined(self) -> None:
        while (what := self._announce(JOINED)) != JOINED:
            if what == BUFFERS and self._buffers is not None:
                self._buffers.broadcast(self._active[0])
            elif what == BACKWARD:
                self._choose_divisor()
                self._reducer.answer()
        self._end(self._active[-1])  # the others have not taken its last steps
