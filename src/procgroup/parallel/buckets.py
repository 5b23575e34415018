"""The memory of gradients: small ones lie one after the other in buckets, a large one is a bucket by itself.

A bucket of small ones lies in memory that the ranks of one host share, so that averaging it copies nothing in. Its
gradients are *packed* once, when all of them are there, and from then on live there: each is a view of the bucket. A
forked child, which may add to gradients, has a copy. A large gradient stays where autograd has put it: to bring it into
shared memory by a copy of its own takes longer than to let the call bring it there piece by piece.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from typing import Any

from procgroup.errors import DistError
from procgroup.groups.group import ProcessGroup
from procgroup.parallel.place import Place, dense
from procgroup.parallel.pytorch import torch

ALIGNMENT = 64
"""Where a bucket begins in its memory, in bytes."""


class Bucket(ABC):
    """Gradients that are averaged by one call. ``missing`` counts those that have not arrived in this round."""

    def __init__(self, index: int, places: Sequence[Place]) -> None:
        self.index = index
        self.places: list[Place] = list(places)
        self.nbytes: int = sum(place.nbytes for place in places)
        for place in places:
            place.bucket = self
        self.buffer: Any = None
        self.missing: int = 0
        # Packed while the backward goes on: then the parameters have no gradients, so that what comes is apart.
        self.is_early: bool = False
        self.is_packed: bool = False
        self.pending: Any = None
        self.reset()

    def is_complete(self) -> bool:
        """Tell whether every parameter has a new gradient."""
        return all(place.new_gradient() is not None for place in self.places)

    def pack(self, flags: bytearray, is_early: bool) -> None:
        """Make the buffer of what gradients there are, and of zeros; set the flag of each new one."""
        self.collect(flags)
        self.is_packed, self.is_early = True, is_early
        if is_early:
            for place in self.places:
                if flags[place.index]:
                    place.parameter.grad = None

    @abstractmethod
    def collect(self, flags: bytearray) -> None:
        """Do what ``pack`` does, leaving the gradients in the parameters."""

    def replace(self, result: Any) -> None:
        """Take a communication hook's result."""
        if result is not self.buffer:
            self.buffer.copy_(result.reshape(-1))

    @abstractmethod
    def add(self, place: Place, gradient: Any) -> None:
        """Add to an averaged gradient."""

    @abstractmethod
    def give(self, place: Place) -> None:
        """Let the parameter have its averaged gradient."""

    @contextmanager
    def named_in_errors(self) -> Iterator[None]:
        """Let errors between ranks say whose gradients were being averaged."""
        try:
            yield
        except DistError as error:
            error.add_note(f"while the gradients of {self} were averaged")
            raise

    def reset(self) -> None:
        """Make ready for the next round."""
        self.missing = sum(place.awaited != 0 for place in self.places)
        self.is_early = self.is_packed = False
        self.pending = None

    def __str__(self) -> str:
        shown = ", ".join(map(str, self.places[:4]))
        return f"bucket {self.index} ({shown}{', ...' if len(self.places) > 4 else ''})"


