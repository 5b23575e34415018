"""Training on inputs of which some ranks have more than others.

A rank that has no more inputs *joins*: until all have joined, it answers every collective of those that still train.
So that it knows which one comes, each of them is announced: all ranks exchange one byte each, and a few microseconds
are gone.

The names are those of torch.distributed.algorithms.join. One thing is different: what joins is answered whenever it
announces itself, not once per iteration of the first, so several need not come in one order in every step.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from types import TracebackType
from typing import Any, ClassVar

from procgroup.groups.group import ProcessGroup
from procgroup.parallel.group_choice import group_of
from procgroup.parallel.training_errors import InputsExhausted, RanksApart
from procgroup.types import ReduceOp

JOINED = 1
MAIN = 0
_KINDS = 8
_FIRST = 2
_MOST = (256 - _FIRST) // _KINDS


class JoinHook:
    """What a rank that has joined does for one joinable, so that those that still train find what they wait for."""

    # What the joinable announces, by number; each is answered by ``answer``.
    NAMES: ClassVar[dict[int, str]] = {MAIN: "in its collectives"}

    def main_hook(self) -> None:
        """Take part in the collectives of one iteration."""

    def post_hook(self, is_last_joiner: bool) -> None:
        """Do what is to be done when all ranks have joined. ``is_last_joiner``: this one trained to the last."""

    def enter(self, context: JoinContext) -> None:
        """Notice that the context begins."""

    def join(self) -> None:
        """Notice that this rank has no more inputs, before the others are told."""

    def leave(self) -> None:
        """Notice that it is over, well or badly."""

    def answer(self, what: int) -> None:
        """Take part in what the joinable has announced."""
        self.main_hook()


class Joinable(ABC):
    """What can train on uneven inputs. It calls ``Join.notify_join_context(self)`` before its collectives."""

    _join: JoinContext | None = None

    @abstractmethod
    def join_hook(self, **kwargs: Any) -> JoinHook:
        """Return what answers for it; ``kwargs`` are those that Join was given, the same for all joinables."""

    @property
    @abstractmethod
    def join_process_group(self) -> Any:
        """The group of the collectives; of all joinables in one context the same."""


class JoinContext:
    """The context that one joinable is in."""

    def __init__(self, join: Join, index: int, hook: JoinHook) -> None:
        self._join = join
        self._index = index
        self.hook = hook

    @property
    def throws(self) -> bool:
        """Whether all ranks are to stop when the first has no more inputs."""
        return self._join.throws

    @property
    def active(self) -> list[int]:
        """The group ranks that still train."""
        return self._join.roll.active

    def announce(self, what: int) -> None:
        """Tell those that have joined what comes. Raises InputsExhausted and RanksApart."""
        self._join.announce(self._index, what)


class Roll:
    """Who still trains: found out whenever all ranks say where they are."""

    def __init__(self, group: ProcessGroup) -> None:
        self._group = group
        self.active: list[int] = list(range(group.size()))

    def call(self, code: int) -> bytes:
        """Say where this rank is; return where each one is. Ranks at JOINED are no longer active, unless all are."""
        told = bytearray(self._group.size())
        told[self._group.rank()] = code
        self._group.all_reduce(told, ReduceOp.MAX)
        self.active = [rank for rank, code in enumerate(told) if code != JOINED] or self.active
        return bytes(told)


class Join:
    """The context in which ranks train on different numbers of inputs. All ranks enter it with the same joinables.

    A rank that leaves it answers the others until all have left. With ``throw_on_early_termination`` all ranks raise
    InputsExhausted at the step at which the first has no more. Raises ValueError for no joinables, and for joinables of
    several groups.
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
        if len(joinables) > _MOST:
            raise ValueError(f"The join context manager takes {_MOST} joinables at most, got {len(joinables)}")
        groups = [group_of(joinable.join_process_group) for joinable in joinables]
        if any(group is not groups[0] for group in groups):
            raise ValueError("Using join context manager with multiple process groups")
        self.throws = throw_on_early_termination
        self.roll: Roll = Roll(groups[0])
        self._rank = groups[0].rank()
        self._joinables = list(joinables) if enable else []
        self._hooks = [joinable.join_hook(**kwargs) for joinable in self._joinables]

    def __enter__(self) -> Join:
        for joinable in self._joinables:
            if joinable._join is not None:
                raise RuntimeError(
                    f"This {type(joinable).__name__} is inside of join() already; leave it before you enter another."
                )
        for index, (joinable, hook) in enumerate(zip(self._joinables, self._hooks, strict=True)):
            joinable._join = JoinContext(self, index, hook)
            hook.enter(joinable._join)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            if kind is None and self._joinables:
                self._answer_until_all_have_joined()
        finally:
            for joinable, hook in zip(self._joinables, self._hooks, strict=True):
                hook.leave()
                joinable._join = None

    @staticmethod
    def notify_join_context(joinable: Joinable) -> None:
        """Announce the collectives of one iteration of a joinable; nothing outside of a context.

        Raises InputsExhausted on all ranks when one has no more inputs and ``throw_on_early_termination`` was given,
        RanksApart when the ranks do different things.
        """
        if joinable._join is not None:
            joinable._join.announce(MAIN)

    def announce(self, index: int, what: int) -> None:
        """Tell all ranks what comes, of which joinable."""
        self._call(_FIRST + index * _KINDS + what)

    def _call(self, code: int) -> int:
        """Tell all ranks where this one is; return where those are that still train, JOINED when none does."""
        told = self.roll.call(code)
        codes = set(told) - {JOINED}
        if not codes:
            return JOINED
        if self.throws and JOINED in told:
            raise InputsExhausted(ranks=[rank for rank, code in enumerate(told) if code == JOINED])
        if len(codes) > 1:
            raise RanksApart(places={rank: self._name(code) for rank, code in enumerate(told)})
        return codes.pop()

    def _answer_until_all_have_joined(self) -> None:
        for hook in self._hooks:
            hook.join()
        while (code := self._call(JOINED)) != JOINED:
            index, what = divmod(code - _FIRST, _KINDS)
            self._hooks[index].answer(what)
        for hook in self._hooks:
            hook.post_hook(self._rank in self.roll.active)

    def _name(self, code: int) -> str:
        if code == JOINED:
            return "at the end of its inputs"
        index, what = divmod(code - _FIRST, _KINDS)
        owner = f" of joinable {index}, a {type(self._joinables[index]).__name__}" if len(self._hooks) > 1 else ""
        return self._hooks[index].NAMES[what] + owner
