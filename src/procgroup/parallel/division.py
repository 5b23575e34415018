"""Which gradients share a bucket: at first in reverse order of registration, then in the order in which they arrive."""

from __future__ import annotations

from collections.abc import Sequence

from procgroup.groups.group import ProcessGroup
from procgroup.parallel.agreement import Agreement
from procgroup.parallel.bucket_plan import Piece, plan_buckets
from procgroup.parallel.buckets import Bucket, GradientMemory, make_buckets
from procgroup.parallel.place import Place
from procgroup.parallel.pytorch import torch

SINGLE_BYTES = 1 << 20
"""From this size on a gradient is averaged where autograd has put it: see ``buckets``."""


class Division:
    """The buckets, and ``outside`` of them the places of sparse gradients and of those that are left out."""

    def __init__(
        self,
        group: ProcessGroup,
        places: Sequence[Place],
        limits: Sequence[int],
        delayed: frozenset[str],
        leaves_out_unused: bool,
    ) -> None:
        self._group = group
        self._places = places
        self._limits = limits
        self._delayed = frozenset(place.index for place in places if place.name in delayed)
        self._leaves_out_unused = leaves_out_unused
        self._memory: GradientMemory | None = None
        # The order of arrival in the first round; None once it is in use.
        self._arrived: list[int] | None = []
        self._order: list[int] | None = None
        self.buckets: list[Bucket] = []
        self.outside: list[Place] = [place for place in places if place.is_sparse]
        self._make([place.index for place in places if not place.is_sparse][::-1])

    def note(self, place: Place) -> None:
        """Note that a gradient has arrived."""
        if self._arrived is not None and not place.arrivals:
            self._arrived.append(place.index)

    @property
    def is_learnt(self) -> bool:
        """Whether the first round is over."""
        return self._arrived is None

    def learn(self, agreement: Agreement) -> None:
        """Take over, after the first round, the order of arrival on rank 0. All ranks call this."""
        if self._arrived is None:
            return
        # What has not arrived on rank 0 comes last, in any order that is the same everywhere.
        count = len(self._places)
        turns = torch.full((count,), count, dtype=torch.int64)
        turns[torch.tensor(self._arrived, dtype=torch.int64)] = torch.arange(len(self._arrived))
        self._group.broadcast(turns, 0)
        self._arrived = None
        if self._leaves_out_unused:
            for bucket in self.buckets:
                self.outside += [place for place in bucket.places if not agreement.is_used(place.index)]
        outside = {place.index for place in self.outside}
        self._order = sorted(set(range(count)) - outside, key=turns.tolist().__getitem__)

    def renew(self) -> bool:
        """Divide the memory anew if there is a new order; tell whether there was."""
        order, self._order = self._order, None
        if order is None:
            return False
        for place in self._places:
            if place.view is not None and place.parameter.grad is place.view:
                place.parameter.grad = place.view.clone()
                place.remember()
        for place in self.outside:
            place.bucket = place.view = None
        self._make(order)
        return True

    def _make(self, order: Sequence[int]) -> None:
        alone = [place.nbytes >= SINGLE_BYTES and place.dtype is place.parameter.dtype for place in self._places]
        pieces = [
            Piece(place.nbytes, f"{place.dtype}{' delayed' if place.index in self._delayed else ''}", one)
            for place, one in zip(self._places, alone, strict=True)
        ]
        plan = plan_buckets(pieces, sorted(order, key=self._delayed.__contains__), self._limits)
        self.buckets, self._memory = make_buckets(self._group, self._places, plan, alone, self._memory)
