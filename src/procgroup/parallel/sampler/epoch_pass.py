"""One rank's pass over an epoch: the indices that are dealt to it, and how far all ranks have come.

An epoch has an order of ``total`` *positions*, the same on every rank. A pass begins at position ``start`` and deals
what is left out in turn::

    position   start  start + 1  start + 2  ...        three ranks: a round is three positions
    rank           0          1          2  0  1  2

Ranks that train together draw in step, so that after ``n`` draws of each the first ``start + n * replicas``
positions are visited. Where the last round is not full, "pad" fills it with indices from the beginning of the
order, "drop" leaves it out, and "exact" ends it early on the higher ranks.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import Any

MODES = ("pad", "drop", "exact")


def count_dealt(total: int, rank: int, replicas: int, mode: str) -> int:
    """Return how many of ``total`` positions a rank visits."""
    if mode == "pad":
        return -(-total // replicas)
    return total // replicas if mode == "drop" else len(range(rank, total, replicas))


def deal(order: Sequence[Any], start: int, rank: int, replicas: int, mode: str) -> list[Any]:
    """Return the indices that are a rank's, from position ``start`` on."""
    own = order[start + rank :: replicas]
    dealt: list[Any] = own.tolist() if hasattr(own, "tolist") else list(own)
    count = count_dealt(len(order) - start, rank, replicas, mode)
    if count > len(dealt):
        dealt.append(_plain(order[(start + rank + (count - 1) * replicas) % len(order)]))
    return dealt[:count]


def deal_stream(
    stream: Iterator[Any], start: int, rank: int, replicas: int, mode: str, on_round: Callable[[list[Any]], None]
) -> Iterator[Any]:
    """Yield what is a rank's of an order whose length shows only at its end; ``on_round`` sees each round.

    Up to ``replicas`` indices are kept at a time. Rounds before ``start`` are read, and not shown.
    """
    beginning = list(islice(stream, replicas))
    rest = _chain_from(beginning, stream, start)
    while len(round_ := list(islice(rest, replicas))) == replicas:
        on_round(round_)
        yield round_[rank]
    on_round(round_)
    if rank < len(round_) and mode != "drop":
        yield round_[rank]
    elif round_ and mode == "pad":
        yield beginning[(rank - len(round_)) % len(beginning)]


class Pass:
    """Counts what was drawn of a pass, and what was used of it. ``order`` is a hash of the epoch's order, or None."""

    def __init__(self, epoch: int, start: int, replicas: int, order: str | None) -> None:
        self.epoch = epoch
        self.order = order
        self.drawn: int = 0
        self.used = 0
        self.start = start
        self._replicas = replicas
        self.is_exhausted: bool = False
        self._length: int | None = None
        self._total: int | None = None

    def ends_after(self, length: int, total: int) -> None:
        """Tell how many indices this rank draws, and how many positions the epoch has."""
        self._length, self._total = length, total

    def draw(self, indices: Iterable[Any]) -> Iterator[Any]:
        """Yield indices and count them."""
        for index in indices:
            self.drawn += 1
            yield index
        self.is_exhausted = True

    @property
    def is_complete(self) -> bool:
        """Whether everything was drawn."""
        return self._length is not None and self.drawn >= self._length

    def position(self, count: int) -> int:
        """Return how many positions are visited when every rank is done with ``count`` indices.

        What "drop" leaves out, and what "exact" gives to other ranks only, counts when this rank has asked for more.
        """
        reached = self.start + count * self._replicas
        if self._total is None or self._length is None:
            return reached
        is_over = count >= self._length and self.is_exhausted
        return self._total if is_over else min(reached, self._total)


def is_read_by_workers() -> bool:
    """Tell whether a loader with workers, such as torch.utils.data.DataLoader, is calling: it draws ahead of use."""
    frame = sys._getframe(1)
    for _ in range(6):  # the sampler, a BatchSampler, and the loader's own frames
        workers = getattr(frame.f_locals.get("self"), "_num_workers", 0)
        if isinstance(workers, int) and workers > 0:
            return True
        if frame.f_back is None:
            break
        frame = frame.f_back
    return False


def _chain_from(beginning: list[Any], stream: Iterator[Any], start: int) -> Iterator[Any]:
    yield from beginning[start:]
    yield from islice(stream, max(0, start - len(beginning)), None)


def _plain(index: Any) -> Any:
    """Return an element of an order as lists have it: NumPy's integers become int."""
    return index.item() if type(index).__module__ == "numpy" else index
