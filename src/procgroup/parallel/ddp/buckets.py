"""Gradient buckets: the memory of gradients that one collective averages.

Small gradients share a *packed* bucket. It is in memory that the ranks of one host share, so the collective copies
nothing in. Its gradients are packed once, when all of them have arrived; afterwards each gradient is a tensor over the
bucket's memory. A forked child gets a copy of that memory, because it may add to gradients.

A large gradient has a bucket of its own and stays where autograd allocated it: a separate copy into shared memory takes
longer than letting the collective copy it chunk by chunk.

On a GPU a packed bucket is in torch's own memory, not in the memory that NCCL's ranks register together: that would
stay until the group ends, also when the model is wrapped again, and ranks would have to free and allocate it in step.
"""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from typing import Any

from procgroup.errors import DistError, PeerLost
from procgroup.groups.group import ProcessGroup
from procgroup.parallel.communication_hooks.interface import GradientLayout, to_dense
from procgroup.parallel.pytorch import torch

ALIGNMENT = 64
"""Alignment of packed buckets in memory, in bytes."""


AT_END = -1


class ParameterSlot(GradientLayout):
    """One parameter, its gradient's layout and dtype in a bucket, and the state of the gradient in this round."""

    __slots__ = ("_synchronized", "_version", "arrivals", "awaited", "dtype", "index", "is_sparse", "name", "view")

    def __init__(self, index: int, name: str, parameter: Any, dtype: Any, is_sparse: bool) -> None:
        """``dtype`` is that of the average; ``is_sparse`` means gradients of torch's sparse layout."""
        super().__init__(parameter)
        self.index: int = index
        self.name: str = name
        self.dtype: Any = dtype
        self.is_sparse: bool = is_sparse
        # The gradient's memory in its bucket; None for a gradient without a packed bucket.
        self.view: Any = None
        self.arrivals: int = 0
        # How many times autograd adds to the gradient in one backward: 0 for an unused parameter, AT_END when the
        # number is unknown until the backward ends.
        self.awaited: int = 1
        self._synchronized: Any = None
        self._version = 0

    def __str__(self) -> str:
        return f"{self.name} {self.shape}"

    @property
    def device(self) -> Any:
        """The device of the parameter, and of its gradient."""
        return self.parameter.device

    @property
    def nbytes(self) -> int:
        """Size of the gradient in its bucket, in bytes."""
        return int(self.parameter.numel() * self.dtype.itemsize)

    def mark_synchronized(self) -> None:
        """Mark the gradient as synchronized; it stays so until the program changes it."""
        gradient = self.parameter.grad
        self._synchronized = None if gradient is None else weakref.ref(gradient)
        self._version = 0 if gradient is None else gradient._version

    def is_new(self) -> bool:
        """Return whether the gradient exists and has changed since ``mark_synchronized``."""
        gradient = self.parameter.grad
        if gradient is None:
            return False
        return self._synchronized is None or self._synchronized() is not gradient or gradient._version != self._version

    def new_gradient(self) -> Any:
        """Return the gradient if it is new, else None. Raises RuntimeError for a gradient that is part of a graph."""
        if not self.is_new():
            return None
        gradient = self.parameter.grad
        if gradient.requires_grad:
            raise RuntimeError(
                f"DistributedDataParallel averages gradients outside of the graph, so a backward with "
                f"create_graph=True cannot be differentiated again ({self}). Use torch.autograd.grad(..., "
                "create_graph=True), and call backward() without it on what you compute from that."
            )
        return gradient


