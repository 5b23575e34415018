"""Arrays in the memory of CUDA devices, and the streams on which their libraries use them.

CuPy, Numba and others describe an array by ``__cuda_array_interface__``, version 3
(https://numba.readthedocs.io/en/stable/cuda/cuda_array_interface.html), whose "stream" is the one on which the library
uses the array now. torch's tensors are used on torch's current stream; their interface does not say so.
"""

from __future__ import annotations

import sys
from typing import Any

from procgroup.arrays import torch_tensor
from procgroup.arrays.array_view import DTYPES, ArrayView, contiguous_strides
from procgroup.errors import ArgumentError

LEGACY_STREAM = 1
"""The handle of CUDA's legacy default stream, in CUDA's and in the interface's numbers."""


def is_cuda_array(array: Any) -> bool:
    """Return whether an array is in the memory of a CUDA device, and says so by the interface.

    JAX's arrays are not: they are immutable, and come through their own file.
    """
    known: Any = getattr(sys.modules.get("jax"), "Array", ())
    if isinstance(array, known):
        return False
    # torch raises for tensors on the CPU, and for those that require gradients.
    if _is_tensor(array):
        return bool(array.is_cuda and array.layout is sys.modules["torch"].strided)
    return hasattr(array, "__cuda_array_interface__")


def view(array: Any, name: str) -> ArrayView:
    """Describe an array on a CUDA device.

    Raises TypeError for one with a mask, and ArgumentError for a lazy view and for another byte order.
    """
    if _is_tensor(array):
        return _view_of_tensor(array, name)
    interface = array.__cuda_array_interface__
    if interface.get("mask") is not None:
        raise TypeError(f"`{name}` has a mask, and a mask is not sent. Pass the elements and the mask in two calls.")
    if interface["typestr"][0] == ">":
        raise ArgumentError(f"`{name}` is not in this machine's byte order: {interface['typestr']}.")
    address, readonly = interface["data"]
    shape = tuple(interface["shape"])
    itemsize = int(interface["typestr"][2:])
    strides = interface.get("strides")
    return ArrayView(
        address=address or 0,
        shape=shape,
        strides=contiguous_strides(shape, itemsize) if strides is None else tuple(strides),
        dtype=_dtype(array, interface["typestr"]),
        itemsize=itemsize,
        readonly=bool(readonly),
        owner=array,
        device=_device_of(array, address),
    )


def refusal(array: Any, name: str) -> str:
    """Say why an array on a device cannot be passed where only the host's memory is read."""
    device: Any = getattr(array, "device", None)
    whose = type(array).__module__.partition(".")[0]
    if whose == "torch":
        where, copies = f"{device}", f"{name}.cpu(), and copy the result back"
    else:
        where = f"CUDA device {device.id}" if hasattr(device, "id") else "a CUDA device"
        copies = f"{name}.get(), and copy the result back with {name}.set()" if whose == "cupy" else "a copy on the CPU"
    return f"`{name}` is on {where}, and this call reads arrays in CPU memory. Pass {copies}."


def current_stream(array: Any) -> int | None:
    """Return the handle of the stream on which an array's library uses it now.

    None where the library states none: the array is used after the host has waited for the device.
    """
    if _is_tensor(array):
        return int(sys.modules["torch"].cuda.current_stream(array.device).cuda_stream) or LEGACY_STREAM
    stream = array.__cuda_array_interface__.get("stream")
    return None if stream is None else int(stream)


def _is_tensor(array: Any) -> bool:
    known: Any = getattr(sys.modules.get("torch"), "Tensor", ())
    return isinstance(array, known)


def _view_of_tensor(tensor: Any, name: str) -> ArrayView:
    if tensor.is_conj() or tensor.is_neg():
        raise ArgumentError(
            f"`{name}` is a lazy conjugate or negative view. Pass {name}.resolve_conj().resolve_neg(), and copy a "
            f"result back."
        )
    return torch_tensor.describe(tensor, tensor.device.index)


def _dtype(array: Any, typestr: str) -> str:
    import numpy

    # The interface has no names for the types of ml_dtypes.
    name = str(getattr(array, "dtype", ""))
    return name if name in DTYPES else numpy.dtype(typestr).name


def _device_of(array: Any, address: int) -> int:
    device = getattr(array, "device", None)
    number = device if isinstance(device, int) else getattr(device, "id", None)  # CuPy has the latter
    if number is not None:
        return int(number)
    if not address:  # an array without elements may have no memory
        return 0
    from procgroup import _native

    try:
        return _native.gpu_of(address)
    except RuntimeError as error:
        raise TypeError(
            f"expected an array in the memory of a CUDA device, got an address that has none: {error}"
        ) from error
