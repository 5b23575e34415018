"""Objects to bytes and back: pickle 5, with the memory of arrays beside the stream instead of in it.

Arrays, their scalars and dtypes, and CPU tensors of PyTorch are reduced by the functions here instead of those of
their libraries. So strided arrays and arrays of foreign dtypes are sent as raw memory, too, and an unpickler that does
not trust the sender (``safe``) permits four names only, none of which runs code. An array is pickled as a call of
numpy.ndarray, which costs the unpickler no Python frame; the safe unpickler calls a checking function in its place.
"""

from __future__ import annotations

import copyreg
import importlib
import io
import pickle
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import numpy as np

_NAME_LENGTH = 200
_FOREIGN_DTYPES = ("bfloat16", "float", "int", "uint")

_PLAIN = {
    "builtins": ("complex", "range", "slice"),
    "collections": ("OrderedDict", "deque"),
    "datetime": ("date", "datetime", "time", "timedelta", "timezone"),
}


class Pickled(NamedTuple):
    """An object as bytes: the name of its type, the pickle stream and the memory of its arrays."""

    type_name: bytes
    stream: bytes
    buffers: list[memoryview]


class _Pickler:
    """A pickler with its stream and its buffers. It is used again: to make one takes more time than a small object."""

    __slots__ = ("buffers", "file", "pickler")

    def __init__(self) -> None:
        self.file = io.BytesIO()
        self.buffers: list[pickle.PickleBuffer] = []
        self.pickler = pickle.Pickler(self.file, 5, buffer_callback=self.buffers.append)


_idle: list[_Pickler] = []
# A pickler that has made a longer stream is not kept: it holds memory for as many objects.
_KEPT_BYTES = 64 << 10


def pickle_object(value: Any) -> Pickled:
    """Pickle an object. The buffers are the object's own memory, not copies."""
    try:
        chosen = _idle.pop()
    except IndexError:  # none, or others have them: threads, and objects that send objects while they are pickled
        chosen = _Pickler()
    file, pickler = chosen.file, chosen.pickler
    pickler.dispatch_table = _reducers()
    pickler.dump(value)
    stream = file.getvalue()
    buffers = [buffer.raw() for buffer in chosen.buffers]
    if len(stream) <= _KEPT_BYTES:
        file.seek(0)
        file.truncate()
        pickler.clear_memo()
        chosen.buffers.clear()
        _idle.append(chosen)
    kind: Any = type(value)
    return Pickled(name_of_type(kind), stream, buffers)


def unpickle_object(stream: bytes | memoryview, buffers: Sequence[Any], safe: bool) -> Any:
    """Unpickle an object; its arrays are views of ``buffers``.

    With ``safe``, raises UnpicklingError for anything but plain data and arrays: no code of the object runs.
    """
    if safe:
        return _SafeUnpickler(io.BytesIO(stream), buffers=buffers).load()
    return pickle.loads(stream, buffers=buffers)


def loader(safe: bool) -> Callable[[bytes], Any]:
    """Return what unpickles an object without buffers, as ``unpickle_object`` does."""
    return _load_safely if safe else pickle.loads


def _load_safely(stream: bytes) -> Any:
    return unpickle_object(stream, (), True)


def name_of_type(kind: type) -> bytes:
    """Return the name of a type, with its module unless that is builtins."""
    name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    return name[:_NAME_LENGTH].encode()


def _refuse_step(unpickler: Any) -> None:
    raise pickle.UnpicklingError("the stream has a step that no plain data needs, and safe=True refuses it")


# What plain data and arrays are made of, in protocol 5. Not BUILD: it sets the state of what is made already, and
# would give a dtype or a tensor another size than its memory has. Nor NEWOBJ: no plain type needs it.
_SAFE_STEPS = (
    "PROTO FRAME STOP MARK POP POP_MARK MEMOIZE BINGET LONG_BINGET NONE NEWTRUE NEWFALSE BININT BININT1 BININT2 LONG1 "
    "LONG4 BINFLOAT SHORT_BINUNICODE BINUNICODE BINUNICODE8 SHORT_BINBYTES BINBYTES BINBYTES8 BYTEARRAY8 NEXT_BUFFER "
    "READONLY_BUFFER EMPTY_TUPLE TUPLE TUPLE1 TUPLE2 TUPLE3 EMPTY_LIST APPEND APPENDS EMPTY_DICT SETITEM SETITEMS "
    "EMPTY_SET ADDITEMS FROZENSET STACK_GLOBAL REDUCE"
)


