"""The memory of gradients: small ones lie one after the other in buckets, a large one is a bucket by itself.

A bucket of small ones lies in memory that the ranks of one host share, so that averaging it copies nothing in. A
gradient is copied there once, when autograd has produced it, and from then on lives there: it is a view of the bucket.
A large gradient stays where autograd has put it: to bring it into shared memory by a copy of its own takes longer than
to let the call bring it there piece by piece.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from procgroup.groups.group import ProcessGroup
from procgroup.parallel.pytorch import torch

ALIGNMENT = 64
"""Where a bucket begins in its memory, in bytes."""

AT_END = -1


class Place:
    """One parameter, and where its gradient goes."""

    __slots__ = ("arrivals", "awaited", "bucket", "dtype", "index", "is_dense", "name", "parameter", "shape", "view")

    def __init__(self, index: int, name: str, parameter: Any, dtype: Any) -> None:
        self.index = index
        self.name = name
        self.parameter = parameter
        # In which the gradient is averaged.
        self.dtype = dtype
        self.shape = tuple(parameter.shape)
        self.is_dense = _fills_its_memory(parameter)
        self.bucket: Bucket | None = None
        self.view: Any = None
        self.arrivals = 0
        # How many times autograd adds to the gradient in one backward: 0 when it is not waited for, AT_END when that
        # is not known before the backward is over.
        self.awaited = 1

    def __str__(self) -> str:
        return f"{self.name} {self.shape}"

    @property
    def nbytes(self) -> int:
        """How many bytes the gradient has in its bucket."""
        return int(self.parameter.numel() * self.dtype.itemsize)

    def flat(self, tensor: Any) -> Any:
        """Return a tensor of the parameter's layout as one dimension, in the order of memory."""
        return tensor.as_strided((tensor.numel(),), (1,)) if self.is_dense else tensor.view(-1)

    def shaped(self, flat: Any) -> Any:
        """Return the memory of a flat tensor in the parameter's shape and layout; not as a view, for autograd."""
        shaped = torch.empty(0, dtype=flat.dtype)
        return shaped.set_(flat.untyped_storage(), flat.storage_offset(), self.shape, self._strides())

    def has_layout(self, tensor: Any) -> bool:
        """Tell whether a tensor lies in memory as ``flat`` takes it."""
        return bool(tensor.stride() == self._strides())

    def new(self) -> Any:
        """Return a new tensor of the parameter's layout; its elements are arbitrary."""
        return torch.empty_strided(self.shape, self._strides(), dtype=self.parameter.dtype)

    def _strides(self) -> tuple[int, ...]:
        # A parameter that has gaps in memory, or elements that share it, has a contiguous gradient.
        return self.parameter.stride() if self.is_dense else _contiguous_strides(self.shape)


class Bucket:
    """Gradients that are averaged by one call. ``missing`` counts those that have not arrived in this round."""

    def __init__(self, index: int, places: Sequence[Place]) -> None:
        self.index = index
        self.places = list(places)
        self.is_issued = False
        self.missing = 0
        self.buffer: Any = None
        self.pending: Any = None
        self.reset()

    def take(self, place: Place, gradient: Any) -> None:
        """Take the gradient that autograd has just accumulated."""
        raise NotImplementedError

    def fill(self, place: Place) -> None:
        """Take what there is of a gradient to which this round has added nothing: it, or zeros."""
        raise NotImplementedError

    def close(self) -> None:
        """Take all gradients out of the parameters, so that what autograd adds from now on goes elsewhere."""
        raise NotImplementedError

    def replace(self, result: Any) -> None:
        """Take a communication hook's result."""
        if result is not self.buffer:
            self.buffer.copy_(result.reshape(-1))

    def add(self, place: Place, gradient: Any) -> None:
        """Add to an averaged gradient."""
        self.view(place).add_(gradient)

    def view(self, place: Place) -> Any:
        """Return a gradient as it lies in the bucket."""
        raise NotImplementedError

    def give(self, place: Place) -> None:
        """Let the parameter have its averaged gradient."""
        raise NotImplementedError

    def reset(self) -> None:
        """Make ready for the next round."""
        self.is_issued = False
        self.missing = sum(place.awaited != 0 for place in self.places)
        self.pending = None
        for place in self.places:
            place.arrivals = 0

    def __str__(self) -> str:
        shown = ", ".join(map(str, self.places[:4]))
        return f"bucket {self.index} ({shown}{', ...' if len(self.places) > 4 else ''})"


