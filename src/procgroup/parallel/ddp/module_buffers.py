"""A module's buffers, such as the running statistics of BatchNorm: broadcast from one rank before each forward."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from procgroup.groups.group import ProcessGroup
from procgroup.parallel.pytorch import torch

_ALIGNMENT = 16


class ModuleBuffers:
    """The buffers of a module. One broadcast sends all of them, from memory that the ranks of one host share."""

    def __init__(self, module: Any, group: ProcessGroup, ignored: frozenset[str]) -> None:
        self._group = group
        self._module = module
        self._ignored = ignored
        self.rescan()
        self._layout: list[tuple[Any, Any]] = []
        self._memory: Any = None
        self._views: list[Any] = []

    def change_group(self, group: ProcessGroup) -> None:
        """Broadcast to the ranks of another group from now on."""
        self._group = group

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
        buffers = [buffer for buffer, _ in found]
        layout = [(buffer.shape, buffer.dtype) for buffer in buffers]
        if layout != self._layout:
            self._allocate(buffers)
            self._layout = layout
        is_root = self._group.rank() == root
        with torch.no_grad():
            if is_root:
                torch._foreach_copy_(self._views, buffers)
            self._group.broadcast(self._memory, root)
            if not is_root:
                self._copy_out(found)

    def _find(self) -> Iterator[tuple[Any, bool]]:
        """Yield each current buffer once, with whether it is a running statistic."""
        seen: set[int] = set()
        for owner, ignored, is_statistic in self._owners:
            for key, buffer in owner.items():
                if buffer is not None and key not in ignored and id(buffer) not in seen:
                    seen.add(id(buffer))
                    yield buffer, is_statistic

    def _copy_out(self, found: Sequence[tuple[Any, bool]]) -> None:
        """Copy the received values to the buffers that differ from them.

        Autograd saves running statistics but does not compute with them, so they are changed without its version
        counter. It may need the old values of other buffers, so these are changed only if they differ. A program can
        thus call forward twice before one backward, unless the second forward changes a buffer that the first used.
        """
        pairs = zip(self._views, found, strict=True)
        changed = [
            (view, buffer.data if is_statistic else buffer.detach())
            for view, (buffer, is_statistic) in pairs
            if is_statistic or not torch.equal(view, buffer)
        ]
        if changed:
            views, buffers = zip(*changed, strict=True)
            torch._foreach_copy_(buffers, views)

    def _allocate(self, buffers: Sequence[Any]) -> None:
        sizes = [buffer.numel() * buffer.element_size() for buffer in buffers]
        offsets = [0]
        for size in sizes:
            offsets.append(-(-(offsets[-1] + size) // _ALIGNMENT) * _ALIGNMENT)
        nbytes = max(offsets[-1], 1)
        memory = self._group.allocate(nbytes, copied_by_fork=True) or bytearray(nbytes)
        with torch.inference_mode(False):  # the memory outlives a forward in inference mode
            self._memory = torch.frombuffer(memory, dtype=torch.uint8)
            self._views = [
                self._memory[offset : offset + size].view(buffer.dtype).view(buffer.shape)
                for buffer, size, offset in zip(buffers, sizes, offsets[:-1], strict=True)
            ]