class _SafeUnpickler(pickle._Unpickler):
    """pickle's Python implementation: slower, but its opcodes can be restricted."""

    dispatch: ClassVar[dict[int, Callable[[Any], None]]] = {
        **dict.fromkeys(range(256), _refuse_step),
        **{
            code: pickle._Unpickler.dispatch[code]
            for code in (getattr(pickle, name)[0] for name in _SAFE_STEPS.split())
        },
    }

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("numpy", "ndarray"):
            return _check_and_rebuild_array
        if module == __name__ and name in _REBUILDERS:
            return _REBUILDERS[name]
        if name in _PLAIN.get(module, ()):
            return getattr(importlib.import_module(module), name)
        raise pickle.UnpicklingError(f"{module}.{name} is neither plain data nor an array, and safe=True refuses it")


class _Rebuilder:
    """A function that pickle streams call by name. It has no state, so a hostile stream cannot change it."""

    __slots__ = ()
    name = ""

    def __reduce__(self) -> str:
        return self.name


class _RebuildScalar(_Rebuilder):
    __slots__ = ()
    name = "rebuild_scalar"

    def __call__(self, dtype: str, value: bytes) -> Any:
        return np.frombuffer(value, rebuild_dtype(dtype))[0]


class _RebuildDtype(_Rebuilder):
    __slots__ = ()
    name = "rebuild_dtype"

    def __call__(self, name: str) -> np.dtype[Any]:
        if not isinstance(name, str):
            raise pickle.UnpicklingError(f"a dtype is named by a string, not by {type(name).__name__}")
        if name.startswith(_FOREIGN_DTYPES):
            foreign: np.dtype[Any] = np.dtype(getattr(importlib.import_module("ml_dtypes"), name))
            return foreign
        dtype = np.dtype(name)
        if dtype.hasobject or dtype.itemsize == 0:
            raise pickle.UnpicklingError(f"arrays of {dtype} do not travel as memory")
        return dtype


class _RebuildTensor(_Rebuilder):
    __slots__ = ()
    name = "rebuild_tensor"

    def __call__(self, buffer: Any, dtype: str, shape: tuple[int, ...], requires_grad: bool) -> Any:
        torch = importlib.import_module("torch")
        # Not getattr: torch's own runs code for some names.
        kind = vars(torch).get(dtype) if isinstance(dtype, str) else None
        if not isinstance(kind, torch.dtype):
            raise pickle.UnpicklingError(f"expected the name of a dtype of torch, got {dtype!r:.80}")
        if 0 in shape:
            return torch.empty(shape, dtype=kind, requires_grad=bool(requires_grad))
        memory = np.frombuffer(buffer, np.uint8)
        # PyTorch has no read-only memory, and would print a warning.
        memory = memory if memory.flags.writeable else memory.copy()
        return torch.from_numpy(memory).view(kind).reshape(shape).requires_grad_(bool(requires_grad))


rebuild_scalar: _RebuildScalar = _RebuildScalar()
rebuild_dtype: _RebuildDtype = _RebuildDtype()
rebuild_tensor: _RebuildTensor = _RebuildTensor()
_REBUILDERS: Mapping[str, _Rebuilder] = {
    rebuilder.name: rebuilder for rebuilder in (rebuild_scalar, rebuild_dtype, rebuild_tensor)
}


def _check_and_rebuild_array(
    shape: tuple[int, ...], dtype: Any, buffer: Any, offset: int = 0, strides: None = None, order: str = "C"
) -> Any:
    # Only rebuild_dtype makes dtypes there, and none of objects: NumPy would take any bytes for their addresses.
    if not isinstance(dtype, np.dtype) or buffer is None or offset != 0 or strides is not None or order not in "CF":
        raise pickle.UnpicklingError("an array is made of a shape, a dtype and a buffer, and safe=True refuses more")
    return np.ndarray(shape, dtype, buffer, order="F" if order == "F" else "C")