class PackedBucket(Bucket):
    """Gradients one after the other in one memory, in which they live."""

    def __init__(self, index: int, places: Sequence[Place], memory: Any, offset: int) -> None:
        super().__init__(index, places)
        count = sum(place.parameter.numel() for place in places)
        self.buffer = _tensor_over(memory, offset, count, self.places[0].dtype)
        self._has_views = False
        for place in self.places:
            # Each is a tensor of its own rather than a view: whoever saves one does not save them all.
            place.view = place.shaped(_tensor_over(memory, offset, place.parameter.numel(), place.dtype))
            place.bucket = self
            offset += place.nbytes

    def take(self, place: Place, gradient: Any) -> None:
        if gradient is place.view:  # accumulated in place
            self._has_views = True
            return
        if place.arrivals:
            place.view.add_(gradient)
        else:
            place.view.copy_(gradient)
        place.parameter.grad = None

    def fill(self, place: Place) -> None:
        gradient = place.parameter.grad
        if gradient is None:
            place.view.zero_()
        elif gradient is place.view:  # kept elsewhere: it is to stay as it is when no rank adds to it
            place.parameter.grad = gradient.clone()
        else:
            place.view.copy_(gradient)

    def close(self) -> None:
        if self._has_views:
            self._has_views = False
            for place in self.places:
                if place.parameter.grad is place.view:
                    place.parameter.grad = None

    def view(self, place: Place) -> Any:
        return place.view

    def give(self, place: Place) -> None:
        parameter = place.parameter
        parameter.grad = place.view if parameter.dtype is place.dtype else place.view.to(parameter.dtype)


class SingleBucket(Bucket):
    """One large gradient, which stays where it is."""

    def __init__(self, index: int, place: Place) -> None:
        self._gradient: Any = None
        super().__init__(index, [place])
        place.bucket = self
        place.view = None

    def take(self, place: Place, gradient: Any) -> None:
        if not place.has_layout(gradient):
            place.parameter.grad = place.new().copy_(gradient)

    def fill(self, place: Place) -> None:
        gradient = place.parameter.grad
        self._gradient = place.new().zero_() if gradient is None else place.new().copy_(gradient)

    def close(self) -> None:
        place = self.places[0]
        if self._gradient is None:
            self._gradient = place.parameter.grad
            place.parameter.grad = None
        self.buffer = place.flat(self._gradient)

    def view(self, place: Place) -> Any:
        return self._gradient

    def give(self, place: Place) -> None:
        place.parameter.grad = self._gradient

    def reset(self) -> None:
        super().reset()
        self._gradient = None
        self.buffer = None


class GradientMemory:
    """The memory of all packed buckets: one piece, so that it can be divided in another way."""

    def __init__(self, group: ProcessGroup, nbytes: int) -> None:
        self.nbytes = nbytes
        memory = group.allocate(nbytes) if nbytes else None
        self.memory = bytearray(nbytes) if memory is None else memory


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


def _tensor_over(memory: Any, offset: int, count: int, dtype: Any) -> Any:
    if count == 0:
        return torch.empty(0, dtype=dtype)
    return torch.frombuffer(memory, dtype=dtype, count=count, offset=offset)


def _contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(math.prod(max(length, 1) for length in shape[dimension + 1 :]) for dimension in range(len(shape)))


def _fills_its_memory(tensor: Any) -> bool:
    """Tell whether a tensor's elements lie side by side in memory, in any order of its dimensions."""
    expected = 1
    for stride, length in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if length != 1:
            if stride != expected:
                return False
            expected *= length
    return True