class Bucket(ABC):
    """Gradients that one collective averages. ``missing`` counts those that have not arrived in this round."""

    def __init__(self, index: int, slots: Sequence[ParameterSlot]) -> None:
        self.index = index
        self.slots: list[ParameterSlot] = list(slots)
        self.device: Any = slots[0].device
        self.nbytes: int = sum(slot.nbytes for slot in slots)
        self.buffer: Any = None
        self.missing: int = 0
        # Packed during the backward: the parameters' gradients are then None, so later gradients are kept apart.
        self.is_early: bool = False
        self.is_packed: bool = False
        self.pending: Any = None
        self._kept: Any = None
        self.reset()

    def is_complete(self) -> bool:
        """Return whether every parameter has a new gradient."""
        return all(slot.new_gradient() is not None for slot in self.slots)

    def pack(self, used: bytearray, is_early: bool) -> None:
        """Fill the buffer with new gradients, and with zeros for missing ones; set ``used`` of each new gradient."""
        self.fill(used)
        self.is_packed, self.is_early = True, is_early
        if is_early:
            for slot in self.slots:
                if used[slot.index]:
                    slot.parameter.grad = None

    @abstractmethod
    def fill(self, used: bytearray) -> None:
        """Fill the buffer as ``pack`` does, and leave the parameters' gradients unchanged."""

    def set_average(self, average: Any) -> None:
        """Store the result of a communication hook."""
        if average is not self.buffer:
            self.buffer.copy_(average.reshape(-1))

    def keep(self) -> None:
        """Keep a copy of the buffer, with which ``restore`` undoes an average."""
        if self._kept is None:
            self._kept = torch.empty_like(self.buffer)
        self._kept.copy_(self.buffer)

    def restore(self) -> None:
        """Fill the buffer with what was kept, for another attempt."""
        self.buffer.copy_(self._kept)
        self.pending = None

    @abstractmethod
    def accumulate(self, slot: ParameterSlot, gradient: Any) -> None:
        """Add a gradient to the average of a slot."""

    @abstractmethod
    def assign(self, slot: ParameterSlot) -> None:
        """Set the parameter's gradient to its average."""

    @contextmanager
    def annotate_errors(self) -> Iterator[None]:
        """Add the names of this bucket's parameters to errors between ranks."""
        try:
            yield
        except DistError as error:
            error.add_note(f"while the gradients of {self} were averaged")
            if isinstance(error, PeerLost) and error.left:
                error.add_note(
                    "Does that rank have fewer batches? With inputs of uneven lengths, train in: with model.join():"
                )
            raise

    def reset(self) -> None:
        """Prepare for the next round."""
        self.missing = sum(slot.awaited != 0 for slot in self.slots)
        self.is_early = self.is_packed = False
        self.pending = None

    def __str__(self) -> str:
        shown = ", ".join(map(str, self.slots[:4]))
        return f"bucket {self.index} ({shown}{', ...' if len(self.slots) > 4 else ''})"


class PackedBucket(Bucket):
    """Several gradients, one after the other in shared memory, or in that of a GPU."""

    def __init__(self, index: int, slots: Sequence[ParameterSlot], memory: Any, offset: int) -> None:
        super().__init__(index, slots)
        count = sum(slot.parameter.numel() for slot in slots)
        self.buffer: Any = _tensor_over(memory, offset, count, self.slots[0].dtype)
        self._memory = memory
        self._offsets = list(accumulate((slot.nbytes for slot in self.slots[:-1]), initial=offset))
        self._addresses = [0] * len(self.slots)
        for position in range(len(self.slots)):
            self._make_view(position)

    def _make_view(self, position: int) -> None:
        # A tensor of its own, not a view of the buffer: a program that saves one gradient does not save all of them.
        slot = self.slots[position]
        flat = _tensor_over(self._memory, self._offsets[position], slot.parameter.numel(), slot.dtype)
        slot.view = slot.unflatten(flat)
        self._addresses[position] = slot.view.data_ptr()

    def fill(self, used: bytearray) -> None:
        views, gradients = [], []
        for position, slot in enumerate(self.slots):
            if slot.view.data_ptr() != self._addresses[position]:  # the program has set .data of the gradient
                self._make_view(position)
            gradient = slot.new_gradient()
            if gradient is None:
                self._fill_unused(slot)
                continue
            used[slot.index] = 1
            if gradient is not slot.view:  # otherwise autograd has accumulated in place
                views.append(slot.view)
                gradients.append(to_dense(gradient))
        if views:
            torch._foreach_copy_(views, gradients)

    def _fill_unused(self, slot: ParameterSlot) -> None:
        """Fill in zeros or the old gradient. The parameter keeps the old gradient if no rank has used it."""
        gradient = slot.parameter.grad
        if gradient is None:
            slot.view.zero_()
        elif gradient is slot.view:
            slot.parameter.grad = gradient.clone()
            slot.mark_synchronized()
        else:
            slot.view.copy_(gradient)

    def accumulate(self, slot: ParameterSlot, gradient: Any) -> None:
        slot.view.add_(gradient)

    def assign(self, slot: ParameterSlot) -> None:
        parameter = slot.parameter
        parameter.grad = slot.view if parameter.dtype is slot.dtype else slot.view.to(parameter.dtype)
        slot.mark_synchronized()


