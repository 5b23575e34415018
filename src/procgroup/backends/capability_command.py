"""``procgroup capabilities``: print which backend does what, on arrays of which device and dtype."""

from __future__ import annotations

import argparse
import json
from collections.abc import Collection, Iterator, Sequence
from itertools import groupby

from procgroup.arrays.array_view import DTYPES
from procgroup.backends import registry
from procgroup.backends.capability_table import BACKENDS, DEVICES, Capability, capabilities

_INTEGERS = tuple(f"{sign}int{bits}" for bits in (8, 16, 32, 64) for sign in ("", "u"))
_FLOATS = ("float16", "bfloat16", "float32", "float64", "complex64", "complex128")
_DTYPES = ("bool", *_INTEGERS, *_FLOATS, *sorted(name for name in DTYPES if name.startswith("float8")))
"""In the order in which they are printed."""


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
    if len(dtypes) == len(_DTYPES):
        return "all dtypes"
    listed = [name for name in _DTYPES if name in dtypes]
    if set(_INTEGERS) <= set(listed):
        place = listed.index(_INTEGERS[0])
        listed[place : place + len(_INTEGERS)] = ["all integers"]
    return ", ".join(listed)
