"""Call frames as XLA makes them for a handler on a GPU: those of native/xla/ffi.hpp, by ctypes.

    handle = Handler(on_gpu=True)
    error = handle(number, [given], [result], stream)

Arrays are those of gpu_arrays. The error is XLA's text, or "" where there is none.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

from procgroup import _native

_DTYPES = {"int16": 3, "int32": 4, "float32": 11}
_TOKEN, _UINT64 = 17, 9
_BUFFER, _SCALAR = 1, 3
_EXECUTE = 3

_P, _S, _I = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int


class _Version(ctypes.Structure):
    _fields_ = (("size", _S), ("extensions", _P), ("major", _I), ("minor", _I))


class _Buffer(ctypes.Structure):
    _fields_ = (("size", _S), ("extensions", _P), ("dtype", _I), ("data", _P), ("rank", ctypes.c_int64), ("shape", _P))


class _Buffers(ctypes.Structure):
    _fields_ = (("size", _S), ("extensions", _P), ("count", ctypes.c_int64), ("types", _P), ("buffers", _P))


class _Span(ctypes.Structure):
    _fields_ = (("data", ctypes.c_char_p), ("size", _S))


class _Scalar(ctypes.Structure):
    _fields_ = (("dtype", _I), ("value", _P))


class _Attributes(ctypes.Structure):
    _fields_ = (
        *(("size", _S), ("extensions", _P), ("count", ctypes.c_int64)),
        *(("types", _P), ("names", _P), ("values", _P)),
    )


class _ErrorArguments(ctypes.Structure):
    _fields_ = (("size", _S), ("extensions", _P), ("message", ctypes.c_char_p), ("code", _I))


class _StreamArguments(ctypes.Structure):
    _fields_ = (("size", _S), ("extensions", _P), ("context", _P), ("stream", _P))


_CreateError = ctypes.CFUNCTYPE(_P, ctypes.POINTER(_ErrorArguments))
_GetStream = ctypes.CFUNCTYPE(_P, ctypes.POINTER(_StreamArguments))


class _Api(ctypes.Structure):
    _fields_ = (
        *(("size", _S), ("extensions", _P), ("version", _Version), ("internal", _P), ("create_error", _CreateError)),
        *(("get_error_message", _P), ("destroy_error", _P), ("register_handler", _P), ("get_stream", _GetStream)),
    )


class _Frame(ctypes.Structure):
    _fields_ = (
        *(("size", _S), ("extensions", _P), ("api", ctypes.POINTER(_Api)), ("context", _P), ("stage", _I)),
        *(("arguments", _Buffers), ("results", _Buffers), ("attributes", _Attributes)),
    )


class Handler:
    """The handler of XLA's custom calls. It is called without Python's lock, as XLA calls it."""

    def __init__(self, *, on_gpu: bool) -> None:
        address = ctypes.pythonapi.PyCapsule_GetPointer
        address.restype, address.argtypes = _P, (ctypes.py_object, ctypes.c_char_p)
        self._handle = ctypes.CFUNCTYPE(_P, ctypes.POINTER(_Frame))(address(_native.xla_handler(on_gpu=on_gpu), None))
        self._text = ""

    def __call__(self, number: int, given: Sequence[Any], results: Sequence[Any], stream: int) -> str:
        """Make a call by its number; return the text of XLA's error."""

        def create_error(arguments: Any) -> int:
            self._text = arguments.contents.message.decode()
            return 1  # any address but null

        def get_stream(arguments: Any) -> None:
            arguments.contents.stream = stream

        api = _Api(
            size=ctypes.sizeof(_Api),
            version=_Version(ctypes.sizeof(_Version), None, 0, 3),
            create_error=_CreateError(create_error),
            get_stream=_GetStream(get_stream),
        )
        kept: list[Any] = []
        frame = _Frame(
            size=ctypes.sizeof(_Frame),
            api=ctypes.pointer(api),
            stage=_EXECUTE,
            arguments=_buffers_of(given, kept),
            results=_buffers_of(results, kept),
            attributes=_attributes_of(number, kept),
        )
        return self._text if self._handle(ctypes.byref(frame)) else ""


def _buffers_of(arrays: Sequence[Any], kept: list[Any]) -> _Buffers:
    """Return a token, and the buffers of these arrays; append what they point to."""
    buffers = [_Buffer(ctypes.sizeof(_Buffer), None, _TOKEN, None, 0, None)]
    for array in arrays:
        interface = array.__cuda_array_interface__
        shape = (ctypes.c_int64 * len(interface["shape"]))(*interface["shape"])
        kept.append(shape)
        data = interface["data"][0]
        dtype = _DTYPES[array.dtype.name]
        buffers.append(_Buffer(ctypes.sizeof(_Buffer), None, dtype, data, len(shape), ctypes.addressof(shape)))
    types = (_I * len(buffers))(*[_BUFFER] * len(buffers))
    pointers = (_P * len(buffers))(*map(ctypes.addressof, buffers))
    kept += [buffers, types, pointers]
    return _Buffers(ctypes.sizeof(_Buffers), None, len(buffers), ctypes.addressof(types), ctypes.addressof(pointers))


def _attributes_of(number: int, kept: list[Any]) -> _Attributes:
    """Return the number of the call as the attributes; append what they point to."""
    value = ctypes.c_uint64(number)
    scalar = _Scalar(_UINT64, ctypes.addressof(value))
    name = _Span(b"call", 4)
    types, names = (_I * 1)(_SCALAR), (_P * 1)(ctypes.addressof(name))
    values = (_P * 1)(ctypes.addressof(scalar))
    kept += [value, scalar, name, types, names, values]
    return _Attributes(ctypes.sizeof(_Attributes), None, 1, *(ctypes.addressof(one) for one in (types, names, values)))