class _NamedDtype:
    """Pickled as the dtype of this name: the pickler knows the types of NumPy's own dtypes only."""

    __slots__ = ("_name",)

    def __init__(self, name: str) -> None:
        self._name = name

    def __reduce__(self) -> Any:
        return rebuild_dtype, (self._name,)


def _reduce_array(array: Any) -> Any:
    dtype = array.dtype
    if dtype in _NATIVE_NUMBERS and array.flags.c_contiguous:  # most arrays, in few steps
        return np.ndarray, (array.shape, dtype, pickle.PickleBuffer(array))
    name = _name_of_dtype(dtype)
    if name is None:
        return array.__reduce_ex__(4)
    if not array.flags.forc:
        array = np.ascontiguousarray(array)
    order = "C" if array.flags.c_contiguous else "F"
    # As bytes: the buffer protocol does not know every dtype.
    memory = (array if order == "C" else array.T).reshape(-1).view(np.uint8)
    return np.ndarray, (array.shape, _NamedDtype(name), pickle.PickleBuffer(memory), 0, None, order)


def _reduce_scalar(scalar: np.generic[Any]) -> Any:
    name = _name_of_dtype(scalar.dtype)
    return scalar.__reduce__() if name is None else (rebuild_scalar, (name, scalar.tobytes()))


def _reduce_dtype(dtype: np.dtype[Any]) -> Any:
    name = _name_of_dtype(dtype)
    return dtype.__reduce__() if name is None else (rebuild_dtype, (name,))


def _name_of_dtype(dtype: np.dtype[Any]) -> str | None:
    """Return the name under which a dtype is pickled; None for those that NumPy pickles, as records and objects."""
    if dtype.isbuiltin == 2:
        return dtype.name if dtype.name.startswith(_FOREIGN_DTYPES) else None
    if dtype.hasobject or dtype.kind == "V" or dtype.itemsize == 0 or dtype.metadata:
        return None
    return dtype.str


def _reduce_tensor(tensor: Any) -> Any:
    torch = sys.modules["torch"]
    is_plain = (
        tensor.device.type == "cpu"
        and tensor.layout is torch.strided
        and tensor.is_leaf
        and not (tensor.is_quantized or tensor.is_conj() or tensor.is_neg() or tensor.__dict__)
    )
    if not is_plain:
        return tensor.__reduce_ex__(5)
    memory = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
    dtype = str(tensor.dtype).removeprefix("torch.")
    return rebuild_tensor, (pickle.PickleBuffer(memory), dtype, tuple(tensor.shape), tensor.requires_grad)


_NATIVE_NUMBERS = frozenset(map(np.dtype, "?" + np.typecodes["AllInteger"] + "efdFD"))
_BUILTIN_DTYPES = [np.dtype(code) for code in np.typecodes["All"] if code not in "OV"]
_ARRAYS: dict[type, Callable[[Any], Any]] = {
    np.ndarray: _reduce_array,
    **{dtype.type: _reduce_scalar for dtype in _BUILTIN_DTYPES},
    **{type(dtype): _reduce_dtype for dtype in _BUILTIN_DTYPES},
}


class _Reducers(NamedTuple):
    """How objects are reduced: ``everything`` was made when ``registered`` and torch's ``tensor`` were known."""

    registered: dict[type, Callable[[Any], Any]]
    tensor: type | None
    everything: dict[type, Callable[[Any], Any]]


_made = _Reducers({}, None, _ARRAYS)


def _reducers() -> dict[type, Callable[[Any], Any]]:
    """Return the functions that reduce objects: those which are registered in this process, and those for arrays."""
    global _made
    tensor = getattr(sys.modules.get("torch"), "Tensor", None)
    if tensor is not _made.tensor or copyreg.dispatch_table != _made.registered:
        own = _ARRAYS if tensor is None else {**_ARRAYS, tensor: _reduce_tensor}
        registered = dict(copyreg.dispatch_table)
        _made = _Reducers(registered, tensor, {**registered, **own})
    return _made.everything
