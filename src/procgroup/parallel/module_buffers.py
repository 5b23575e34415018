"""A module's buffers, such as the running statistics of BatchNorm: copied from one rank to all before each forward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from procgroup.groups.group import ProcessGroup
from procgroup.parallel.pytorch import torch

_ALIGNMENT = 16


class ModuleBuffers:
    """The buffers of a module, packed into one memory that the ranks of one host share: one call moves them all."""

    def __init__(self, module: Any, group: ProcessGroup, ignored: frozenset[str]) -> None:
        self._group = group
        # Where each buffer is, rather than the buffer: a module may put another tensor in its place.
        self._owners: list[tuple[dict[str, Any], str, bool]] = []
        seen: set[int] = set()
        for name, part in module.named_modules():
            # Of running statistics autograd keeps the old values only to hand them back.
            is_statistic = isinstance(part, torch.nn.modules.batchnorm._NormBase)
            for key, buffer in part._buffers.items():
                if buffer is not None and f"{name}.{key}".lstrip(".") not in ignored and id(buffer) not in seen:
                    seen.add(id(buffer))
                    self._owners.append((part._buffers, key, is_statistic))
        self._layout: list[tuple[Any, Any]] = []
        self._memory: Any = None
        self._views: list[Any] = []

    def __bool__(self) -> bool:
        return bool(self._owners)

    def tensors(self) -> list[Any]:
        """Return the buffers as they are now."""
        return [owner[key] for owner, key, _ in self._owners]

    def broadcast(self, root: int) -> None:
        """Copy the buffers of group rank ``root`` to all."""
        buffers = self.tensors()
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
                torch._foreach_copy_(self._writable(buffers), self._views)

    def _writable(self, buffers: Sequence[Any]) -> list[Any]:
        """Return the tensors to write to: autograd must not see that statistics change, or two forwards could not be
        followed by one backward."""
        return [
            buffer.data if is_statistic else buffer.detach()
            for buffer, (_, _, is_statistic) in zip(buffers, self._owners, strict=True)
        ]

    def _allocate(self, buffers: Sequence[Any]) -> None:
        sizes = [buffer.numel() * buffer.element_size() for buffer in buffers]
        offsets = [0]
        for size in sizes:
            offsets.append(-(-(offsets[-1] + size) // _ALIGNMENT) * _ALIGNMENT)
        nbytes = max(offsets[-1], 1)
        memory = self._group.allocate(nbytes) or bytearray(nbytes)
        self._memory = torch.frombuffer(memory, dtype=torch.uint8)
        self._views = [
            self._memory[offset : offset + size].view(buffer.dtype).view(buffer.shape)
            for buffer, size, offset in zip(buffers, sizes, offsets[:-1], strict=True)
        ]
