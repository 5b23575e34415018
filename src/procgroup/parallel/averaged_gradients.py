"""The end of a round, when the buckets are averaged: which parameters get what."""

from __future__ import annotations

from collections.abc import Sequence

from procgroup.groups.group import ProcessGroup
from procgroup.parallel.agreement import Agreement
from procgroup.parallel.division import Division
from procgroup.parallel.place import AT_END, Place
from procgroup.parallel.sparse_gradients import average_sparse
from procgroup.types import AnyReduceOp


class AveragedGradients:
    """What the buckets hold, and what is outside of them, as the parameters' gradients."""

    def __init__(self, group: ProcessGroup, places: Sequence[Place], division: Division) -> None:
        self._group = group
        self._places = places
        self._division = division

    def drop(self, agreement: Agreement) -> None:
        """Take all gradients of this round away."""
        for place in self._places:
            if agreement.is_used(place.index):
                place.parameter.grad = None

    def give(self, agreement: Agreement, op: AnyReduceOp) -> None:
        """Let each parameter that any rank has used have its averaged gradient."""
        everything = agreement.is_plain
        for bucket in self._division.buckets:
            for place in bucket.places:
                if everything or agreement.is_used(place.index):
                    bucket.give(place)
        for place in self._division.outside:
            if place.is_sparse and agreement.is_used(place.index):
                place.parameter.grad = average_sparse(self._group, place.parameter, op)
                place.remember()

    def add_late(self, place: Place, op: AnyReduceOp) -> None:
        """Average what came after its bucket was packed, on any rank, or for which there is none; and add it."""
        bucket = place.bucket
        late = place.copy_of(place.parameter.grad if bucket is None else place.new_gradient())
        self._group.all_reduce(place.flat(late), op)
        if bucket is None:
            place.parameter.grad = late
            place.remember()
            return
        bucket.add(place, late)
        place.awaited = AT_END
