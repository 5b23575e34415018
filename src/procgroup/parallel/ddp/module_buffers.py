"""A module's buffers, such as the running statistics of BatchNorm: broadcast from one rank before each forward.

A received value must not surprise autograd. Autograd saves running statistics but does not compute with them, so they
are changed without its version counter. It may need the old values of other buffers: a change of one that it has saved
must be an error of the backward. A program can nevertheless call forward twice before one backward, because a buffer
with the value of the last broadcast is not changed.

On CPUs the values are compared. On GPUs the host would have to wait for that. There, a buffer counts as unchanged while
this rank has not changed it since the last broadcast, by its version; it takes the received value without the version
counter. So a buffer that rank 0 alone changes between two forwards of one backward changes on the others unnoticed.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from typing import Any

from procgroup.groups.group import ProcessGroup
from procgroup.parallel.ddp.devices import DeviceGroups
from procgroup.parallel.pytorch import torch

_ALIGNMENT = 16

Found = tuple[Any, bool]
"""A buffer, and whether it is a running statistic."""


class ModuleBuffers:
    """The buffers of a module. One broadcast sends those of each device."""

    def __init__(self, module: Any, groups: DeviceGroups, ignored: frozenset[str]) -> None:
        self._groups = groups
        self._module = module
        self._ignored = ignored
        self.rescan()
        self._by_device: dict[Any, _BuffersOfDevice] = {}

    def rescan(self) -> None:
        """Find the submodules again after a change."""
        # The dictionaries of the buffers: a module may replace a buffer by another tensor or by None.
        self._owners: list[tuple[dict[str, Any], frozenset[str], bool]] = []
        for name, part in self._module.named_modules():
            ignored = frozenset(key for key, _ in part._buffers.items() if f"{name}.{key}".lstrip(".") in self._ignored)
            self._owners.append((part._buffers, ignored, isinstance(part, torch.nn.modules.batchnorm._NormBase)))

    def __bool__(self) -> bool:
        return next(self._find(), None) is not None

    def tensors(self) -> list[Any]:
        """Return the current buffers."""
        return [buffer for buffer, _ in self._find()]

    def broadcast(self, root: int) -> None:
        """Copy the buffers of group rank ``root`` to all ranks."""
        found = list(self._find())
        for device in dict.fromkeys(buffer.device for buffer, _ in found):
            chosen = [each for each in found if each[0].device == device]
            sent = self._by_device.setdefault(device, _BuffersOfDevice())
            sent.broadcast(chosen, self._groups.of(chosen[0][0]), root)

    def _find(self) -> Iterator[Found]:
        """Yield each current buffer once, with whether it is a running statistic."""
        seen: set[int] = set()
        for owner, ignored, is_statistic in self._owners:
            for key, buffer in owner.items():
                if buffer is not None and key not in ignored and id(buffer) not in seen:
                    seen.add(id(buffer))
                    yield buffer, is_statistic


class _BuffersOfDevice:
    """The memory in which the buffers of one device are sent, on CPUs memory that the ranks of one host share."""

    def __init__(self) -> None:
        self._layout: list[tuple[Any, Any]] = []
        self._memory: Any = None
        self._views: list[Any] = []
        # On a GPU: the buffers as the last broadcast has left them, with their versions.
        self._left: list[tuple[weakref.ref[Any], int]] = []

    def broadcast(self, found: Sequence[Found], group: ProcessGroup, root: int) -> None:
        """Copy buffers of this device from a group rank to all ranks."""
        buffers = [buffer for buffer, _ in found]
        layout = [(buffer.shape, buffer.dtype) for buffer in buffers]
        if layout != self._layout:
            self._allocate(buffers, group)
            self._layout, self._left = layout, []
        is_root = group.rank() == root
        with torch.no_grad():
            if is_root:
                torch._foreach_copy_(self._views, buffers)
            group.broadcast(self._memory, root)
            if not is_root:
                self._copy_out(found)
        if not self._memory.is_cpu:
            self._left = [(weakref.ref(buffer), _version(buffer)) for buffer in buffers]

    def _copy_out(self, found: Sequence[Found]) -> None:
        """Copy the received values to the buffers: see above."""
        changed = []
        versions = {id(left()): version for left, version in self._left}
        for view, (buffer, is_statistic) in zip(self._views, found, strict=True):
            if is_statistic or versions.get(id(buffer)) == _version(buffer):
                changed.append((view, buffer.data))
            elif not (buffer.is_cpu and torch.equal(view, buffer)):
                changed.append((view, buffer.detach()))
        if changed:
            views, buffers = zip(*changed, strict=True)
            with torch.inference_mode(any(buffer.is_inference() for buffer in buffers)):
                torch._foreach_copy_(buffers, views)

    def _allocate(self, buffers: Sequence[Any], group: ProcessGroup) -> None:
        sizes = [buffer.numel() * buffer.element_size() for buffer in buffers]
        offsets = [0]
        for size in sizes:
            offsets.append(-(-(offsets[-1] + size) // _ALIGNMENT) * _ALIGNMENT)
        nbytes = max(offsets[-1], 1)
        with torch.inference_mode(False):  # the memory outlives a forward in inference mode
            if buffers[0].is_cpu:
                memory = group.allocate(nbytes, copied_by_fork=True) or bytearray(nbytes)
                self._memory = torch.frombuffer(memory, dtype=torch.uint8)
            else:
                self._memory = torch.empty(nbytes, dtype=torch.uint8, device=buffers[0].device)
            self._views = [
                self._memory[offset : offset + size].view(buffer.dtype).view(buffer.shape)
                for buffer, size, offset in zip(buffers, sizes, offsets[:-1], strict=True)
            ]


def _version(buffer: Any) -> int:
    return 0 if buffer.is_inference() else int(buffer._version)