class PackedBucket(Bucket):
    """Gradients one after the other in one memory, in which they live."""

    def __init__(self, index: int, places: Sequence[Place], memory: Any, offset: int) -> None:
        super().__init__(index, places)
        count = sum(place.parameter.numel() for place in places)
        self.buffer: Any = _tensor_over(memory, offset, count, self.places[0].dtype)
        self._memory = memory
        self._offsets = list(accumulate((place.nbytes for place in self.places[:-1]), initial=offset))
        self._addresses = [0] * len(self.places)
        for index in range(len(self.places)):
            self._make_view(index)

    def _make_view(self, index: int) -> None:
        # Each is a tensor of its own rather than a view: whoever saves one does not save them all.
        place = self.places[index]
        flat = _tensor_over(self._memory, self._offsets[index], place.parameter.numel(), place.dtype)
        place.view = place.shaped(flat)
        self._addresses[index] = place.view.data_ptr()

    def collect(self, flags: bytearray) -> None:
        views, gradients = [], []
        for index, place in enumerate(self.places):
            if place.view.data_ptr() != self._addresses[index]:  # it was a gradient, and was given other data
                self._make_view(index)
            gradient = place.new_gradient()
            if gradient is None:
                self._fill(place)
                continue
            flags[place.index] = 1
            if gradient is not place.view:  # else it was accumulated in place
                views.append(place.view)
                gradients.append(dense(gradient))
        if views:
            torch._foreach_copy_(views, gradients)

    def _fill(self, place: Place) -> None:
        """Give zeros, or a gradient to which nothing was added: that stays as it is, when no rank has added to it."""
        gradient = place.parameter.grad
        if gradient is None:
            place.view.zero_()
        elif gradient is place.view:
            place.parameter.grad = gradient.clone()
            place.remember()
        else:
            place.view.copy_(gradient)

    def add(self, place: Place, gradient: Any) -> None:
        place.view.add_(gradient)

    def give(self, place: Place) -> None:
        parameter = place.parameter
        parameter.grad = place.view if parameter.dtype is place.dtype else place.view.to(parameter.dtype)
        place.remember()


class SingleBucket(Bucket):
    """One large gradient, which stays where it is."""

    def __init__(self, index: int, place: Place) -> None:
        self._gradient: Any = None
        super().__init__(index, [place])
        place.view = None

    def collect(self, flags: bytearray) -> None:
        place = self.places[0]
        gradient = place.new_gradient()
        if gradient is None:
            self._gradient = place.copy_of(place.parameter.grad)
        else:
            flags[place.index] = 1
            self._gradient = gradient if place.has_layout(gradient) else place.copy_of(gradient)
        self.buffer: Any = place.flat(self._gradient)

    def add(self, place: Place, gradient: Any) -> None:
        self._gradient.add_(gradient)

    def give(self, place: Place) -> None:
        if place.parameter.grad is not self._gradient:
            place.parameter.grad = self._gradient
        place.remember()

    def reset(self) -> None:
        super().reset()
        self._gradient = None
        self.buffer = None


def make_buckets(
    group: ProcessGroup,
    places: Sequence[Place],
    plan: Sequence[Sequence[int]],
    alone: Sequence[bool],
    memory: GradientMemory | None,
) -> tuple[list[Bucket], GradientMemory]:
    """Make the buckets of a plan, in the memory of an earlier one where that is large enough."""
    sizes = [0 if alone[bucket[0]] else sum(places[place].nbytes for place in bucket) for bucket in plan]
    rounded = [-(-size // ALIGNMENT) * ALIGNMENT for size in sizes]
    if memory is None or memory.nbytes < sum(rounded):
        # Room for any other division too: each bucket loses less than the alignment.
        memory = GradientMemory(group, sum(sizes) + ALIGNMENT * len(places) if sum(sizes) else 0)
    buckets: list[Bucket] = []
    offset = 0
    for index, (bucket, nbytes) in enumerate(zip(plan, rounded, strict=True)):
        chosen = [places[place] for place in bucket]
        if alone[bucket[0]]:
            buckets.append(SingleBucket(index, chosen[0]))
        else:
            buckets.append(PackedBucket(index, chosen, memory.memory, offset))
        offset += nbytes
    return buckets, memory


class GradientMemory:
    """The memory of all packed buckets: one piece, so that it can be divided in another way."""

    def __init__(self, group: ProcessGroup, nbytes: int) -> None:
        self.nbytes = nbytes
        memory = group.allocate(nbytes, copied_by_fork=True) if nbytes else None
        self.memory: Any = bytearray(nbytes) if memory is None else memory


def _tensor_over(memory: Any, offset: int, count: int, dtype: Any) -> Any:
    if count == 0:
        return torch.empty(0, dtype=dtype)
    return torch.frombuffer(memory, dtype=dtype, count=count, offset=offset)
