"""Set the parameters' gradients at the end of a round: from buckets, from sparse gradients and from late ones.

First all averages are *collected*, which takes the other ranks; then they are assigned.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from procgroup.groups.group import ProcessGroup
from procgroup.parallel.ddp.bucket_assignment import BucketAssignment
from procgroup.parallel.ddp.device_groups import DeviceGroups
from procgroup.parallel.ddp.parameter_slot import AT_END, ParameterSlot
from procgroup.parallel.ddp.synchronized_flags import SynchronizedFlags
from procgroup.parallel.pytorch import torch
from procgroup.types import AnyReduceOp, PremulSum


class AveragedGradients:
    """Sets the gradients of a model's parameters to their averages."""

    def __init__(self, groups: DeviceGroups, slots: Sequence[ParameterSlot], assignment: BucketAssignment) -> None:
        self._groups = groups
        self._slots = slots
        self._assignment = assignment
        self._late: list[tuple[ParameterSlot, Any]] = []
        self._sparse: list[tuple[ParameterSlot, Any]] = []

    def change_group(self, groups: DeviceGroups) -> None:
        """Average over the ranks of another group from now on."""
        self._groups = groups

    def collect(self, flags: SynchronizedFlags, op: AnyReduceOp) -> None:
        """Average late, unbucketed and sparse gradients; change no parameter's gradient."""
        self._late = [(slot, self._average_late(slot, op)) for slot in map(self._slots.__getitem__, flags.late())]
        self._sparse = [
            (slot, average_sparse(self._groups.of(slot.parameter), slot.parameter, op))
            for slot in self._assignment.unbucketed
            if slot.is_sparse and flags.is_used(slot.index)
        ]

    def drop(self, flags: SynchronizedFlags) -> None:
        """Set the gradients of this round to None."""
        for slot in self._slots:
            if flags.is_used(slot.index):
                slot.parameter.grad = None

    def assign(self, flags: SynchronizedFlags) -> None:
        """Set the gradient of each parameter that any rank has used to its average."""
        for slot, average in self._late:
            self._add_late(slot, average)
        all_used = flags.all_used_in_time
        for bucket in self._assignment.buckets:
            for slot in bucket.slots:
                if all_used or flags.is_used(slot.index):
                    bucket.assign(slot)
        for slot, average in self._sparse:
            slot.parameter.grad = average
            slot.mark_synchronized()
        self._late, self._sparse = [], []

    def _average_late(self, slot: ParameterSlot, op: AnyReduceOp) -> Any:
        """Return the average of a late or unbucketed gradient."""
        is_bucketed = self._assignment.bucket_of(slot) is not None
        late = slot.layout.copy(slot.new_gradient() if is_bucketed else slot.parameter.grad)
        self._groups.of(late).all_reduce(slot.layout.flatten(late), op)
        return late

    def _add_late(self, slot: ParameterSlot, average: Any) -> None:
        bucket = self._assignment.bucket_of(slot)
        if bucket is None:
            slot.parameter.grad = average
            slot.mark_synchronized()
            return
        bucket.accumulate(slot, average)
        slot.awaited = AT_END


def sparse_parameters(module: Any) -> frozenset[str]:
    """Return the names of parameters with sparse gradients, such as those of ``Embedding(sparse=True)``."""
    return frozenset(
        f"{name}.weight".lstrip(".")
        for name, part in module.named_modules()
        if isinstance(part, (torch.nn.Embedding, torch.nn.EmbeddingBag)) and part.sparse
    )


def average_sparse(group: ProcessGroup, parameter: Any, op: AnyReduceOp) -> Any:
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