class SingleBucket(Bucket):
    """One large gradient, in the memory that autograd allocated."""

    def __init__(self, index: int, slot: ParameterSlot) -> None:
        self._gradient: Any = None
        super().__init__(index, [slot])
        slot.view = None

    def fill(self, used: bytearray) -> None:
        slot = self.slots[0]
        gradient = slot.new_gradient()
        if gradient is None:
            self._gradient = slot.copy(slot.parameter.grad)
        else:
            used[slot.index] = 1
            self._gradient = gradient if slot.matches(gradient) else slot.copy(gradient)
        self.buffer: Any = slot.flatten(self._gradient)

    def accumulate(self, slot: ParameterSlot, gradient: Any) -> None:
        self._gradient.add_(gradient)

    def assign(self, slot: ParameterSlot) -> None:
        if slot.parameter.grad is not self._gradient:
            slot.parameter.grad = self._gradient
        slot.mark_synchronized()

    def reset(self) -> None:
        super().reset()
        self._gradient = None
        self.buffer = None


class GradientMemory:
    """The memory of all packed buckets of one device: one allocation, which re-bucketing divides again."""

    def __init__(self, group: ProcessGroup, device: Any, nbytes: int) -> None:
        self.nbytes = nbytes
        if device.type == "cpu":
            memory = group.allocate(nbytes, copied_by_fork=True) if nbytes else None
            self.memory: Any = bytearray(nbytes) if memory is None else memory
        else:
            with torch.inference_mode(False):
                self.memory = torch.empty(nbytes, dtype=torch.uint8, device=device)


def make_buckets(
    group: ProcessGroup,
    slots: Sequence[ParameterSlot],
    assignment: Sequence[Sequence[int]],
    is_single: Sequence[bool],
    memories: dict[Any, GradientMemory],
) -> list[Bucket]:
    """Make the buckets of an assignment (indices of slots by bucket).

    ``memories`` are those of the devices: one that is large enough is used again, others are replaced.
    """
    sizes = [0 if is_single[bucket[0]] else sum(slots[index].nbytes for index in bucket) for bucket in assignment]
    devices = [slots[bucket[0]].device for bucket in assignment]
    for device in dict.fromkeys(devices):
        own = [size for size, other in zip(sizes, devices, strict=True) if other == device]
        if device not in memories or memories[device].nbytes < sum(map(_rounded, own)):
            # Enough for every other assignment too: a bucket wastes less than the alignment.
            memories[device] = GradientMemory(group, device, sum(own) + ALIGNMENT * len(slots) if sum(own) else 0)
    buckets: list[Bucket] = []
    offsets = dict.fromkeys(devices, 0)
    for index, (bucket, size, device) in enumerate(zip(assignment, sizes, devices, strict=True)):
        chosen = [slots[each] for each in bucket]
        if is_single[bucket[0]]:
            buckets.append(SingleBucket(index, chosen[0]))
        else:
            buckets.append(PackedBucket(index, chosen, memories[device].memory, offsets[device]))
        offsets[device] += _rounded(size)
    return buckets


def _rounded(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def _tensor_over(memory: Any, offset: int, count: int, dtype: Any) -> Any:
    if isinstance(memory, torch.Tensor):
        return memory[offset : offset + count * dtype.itemsize].view(dtype)
    if count == 0:
        return torch.empty(0, dtype=dtype, device="cpu")
    return torch.frombuffer(memory, dtype=dtype, count=count, offset=offset)
