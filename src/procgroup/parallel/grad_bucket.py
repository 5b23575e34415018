"""What a communication hook is given: the gradients of one bucket, with torch's names."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from procgroup.parallel.place import Place


class GradBucket:
    """The gradients of some parameters, one after the other in one flat tensor.

    A hook is called with it as soon as the bucket is complete, in the same order of buckets on every rank.
    """

    def __init__(self, index: int, buffer: Any, places: Sequence[Place], is_last: bool) -> None:
        self._index = index
        self._buffer = buffer
        self._places = places
        self._is_last = is_last

    def index(self) -> int:
        """Return the bucket's number. The numbering changes once, after the first step."""
        return self._index

    def buffer(self) -> Any:
        """Return the flat tensor, of one dimension. It lies in memory that all ranks of the host can read."""
        return self._buffer

    def gradients(self) -> list[Any]:
        """Return the gradient of each parameter: views of the buffer, in the shapes of the parameters."""
        counts = [place.parameter.numel() for place in self._places]
        return [place.shaped(part) for place, part in zip(self._places, self._buffer.split(counts), strict=True)]

    def parameters(self) -> list[Any]:
        """Return the parameters whose gradients these are."""
        return [place.parameter for place in self._places]

    def is_last(self) -> bool:
        """Tell whether this is the last bucket of the step."""
        return self._is_last

    def set_buffer(self, buffer: Any) -> None:
        """Put another tensor in the buffer's place, for instance one of another dtype."""
        self._buffer = buffer


class Waitable(Protocol):
    """What a communication hook returns: a Future of procgroup or of torch, or an object of your own."""

    def wait(self) -> Any:
        """Wait until the bucket is averaged; return a tensor of as many elements, or a list that begins with it."""


Hook = Callable[[Any, GradBucket], Waitable]
"""A communication hook: averages a bucket, given its state and the bucket."""
