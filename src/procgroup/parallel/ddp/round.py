"""One round: the marks of this rank and, after ``synchronize``, of all ranks; and the gradients at its end.

Each mark is one byte; one all_reduce with MAX combines those of all ranks. It follows the buckets at once and takes a
few microseconds when the ranks are in step. First all averages are *collected*, which takes the other ranks; then they
are assigned to the parameters.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from procgroup.groups.group import ProcessGroup
from procgroup.parallel.ddp.bucket_assignment import BucketAssignment
from procgroup.parallel.ddp.buckets import AT_END, ParameterSlot
from procgroup.parallel.ddp.devices import DeviceGroups
from procgroup.parallel.pytorch import torch
from procgroup.types import AnyReduceOp, PremulSum, ReduceOp


class Round:
    """A backward whose gradients are averaged, from its beginning on this rank until its end on all ranks."""

    def __init__(
        self, slots: Sequence[ParameterSlot], assignment: BucketAssignment, *, is_announced: bool = False
    ) -> None:
        self._slots = slots
        self._assignment = assignment
        self.is_announced: bool = is_announced
        self.has_failed: bool = False
        """Whether the backward has failed on this rank."""
        self.issued: int = 0
        """The number of buckets whose collective was called, in their order."""
        self.early_error: Exception | None = None
        """Why buckets could not be issued during the backward."""
        # By parameter: used from 0, late from `count`, changed from 2 * `count`. Of all ranks also, by rank, the failed
        # ones from 3 * `count`.
        self._count = len(slots)
        self.marks: bytearray = bytearray(3 * self._count)
        self._combined = b""
        self._late: list[tuple[ParameterSlot, Any]] = []
        self._sparse: list[tuple[ParameterSlot, Any]] = []

    def pack(self) -> None:
        """Pack the remaining buckets, and mark the gradients that no bucket averages."""
        for bucket in self._assignment.buckets:
            if not bucket.is_packed:
                bucket.pack(self.marks, is_early=False)
            elif bucket.is_early:
                for slot in bucket.slots:
                    if slot.new_gradient() is not None:
                        self.marks[self._count + slot.index] = 1
        for slot in self._assignment.unbucketed:
            if slot.new_gradient() is not None:
                self.marks[slot.index] = 1
                if not slot.is_sparse:
                    self.marks[self._count + slot.index] = 1

    def mark_changed(self, slot: ParameterSlot) -> None:
        """Mark a parameter that was not used as often as in the first round of a static graph."""
        self.marks[2 * self._count + slot.index] = 1

    def synchronize(self, group: ProcessGroup) -> None:
        """Combine the marks of all ranks; this rank's stay for another attempt."""
        combined = self.marks + bytes(group.size())
        combined[3 * self._count + group.rank()] = self.has_failed
        group.all_reduce(combined, ReduceOp.MAX)
        self._combined = bytes(combined)

    def is_used(self, index: int) -> bool:
        """Return whether a parameter has a new gradient on any rank."""
        return self._combined[index] == 1

    def late(self) -> list[ParameterSlot]:
        """Return the parameters with a late gradient on any rank."""
        return [slot for slot in self._slots if self._combined[self._count + slot.index]]

    def is_changed(self) -> bool:
        """Return whether the graph has changed on any rank."""
        return self._combined.find(1, 2 * self._count, 3 * self._count) >= 0

    def failed(self) -> list[int]:
        """Return the group ranks with a failed backward."""
        return [rank for rank, mark in enumerate(self._combined[3 * self._count :]) if mark]

    def collect(self, groups: DeviceGroups, op: AnyReduceOp) -> None:
        """Average late, unbucketed and sparse gradients; change no parameter's gradient."""
        self._late = []
        for slot in self.late():
            is_bucketed = self._assignment.bucket_of(slot) is not None
            late = slot.copy(slot.new_gradient() if is_bucketed else slot.parameter.grad)
            groups.of(late).all_reduce(slot.flatten(late), op)
            self._late.append((slot, late))
        self._sparse = [
            (slot, _average_sparse(groups.of(slot.parameter), slot.parameter, op))
            for slot in self._assignment.unbucketed
            if slot.is_sparse and self.is_used(slot.index)
        ]

    def drop(self) -> None:
        """Set the gradients of this round to None."""
        for slot in self._slots:
            if self.is_used(slot.index):
                slot.parameter.grad = None

    def assign(self) -> None:
        """Set the gradient of each parameter that any rank has used to its average."""
        whole: list[tuple[ParameterSlot, Any]] = self._sparse
        for slot, average in self._late:
            bucket = self._assignment.bucket_of(slot)
            if bucket is None:
                whole.append((slot, average))
            else:
                bucket.accumulate(slot, average)
                slot.awaited = AT_END
        all_used_in_time = self._combined.startswith(b"\1" * self._count) and self._combined.find(1, self._count) < 0
        for bucket in self._assignment.buckets:
            for slot in bucket.slots:
                if all_used_in_time or self.is_used(slot.index):
                    bucket.assign(slot)
        for slot, average in whole:
            slot.parameter.grad = average
            slot.mark_synchronized()


def sparse_parameters(module: Any) -> frozenset[str]:
    """Return the names of parameters with sparse gradients, such as those of ``Embedding(sparse=True)``."""
    return frozenset(
        f"{name}.weight".lstrip(".")
        for name, part in module.named_modules()
        if isinstance(part, (torch.nn.Embedding, torch.nn.EmbeddingBag)) and part.sparse
    )


def _average_sparse(group: ProcessGroup, parameter: Any, op: AnyReduceOp) -> Any:
    """Return the average of a parameter's sparse gradients over the ranks: sparse, each row once."""
    gradient = _sparse_gradient(parameter)
    indices, values = gradient.indices().contiguous(), gradient.values().contiguous()
    counts = torch.empty(group.size(), dtype=torch.int64, device="cpu")
    group.all_gather_single(counts, torch.tensor([indices.shape[1]], device="cpu"))
    # Transposed, so that the indices of each rank are contiguous.
    rows = [indices.new_empty((count, indices.shape[0])) for count in counts.tolist()]
    group.all_gather(rows, indices.t().contiguous())
    gathered = [values.new_empty((count, *values.shape[1:])) for count in counts.tolist()]
    group.all_gather(gathered, values)
    factor = op.factor if isinstance(op, PremulSum) else 1 / group.size()
    total = torch.sparse_coo_tensor(torch.cat(rows).t(), torch.cat(gathered), parameter.shape, check_invariants=False)
    return total.coalesce() * factor


def _sparse_gradient(parameter: Any) -> Any:
    """Return this rank's gradient as a sparse tensor: empty for None, converted if another use made it dense."""
    gradient = parameter.grad
    if gradient is None:
        no_indices = torch.empty((1, 0), dtype=torch.int64, device=parameter.device)
        gradient = torch.sparse_coo_tensor(no_indices, parameter.detach()[:0], parameter.shape, check_invariants=False)
    elif not gradient.is_sparse:
        gradient = gradient.to_sparse(1)
    return gradient.coalesce()
