"""torch tensors in CPU memory, for what the native adapter does not read: other devices, layouts, lazy views."""

from __future__ import annotations

import math
import sys
from typing import Any

from procgroup.arrays.array_view import HOST, ArrayView
from procgroup.errors import ArgumentError


def view(tensor: Any, writable: bool, name: str) -> ArrayView | None:
    """Describe a torch tensor; None for anything else.

    As in torch.distributed, a leaf that requires a gradient is taken and changed in place, and autograd does not see
    it. A conjugate or negative view is resolved into a copy to be read, and refused to be written.
    """
    torch = sys.modules["torch"]
    known: Any = getattr(torch, "Tensor", ())  # not there yet while another thread imports torch
    if not isinstance(tensor, known):
        return None
    _check(torch, tensor, name)
    if tensor.is_conj() or tensor.is_neg():
        if writable:
            raise ArgumentError(
                f"`{name}` is a lazy conjugate or negative view, and this call writes into it. "
                f"Pass {name}.resolve_conj().resolve_neg(), and copy the result back."
            )
        tensor = tensor.resolve_conj().resolve_neg()
    return describe(tensor, HOST)


def describe(tensor: Any, device: int) -> ArrayView:
    """Describe a strided tensor with memory of its own, on a CUDA device or the host."""
    itemsize = tensor.element_size()
    return ArrayView(
        address=tensor.data_ptr(),
        shape=tuple(tensor.shape),
        strides=tuple(stride * itemsize for stride in tensor.stride()),
        dtype=str(tensor.dtype).removeprefix("torch."),
        itemsize=itemsize,
        readonly=False,
        owner=tensor,
        device=device,
    )


def _check(torch: Any, tensor: Any, name: str) -> None:
    if tensor.is_meta:
        raise TypeError(f"`{name}` is a meta tensor, which has no elements. Pass a tensor with memory.")
    if tensor.layout is not torch.strided:
        raise TypeError(f"`{name}` has layout {tensor.layout}; expected torch.strided. Pass {name}.to_dense().")
    if not tensor.is_cpu:
        raise TypeError(
            f"`{name}` is on {tensor.device}, and this group moves arrays in CPU memory. "
            f"Pass {name}.cpu(), and copy the result back."
        )
    try:
        address = tensor.data_ptr()
    except RuntimeError as error:
        raise TypeError(f"`{name}` is a {type(tensor).__name__} without memory of its own: {error}") from error
    if address == 0 and tensor.numel() != 0:
        raise TypeError(f"`{name}` is a {type(tensor).__name__} without memory of its own. Pass a plain torch.Tensor.")


def over(memory: Any, shape: tuple[int, ...], dtype: str) -> Any:
    """Return a torch tensor over a writable buffer, which it keeps alive. Raises TypeError for a foreign dtype."""
    torch = sys.modules["torch"]
    element = getattr(torch, dtype, None)
    if element is None:
        raise TypeError(f"torch has no dtype {dtype}")
    if 0 in shape:
        return torch.empty(shape, dtype=element)
    return torch.frombuffer(memory, dtype=element, count=math.prod(shape)).view(shape)
