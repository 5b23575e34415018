"""A module's buffers, such as the running statistics of BatchNorm: copied from one rank to all before each forward."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from procgroup.groups.group import ProcessGroup
from procgroup.parallel.pytorch import torch

_ALIGNMENT = 16


class ModuleBuffers:
    """The buffers of a module, packed into one memory that the ranks of one host share: one call moves them all."""

    def __init__(self, module: Any, group: ProcessGroup, ignored: frozenset[str]) -> None:
        self._group = group
        self._module = module
        self._ignored = ignored
        self.look()
        self._layout: list[tuple[Any, Any]] = []
        self._memory: Any = None
        self._views: list[Any] = []

    def look(self) -> None:
        """Find the module's parts: they may have changed."""
        # Where the buffers are, rather than these: a module may put another tensor, or none, in a buffer's place.
        self._owners: list[tuple[dict[str, Any], frozenset[str], bool]] = []
        for name, part in self._module.named_modules():
            left_out = frozenset(
                key for key, _ in part._buffers.items() if f"{name}.{key}".lstrip(".") in self._ignored
            )
            self._owners.append((part._buffers, left_out, isinstance(part, torch.nn.modules.batchnorm._NormBase)))

    def __bool__(self) -> bool:
        return next(self._found(), None) is not None

    def tensors(self) -> list[Any]:
        """Return the buffers as they are now."""
        return [buffer for buffer, _ in self._found()]

    def broadcast(self, root: int) -> None:
        """Copy the buffers of group rank ``root`` to all."""
        found = list(self._found())
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
                self._take(found)

    def _found(self) -> Iterator[tuple[Any, bool]]:
        """Yield each buffer that there is now, once, and whether it is a running statistic."""
        seen: set[int] = set()
        for owner, left_out, is_statistic in self._owners:
            for key, buffer in owner.items():
                if buffer is not None and key not in left_out and id(buffer) not in seen:
                    seen.add(id(buffer))
                    yield buffer, is_statistic

    def _take(self, found: Sequence[tuple[Any, bool]]) -> None:
        """Copy what has come into the buffers that differ from it.

        Of running statistics autograd keeps the old values only to hand them back, and must not see that they change;
        other buffers it may need as they were. So two forwards can come before one backward, unless a buffer that the
        first has used is another in the second.
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
        with torch.inference_mode(False):  # the memory outlives this forward
            self._memory = torch.frombuffer(memory, dtype=torch.uint8)
            self._views = [
                self._memory[offset : offset + size].view(buffer.dtype).view(buffer.shape)
                for buffer, size, offset in zip(buffers, sizes, offsets[:-1], strict=True)
            ]
