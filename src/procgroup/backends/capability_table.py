"""What each backend does: one row for each backend, kind of device, operation, reduce op and dtype.

The rows follow from what the calls themselves use: the native table of operations, the reduce ops that are defined on a
dtype, and the kinds of devices of a backend. The tests make the call of every row.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import NamedTuple

from procgroup import _native
from procgroup.arrays.array_view import DTYPES
from procgroup.types import ReduceOp

BACKENDS = ("gloo", "mpi", "nccl")
"""Those of torch.distributed's tutorials. "procgroup" is another name for "gloo"."""
DEVICES = ("cpu", "cuda")


class Capability(NamedTuple):
    """Whether a backend makes one call on arrays of one kind of device."""

    backend: str
    device: str
    operation: str
    """A name of ``_native.operations()``: the single and the list form of an operation share one."""
    reduce_op: str
    """"SUM", "MAX", ...; "" where nothing is reduced."""
    dtype: str
    """NumPy's name: "float32", "bfloat16"; "" for the operations without arrays."""
    reason: str
    """Why it does not make the call; "" where it does."""
    is_staged: bool
    """Whether the arrays, which are on a device, are copied to host memory before the call and back after it."""

    @property
    def is_supported(self) -> bool:
        return not self.reason


def capabilities(backend: str | None = None, device: str | None = None) -> list[Capability]:
    """Return the rows of all backends and kinds of devices, or of one of them.

    They say what the backends can do, not what is installed: see is_backend_available. Raises ValueError for a name
    that is not in the table.
    """
    for name, value, known in (("backend", backend, BACKENDS), ("device", device, DEVICES)):
        if value is not None and value not in known:
            raise ValueError(f"expected `{name}` to be one of {', '.join(known)}, got {value!r}")
    return [row for row in _table() if backend in (None, row.backend) and device in (None, row.device)]


@cache
def _table() -> tuple[Capability, ...]:
    return tuple(
        Capability(backend, device, *call, _reason(*call), _is_staged(backend, device, *call))
        for backend in BACKENDS
        for device in DEVICES
        for call in _calls()
    )


def _calls() -> Iterator[tuple[str, str, str]]:
    """Yield (operation, reduce op, dtype) of every call."""
    for row in _native.operations():
        has_arrays = "none" not in (row["input"], row["output"]) or row["is_message"]
        for dtype in sorted(DTYPES) if has_arrays else [""]:
            for op in ReduceOp if row["reduces"] else [""]:
                yield row["name"], op if isinstance(op, str) else op.name, dtype


def _reason(operation: str, reduce_op: str, dtype: str) -> str:
    is_defined = not reduce_op or _native.supports(ReduceOp[reduce_op].value, dtype)
    return "" if is_defined else f"{reduce_op} is not defined on {dtype}"


def _is_staged(backend: str, device: str, operation: str, reduce_op: str, dtype: str) -> bool:
    """Groups with the backend "nccl" move arrays in CPU memory, too, by procgroup's own transport."""
    if device == "cpu" or not dtype or _reason(operation, reduce_op, dtype):
        return False
    return backend != "nccl" or not _native.nccl_supports(operation, dtype, reduce_op)
