"""Any library's arrays through DLPack, https://dmlc.github.io/dlpack/latest: capsules with and without a version.

The capsule is kept and never marked as used: it frees what it holds when the view goes.
"""

from __future__ import annotations

import ctypes
from typing import Any

from procgroup.arrays.array_view import ArrayView, contiguous_strides

_CPU = (1, 3)  # plain memory, and memory pinned for CUDA
_READ_ONLY = 1
_COPIED = 2
_DEVICES = {2: "a CUDA device", 4: "an OpenCL device", 7: "a Vulkan device", 8: "a Metal device", 10: "a ROCm device"}
_CODES = {0: "int", 1: "uint", 2: "float", 4: "bfloat", 5: "complex"}
_NAMES = {
    (6, 8): "bool",
    (10, 8): "float8_e4m3fn",
    (11, 8): "float8_e4m3fnuz",
    (12, 8): "float8_e5m2",
    (13, 8): "float8_e5m2fnuz",
    (14, 8): "float8_e8m0fnu",
}


class _Tensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("dimensions", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class _Versioned(ctypes.Structure):
    _fields_ = (
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("tensor", _Tensor),
    )


_is_valid = ctypes.pythonapi.PyCapsule_IsValid
_is_valid.argtypes = (ctypes.py_object, ctypes.c_char_p)
_get_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_get_pointer.argtypes = (ctypes.py_object, ctypes.c_char_p)
_get_pointer.restype = ctypes.c_void_p


def view(array: Any, name: str) -> ArrayView:
    """Describe an array that has ``__dlpack__``. Raises TypeError if it is on a device or cannot be exported."""
    if hasattr(array, "__dlpack_device__"):
        _check_device(int(array.__dlpack_device__()[0]), name)
    capsule = _export(array, name)
    tensor, flags = _read(capsule, name)
    _check_device(tensor.device_type, name)
    dtype = _dtype(tensor, name)
    itemsize = tensor.bits // 8
    shape = tuple(tensor.shape[: tensor.dimensions])
    strides = contiguous_strides(shape, itemsize)
    if tensor.strides and tensor.dimensions:
        strides = tuple(stride * itemsize for stride in tensor.strides[: tensor.dimensions])
    return ArrayView(
        address=(tensor.data or 0) + tensor.byte_offset,
        shape=shape,
        strides=strides,
        dtype=dtype,
        itemsize=itemsize,
        # What is written into a copy would be lost.
        readonly=bool(flags & (_READ_ONLY | _COPIED)),
        owner=(capsule, array),
    )


def _export(array: Any, name: str) -> Any:
    try:
        try:
            return array.__dlpack__(max_version=(1, 1))
        except TypeError:  # from before DLPack 1.0
            return array.__dlpack__()
    except (BufferError, RuntimeError, TypeError, ValueError) as error:
        raise TypeError(f"`{name}`, a {type(array).__name__}, cannot be exported through DLPack: {error}") from error


def _read(capsule: Any, name: str) -> tuple[_Tensor, int]:
    if _is_valid(capsule, b"dltensor_versioned"):
        versioned = _Versioned.from_address(_get_pointer(capsule, b"dltensor_versioned"))
        if versioned.major != 1:
            raise TypeError(f"`{name}` was exported as DLPack {versioned.major}.{versioned.minor}; expected 1.x.")
        return versioned.tensor, versioned.flags
    if _is_valid(capsule, b"dltensor"):
        return _Tensor.from_address(_get_pointer(capsule, b"dltensor")), 0
    raise TypeError(
        f"`{name}`.__dlpack__() returned {capsule!r}; expected a capsule named dltensor_versioned or dltensor."
    )


def _check_device(device: int, name: str) -> None:
    if device not in _CPU:
        where = _DEVICES.get(device, f"a device of DLPack's type {device}")
        raise TypeError(
            f"`{name}` is on {where}, and this group moves arrays in CPU memory. Pass a copy in CPU memory."
        )


def _dtype(tensor: _Tensor, name: str) -> str:
    known = _NAMES.get((tensor.code, tensor.bits))
    if known is None and tensor.code in _CODES:
        known = f"{_CODES[tensor.code]}{tensor.bits}"
    if known is None or tensor.lanes != 1 or tensor.bits % 8:
        raise TypeError(
            f"`{name}` has the DLPack dtype code {tensor.code}, {tensor.bits} bits, {tensor.lanes} lanes, "
            f"which cannot be sent."
        )
    return known
