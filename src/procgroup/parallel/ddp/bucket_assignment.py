"""Bucket assignment: which gradients share a bucket.

Buckets follow the reverse order of the parameters' registration in the first round, and from then on the order in which
gradients arrive on rank 0. The assignment is pure arithmetic, so all ranks compute the same one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

from procgroup.parallel.ddp.buckets import Bucket, GradientMemory, ParameterSlot, make_buckets
from procgroup.parallel.ddp.devices import DeviceGroups
from procgroup.parallel.pytorch import torch

SINGLE_BYTES = 1 << 20
"""A gradient of this size or more has a bucket of its own: see ``buckets``."""

SINGLE_BYTES_ON_GPU = 25 << 20
"""The same on GPUs, where copies cost less, and calls more: a gradient that fills a bucket by itself."""


@dataclass(frozen=True)
class GradientInfo:
    """Size and kind (dtype and device) of a gradient. Gradients of different kinds never share a bucket."""

    nbytes: int
    kind: str
    is_single: bool = False
    """Whether the gradient has a bucket of its own."""


def assign_to_buckets(
    gradients: Sequence[GradientInfo], order: Sequence[int], limits: Sequence[int]
) -> list[list[int]]:
    """Divide gradients, given as indices in the expected order of arrival, into buckets; return the indices by bucket.

    Bucket ``i`` is closed when it holds ``limits[i]`` bytes or more; the last limit is that of all further buckets.
    Buckets are sorted by the arrival of their last gradient.
    """
    closed: list[list[int]] = []
    open_by_kind: dict[str, list[int]] = {}
    sizes: dict[str, int] = {}
    for index in order:
        gradient = gradients[index]
        if gradient.is_single:
            closed.append([index])
            continue
        open_by_kind.setdefault(gradient.kind, []).append(index)
        sizes[gradient.kind] = sizes.get(gradient.kind, 0) + gradient.nbytes
        if sizes[gradient.kind] >= limits[min(len(closed), len(limits) - 1)]:
            closed.append(open_by_kind.pop(gradient.kind))
            del sizes[gradient.kind]
    arrival = {index: number for number, index in enumerate(order)}
    closed += open_by_kind.values()
    return sorted(closed, key=lambda bucket: arrival[bucket[-1]])


class BucketOrder(Enum):
    """The state of the order of buckets."""

    ARRIVING = auto()
    """The first round: each rank records the order in which gradients arrive."""
    RECEIVED = auto()
    """All ranks have the order of rank 0; the next round begins with new buckets."""
    SETTLED = auto()
    """The buckets have that order, and stay."""


class BucketAssignment:
    """The current buckets. ``unbucketed`` are the slots of sparse gradients, and of parameters that were left out."""

    def __init__(
        self,
        groups: DeviceGroups,
        slots: Sequence[ParameterSlot],
        limits: Sequence[int],
        delayed: frozenset[str],
        leaves_out_unused: bool,
    ) -> None:
        self._groups = groups
        self._slots = slots
        self._limits = limits
        self._delayed = frozenset(slot.index for slot in slots if slot.name in delayed)
        self._leaves_out_unused = leaves_out_unused
        self._memories: dict[Any, GradientMemory] = {}
        self.order: BucketOrder = BucketOrder.ARRIVING
        self._arrived: list[int] = []
        self._positions: list[int] = []
        self.buckets: list[Bucket] = []
        self._bucket_of_slot: dict[int, Bucket] = {}
        self.unbucketed: list[ParameterSlot] = [slot for slot in slots if slot.is_sparse]
        self._assign([slot.index for slot in slots if not slot.is_sparse][::-1])

    def bucket_of(self, slot: ParameterSlot) -> Bucket | None:
        """Return the bucket of a slot; None for an unbucketed one."""
        return self._bucket_of_slot.get(slot.index)

    def record_arrival(self, slot: ParameterSlot) -> None:
        """Count an arrival of a gradient; record the order of the first ones in the first round."""
        if self.order is BucketOrder.ARRIVING and not slot.arrivals:
            self._arrived.append(slot.index)
        slot.arrivals += 1

    def receive_order(self) -> None:
        """Receive, at the end of the first round, the order of arrival on rank 0. All ranks call this."""
        if self.order is not BucketOrder.ARRIVING:
            return
        # Gradients that did not arrive on rank 0 come last, in an order that is the same on all ranks.
        count = len(self._slots)
        with torch.device("cpu"):
            positions = torch.full((count,), count, dtype=torch.int64)
            positions[torch.tensor(self._arrived, dtype=torch.int64)] = torch.arange(len(self._arrived))
        self._groups.group.broadcast(positions, 0)
        self._positions = positions.tolist()

    def accept_order(self, is_used: Callable[[int], bool]) -> None:
        """Let the next round begin with buckets in the order that was received, if this was the first round."""
        if self.order is not BucketOrder.ARRIVING:
            return
        self.order = BucketOrder.RECEIVED
        if self._leaves_out_unused:
            for bucket in self.buckets:
                self.unbucketed += [slot for slot in bucket.slots if not is_used(slot.index)]

    def rebuild(self) -> bool:
        """Rebuild the buckets if there is a new order; return whether there was one."""
        if self.order is not BucketOrder.RECEIVED:
            return False
        self.order = BucketOrder.SETTLED
        for slot in self._slots:
            if slot.view is not None and slot.parameter.grad is slot.view:
                slot.parameter.grad = slot.view.clone()
                slot.mark_synchronized()
        for slot in self.unbucketed:
            slot.view = None
        unbucketed = {slot.index for slot in self.unbucketed}
        self._assign(sorted(set(range(len(self._slots))) - unbucketed, key=self._positions.__getitem__))
        return True

    def _assign(self, order: Sequence[int]) -> None:
        is_single = [
            slot.dtype is slot.parameter.dtype
            and slot.nbytes >= (SINGLE_BYTES if slot.device.type == "cpu" else SINGLE_BYTES_ON_GPU)
            for slot in self._slots
        ]
        kinds = [f"{slot.dtype} {slot.device}{' delayed' * (slot.index in self._delayed)}" for slot in self._slots]
        gradients = [
            GradientInfo(slot.nbytes, kind, single)
            for slot, kind, single in zip(self._slots, kinds, is_single, strict=True)
        ]
        assignment = assign_to_buckets(gradients, sorted(order, key=self._delayed.__contains__), self._limits)
        self.buckets = make_buckets(self._groups.group, self._slots, assignment, is_single, self._memories)
        self._bucket_of_slot = {slot.index: bucket for bucket in self.buckets for slot in bucket.slots}
