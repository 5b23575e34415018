"""One rank's pass over an epoch: its share of the indices, and the position that all ranks have reached.

An epoch has an order of ``total`` *positions*, the same on every rank. A pass starts at position ``start``, and the
remaining positions go to the ranks in turn::

    position   start  start + 1  start + 2  ...        three ranks: a round is three positions
    rank           0          1          2  0  1  2

Ranks that train together draw at the same pace: after ``n`` draws on each rank the first ``start + n * replicas``
positions are visited. When the last round is incomplete, mode "pad" fills it with indices from the beginning of the
order, "drop" omits it, and "exact" gives its indices to the lower ranks only.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any

_MODES = ("pad", "drop", "exact")


def choose_mode(mode: str | None, drop_last: bool) -> str:
    """Return the mode for the arguments of a sampler. Raises ValueError for an unknown mode and a contradiction."""
    if mode is None:
        return "drop" if drop_last else "pad"
    if mode not in _MODES:
        raise ValueError(f"expected `mode` to be one of {', '.join(_MODES)}, got {mode!r}")
    if drop_last and mode != "drop":
        raise ValueError(f"drop_last=True means mode 'drop', and mode={mode!r} was given too.")
    return mode


def count_share(total: int, rank: int, replicas: int, mode: str) -> int:
    """Return the number of indices that a rank visits out of ``total`` positions."""
    if mode == "pad":
        return -(-total // replicas)
    return total // replicas if mode == "drop" else len(range(rank, total, replicas))


def share_of(order: Sequence[Any], start: int, rank: int, replicas: int, mode: str) -> list[Any]:
    """Return the indices of a rank from position ``start`` on."""
    own = order[start + rank :: replicas]
    share: list[Any] = own.tolist() if hasattr(own, "tolist") else list(own)
    count = count_share(len(order) - start, rank, replicas, mode)
    if count > len(share):
        index = order[(start + rank + (count - 1) * replicas) % len(order)]
        share.append(index.item() if type(index).__module__ == "numpy" else index)
    return share[:count]


def share_of_stream(
    stream: Iterator[Any], start: int, rank: int, replicas: int, mode: str, on_round: Callable[[list[Any]], None]
) -> Iterator[Any]:
    """Yield the indices of a rank from a stream of unknown length; call ``on_round`` with the indices of each round.

    Keeps up to ``replicas`` indices in memory. Skips the positions before ``start``.
    """
    beginning = list(islice(stream, replicas))
    rest = chain(beginning[start:], islice(stream, max(0, start - len(beginning)), None))
    while len(round_ := list(islice(rest, replicas))) == replicas:
        on_round(round_)
        yield round_[rank]
    on_round(round_)
    if rank < len(round_) and mode != "drop":
        yield round_[rank]
    elif round_ and mode == "pad":
        yield beginning[(rank - len(round_)) % len(beginning)]


@dataclass(frozen=True)
class EpochStart:
    """The position at which passes of an epoch start, and a hash of the order in which it was counted."""

    epoch: int = 0
    position: int = 0
    order: str | None = None


class Pass:
    """Counts the indices of one pass that were drawn, and those that were used. ``order`` is a hash of the order."""

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

    def set_length(self, length: int, total: int) -> None:
        """Set the number of indices of this rank, and the number of positions of the epoch."""
        self._length, self._total = length, total

    def draw(self, indices: Iterable[Any]) -> Iterator[Any]:
        """Yield indices and count them."""
        for index in indices:
            self.drawn += 1
            yield index
        self.is_exhausted = True

    @property
    def is_complete(self) -> bool:
        """Whether all indices were drawn."""
        return self._length is not None and self.drawn >= self._length

    def position(self, count: int) -> int:
        """Return the number of positions that are visited after ``count`` indices on every rank.

        The remainder that "drop" omits, and that "exact" gives to other ranks, is included as soon as the caller has
        asked for an index after this rank's last one.
        """
        reached = self.start + count * self._replicas
        if self._total is None or self._length is None:
            return reached
        has_ended = count >= self._length and self.is_exhausted
        return self._total if has_ended else min(reached, self._total)


def is_read_by_workers() -> bool:
    """Return whether the caller is a loader with workers, such as torch's DataLoader, which draws indices ahead."""
    frame = sys._getframe(1)
    for _ in range(6):  # the sampler, a BatchSampler, and the frames of the loader
        workers = getattr(frame.f_locals.get("self"), "_num_workers", 0)
        if isinstance(workers, int) and workers > 0:
            return True
        if frame.f_back is None:
            break
        frame = frame.f_back
    return False
