"""Join: train on inputs of which some ranks have more than others.

A rank without more inputs *joins*: until all ranks have joined, it takes part in every collective of the ranks that
still train. Each collective is announced before, so that joined ranks know which one comes: all ranks exchange one
byte each, which takes a few microseconds.

The names are those of ``torch.distributed.algorithms.join``, with one difference: joinables announce their collectives
separately, not once per iteration of the first joinable, so several joinables may come in a different order in each
step.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from types import TracebackType
from typing import Any, ClassVar

from procgroup.errors import InputsExhausted, RanksApart
from procgroup.groups.group import ProcessGroup
from procgroup.parallel.group_choice import group_of
from procgroup.types import ReduceOp

JOINED = 1
"""The code of a rank that has no more inputs."""

MAIN = 0
"""The code of one iteration of a joinable, without further distinction."""

# One byte encodes JOINED, or the index of a joinable and one of its codes.
_FIRST_CODE = 2
_CODES_PER_JOINABLE = 8
_MAX_JOINABLES = (256 - _FIRST_CODE) // _CODES_PER_JOINABLE


class JoinHook:
    """What a joined rank does for one joinable while other ranks still train."""

    # The codes that the joinable announces, with the names for error messages.
    NAMES: ClassVar[dict[int, str]] = {MAIN: "in its collectives"}
    # The context that is entered, and the index of the joinable in it.
    _join: Join | None = None
    _index = 0

    def main_hook(self) -> None:
        """Take part in the collectives of one iteration."""

    def post_hook(self, is_last_joiner: bool) -> None:
        """Run after all ranks have joined. ``is_last_joiner``: this rank was among the last to join."""

    def _announce(self, code: int, index: int | None = None) -> None:
        """Announce collectives of a joinable to the joined ranks. Raises InputsExhausted and RanksApart."""
        assert self._join is not None
        self._join.exchange(_FIRST_CODE + (self._index if index is None else index) * _CODES_PER_JOINABLE + code)

    def enter(self, context: Join) -> None:
        """Run when the context is entered."""

    def join(self) -> None:
        """Run when this rank has no more inputs, before the other ranks are notified."""

    def leave(self) -> None:
        """Run when the context is left, also after an error."""

    def shadow(self, code: int) -> None:
        """Take part in the collectives that the joinable has announced with a code."""
        self.main_hook()


class Joinable(ABC):
    """A class that can train on uneven inputs. It calls ``Join.notify_join_context(self)`` before its collectives."""

    # The hook, within a context.
    _entered_hook: JoinHook | None = None
    _entered_index = 0

    @abstractmethod
    def join_hook(self, **kwargs: Any) -> JoinHook:
        """Return the hook for joined ranks. ``kwargs`` are those of ``Join``, the same for all joinables."""

    @property
    @abstractmethod
    def join_process_group(self) -> Any:
        """The group of the collectives: the same for all joinables of one ``Join``."""


def exchange_codes(group: ProcessGroup, code: int) -> bytes:
    """Exchange a code of one byte for what this rank does next; return the codes of all ranks."""
    codes = bytearray(group.size())
    codes[group.rank()] = code
    group.all_reduce(codes, ReduceOp.MAX)
    return bytes(codes)


def active_ranks(codes: bytes) -> list[int]:
    """Return the group ranks that still have inputs."""
    return [rank for rank, code in enumerate(codes) if code != JOINED]


class Join:
    """A context in which ranks train on different numbers of inputs. All ranks enter it with the same joinables.

    A rank that leaves the block takes part in the collectives of the others until all have left. With
    ``throw_on_early_termination`` all ranks raise InputsExhausted at the step at which the first has no more inputs.
    Raises ValueError without joinables, and for joinables of different groups.
    """

    def __init__(
        self,
        joinables: Sequence[Joinable],
        enable: bool = True,
        throw_on_early_termination: bool = False,
        **kwargs: Any,
    ) -> None:
        if not joinables:
            raise ValueError("The join context manager requires at least one joinable")
        if len(joinables) > _MAX_JOINABLES:
            raise ValueError(f"The join context manager takes {_MAX_JOINABLES} joinables at most, got {len(joinables)}")
        groups = [group_of(joinable.join_process_group) for joinable in joinables]
        if any(group is not groups[0] for group in groups):
            raise ValueError("Using join context manager with multiple process groups")
        self.throws = throw_on_early_termination
        self._group = groups[0]
        # When all ranks have joined, the last active ones stay here.
        self.active: list[int] = list(range(self._group.size()))
        self._joinables = list(joinables) if enable else []
        self._hooks = [joinable.join_hook(**kwargs) for joinable in self._joinables]

    def __enter__(self) -> Join:
        for joinable in self._joinables:
            if joinable._entered_hook is not None:
                raise RuntimeError(
                    f"This {type(joinable).__name__} is inside of join() already; leave it before you enter another."
                )
        for index, (joinable, hook) in enumerate(zip(self._joinables, self._hooks, strict=True)):
            joinable._entered_hook, joinable._entered_index = hook, index
            hook._join, hook._index = self, index
            hook.enter(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            if kind is None and self._joinables:
                self._shadow_until_all_have_joined()
        finally:
            for joinable, hook in zip(self._joinables, self._hooks, strict=True):
                hook.leave()
                joinable._entered_hook = hook._join = None

    @staticmethod
    def notify_join_context(joinable: Joinable) -> None:
        """Announce the collectives of one iteration of a joinable. Does nothing outside of a context.

        Raises InputsExhausted on all ranks when one has no more inputs and ``throw_on_early_termination`` was given,
        RanksApart when the ranks announce different collectives.
        """
        if joinable._entered_hook is not None:
            joinable._entered_hook._announce(MAIN, joinable._entered_index)

    def exchange(self, code: int) -> int:
        """Exchange codes; return the code of the active ranks, or JOINED when no rank is active."""
        codes = exchange_codes(self._group, code)
        self.active = active_ranks(codes) or self.active
        announced = set(codes) - {JOINED}
        if not announced:
            return JOINED
        if self.throws and JOINED in codes:
            raise InputsExhausted(ranks=[rank for rank, code in enumerate(codes) if code == JOINED])
        if len(announced) > 1:
            raise RanksApart(places={rank: self._name(code) for rank, code in enumerate(codes)})
        return announced.pop()

    def _shadow_until_all_have_joined(self) -> None:
        for hook in self._hooks:
            hook.join()
        while (code := self.exchange(JOINED)) != JOINED:
            index, announced = divmod(code - _FIRST_CODE, _CODES_PER_JOINABLE)
            self._hooks[index].shadow(announced)
        for hook in self._hooks:
            hook.post_hook(self._group.rank() in self.active)

    def _name(self, code: int) -> str:
        if code == JOINED:
            return "at the end of its inputs"
        index, announced = divmod(code - _FIRST_CODE, _CODES_PER_JOINABLE)
        owner = f" of joinable {index}, a {type(self._joinables[index]).__name__}" if len(self._hooks) > 1 else ""
        return self._hooks[index].NAMES[announced] + owner
