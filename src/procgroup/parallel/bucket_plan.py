"""Which gradients travel together: pure arithmetic, so that all ranks come to one plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Piece:
    """One gradient: its size, and its kind, such as its dtype. Gradients of different kinds never share a bucket."""

    nbytes: int
    kind: str
    alone: bool = False
    """Whether it has a bucket for itself."""


def plan_buckets(pieces: Sequence[Piece], order: Sequence[int], limits: Sequence[int]) -> list[list[int]]:
    """Cut the pieces, taken in ``order``, into buckets; return the places of the pieces of each.

    Bucket ``i`` is closed as soon as it holds ``limits[i]`` bytes; the last limit is for all that follow. The buckets
    come in the order in which they will be complete when the pieces come in ``order``.
    """
    closed: list[list[int]] = []
    growing: dict[str, list[int]] = {}
    sizes: dict[str, int] = {}
    for place in order:
        piece = pieces[place]
        if piece.alone:
            closed.append([place])
            continue
        growing.setdefault(piece.kind, []).append(place)
        sizes[piece.kind] = sizes.get(piece.kind, 0) + piece.nbytes
        if sizes[piece.kind] >= limits[min(len(closed), len(limits) - 1)]:
            closed.append(growing.pop(piece.kind))
            del sizes[piece.kind]
    rank_in_order = {place: number for number, place in enumerate(order)}
    closed += growing.values()
    return sorted(closed, key=lambda bucket: rank_in_order[bucket[-1]])
