"""What each backend does: one row for each backend, kind of device, operation, reduce op and dtype.

The rows follow from what the calls themselves use: the native table of operations, the reduce ops that are defined on a
dtype, and the kinds of devices of a backend. The tests make the call of every row.
``procgroup capabilities`` prints them.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Collection, Iterator, Sequence
from functools import cache
from itertools import groupby
from typing import NamedTuple

from procgroup import _native
from procgroup.arrays.array_view import DTYPES, INTEGERS
from procgroup.backends import registry
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


def main(arguments: Sequence[str]) -> int:
    """Print the table; return the exit status."""
    parser = argparse.ArgumentParser(
        prog="procgroup capabilities",
        description="Print which backend does what. Any other call is refused before anything is sent.",
    )
    parser.add_argument("--backend", choices=BACKENDS, help="only this backend")
    parser.add_argument("--device", choices=DEVICES, help="only arrays on this kind of device")
    parser.add_argument("--json", action="store_true", help="print a row for each call, and why it is refused")
    chosen = parser.parse_args(arguments)
    rows = capabilities(chosen.backend, chosen.device)
    if chosen.json:
        print(json.dumps([row._asdict() for row in rows], indent=1))
    else:
        print("\n".join(_lines(rows)))
    return 0


def _lines(rows: Sequence[Capability]) -> Iterator[str]:
    for (backend, device), part in groupby(rows, lambda row: (row.backend, row.device)):
        calls = list(part)
        is_missing = backend in ("mpi", "nccl") and not registry.is_backend_available(backend)
        there = ", not installed here" if is_missing else ""
        for is_staged in (False, True):
            supported = [row for row in calls if row.is_supported and row.is_staged is is_staged]
            if any(row.dtype for row in supported):
                how = ", through host memory" if is_staged else ""
                yield f"{backend}, arrays on {device}{how}{there}"
                yield from _by_operation(supported)


def _by_operation(rows: Sequence[Capability]) -> Iterator[str]:
    """Yield a line for all operations that have the same dtypes, and one for each reduce op of the others."""
    by_operation: dict[str, dict[str, frozenset[str]]] = {}
    for row in rows:
        ops = by_operation.setdefault(row.operation, {})
        ops[row.reduce_op] = ops.get(row.reduce_op, frozenset()) | {row.dtype}
    alike: dict[tuple[tuple[str, frozenset[str]], ...], list[str]] = {}
    for operation, ops in by_operation.items():
        alike.setdefault(tuple(ops.items()), []).append(operation)
    for ops_and_dtypes, operations in alike.items():
        names = ", ".join(operations)
        if ops_and_dtypes[0][0] == "":
            dtypes = _names(ops_and_dtypes[0][1])
            yield f"  {names}{': ' if dtypes else ''}{dtypes}"
            continue
        yield f"  {names}:"
        for dtypes, same in groupby(sorted(ops_and_dtypes, key=_order), key=lambda item: item[1]):
            yield f"    {', '.join(op for op, _ in same)}: {_names(dtypes)}"


def _order(item: tuple[str, frozenset[str]]) -> tuple[int, list[str]]:
    return -len(item[1]), sorted(item[1])


def _names(dtypes: Collection[str]) -> str:
    """Return the dtypes as text; "" for an operation without arrays."""
    if not any(dtypes):
        return ""
    if len(dtypes) == len(DTYPES):
        return "all dtypes"
    listed = [name for name in DTYPES if name in dtypes]
    if set(INTEGERS) <= set(listed):
        place = listed.index(INTEGERS[0])
        listed[place : place + len(INTEGERS)] = ["all integers"]
    return ", ".join(listed)
