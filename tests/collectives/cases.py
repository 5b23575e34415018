"""What a rank can be asked to do, what goes into it, and what NumPy says must come out.

A *case* is one call on every rank: a verb, an element type, a count, a reduce op, a root. Its inputs follow from
its seed and the rank, so that each rank can compute what all the others put in, and so what it must get. The
values are chosen so that sums and products are exact in the accumulator (float32 for the 16-bit floats): then
only the one rounding at the end is left, and the result is known to the bit, whatever the order.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import product
from typing import Any

import ml_dtypes
import numpy as np

from procgroup.types import ReduceOp

Array = np.ndarray[Any, np.dtype[Any]]

INTEGERS = ["int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64"]
HALVES = ["float16", "bfloat16"]
FLOATS = [*HALVES, "float32", "float64"]
DTYPES = ["bool", *INTEGERS, *FLOATS]
OPS = [op for op in ReduceOp if op != ReduceOp.PREMUL_SUM]  # which takes a factor: a case of its own
BITWISE = [ReduceOp.BAND, ReduceOp.BOR, ReduceOp.BXOR]
REDUCING = ["all_reduce", "reduce", "scan", "exscan"]
ROOTED = ["reduce", "broadcast"]
VERBS = [*REDUCING, "broadcast", "all_gather", "ring", "barrier"]
"""Each is a function of the library, but for "ring": every rank sends to the next one and receives from the former."""

TRANSPORTS = ["shm", "tcp", "spanning"]
SIZES = [1, 2, 3, 4, 7]

EDGES = [48, 16 << 10, 512 << 10]
"""Lengths in bytes around which an implementation may change its way of doing it."""


@dataclass(frozen=True)
class Case:
    """One call on every rank."""

    verb: str
    dtype: str
    count: int
    op: ReduceOp = ReduceOp.SUM
    root: int = 0
    seed: int = 0

    def __str__(self) -> str:
        op = f" {self.op.name}" if self.verb in REDUCING else ""
        root = f" root {self.root}" if self.verb in ROOTED else ""
        return f"{self.verb}{op}{root} of {self.count} {self.dtype} (seed {self.seed})"


def numpy_dtype(name: str) -> np.dtype[Any]:
    return np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else name)


def is_supported(op: ReduceOp, dtype: str) -> bool:
    """AVG is for all but bool, the bitwise ops for all but floats; PREMUL_SUM needs a factor."""
    if op == ReduceOp.PREMUL_SUM:
        return False
    return dtype != "bool" if op == ReduceOp.AVG else op not in BITWISE or dtype not in FLOATS


SUPPORTED = [(dtype, op) for dtype in DTYPES for op in OPS if is_supported(op, dtype)]
UNSUPPORTED = [(dtype, op) for dtype in DTYPES for op in OPS if not is_supported(op, dtype)]


def counts(dtype: str, size: int) -> list[int]:
    """Numbers of elements at which mistakes show: none, one, fewer than ranks, a prime, each side of every edge."""
    itemsize = numpy_dtype(dtype).itemsize
    edges = [*EDGES, 3 * EDGES[-1]]
    around = [edge // itemsize + offset for edge in edges for offset in (-1, 0, 1)]
    return sorted({0, 1, size - 1, size, 4099, *around})


def every_case(verbs: Sequence[str], size: int) -> Iterator[Case]:
    """The whole product."""
    for verb, dtype in product(verbs, DTYPES):
        ops = [op for op in OPS if is_supported(op, dtype)] if verb in REDUCING else [ReduceOp.SUM]
        for number, (op, count) in enumerate(product(ops, counts(dtype, size))):
            large = count * numpy_dtype(dtype).itemsize > EDGES[1] + 8
            roots: Sequence[int] = range(size) if verb in ROOTED and not large else [count % size]
            for root in roots:
                yield Case(verb, dtype, count, op, root, seed=number)


def choose(verbs: Sequence[str], size: int, sampled: bool, budget: int = 150, seed: int = 0) -> list[Case]:
    """The whole product, or a seeded sample of it: each dtype and op once, few large arrays."""
    if not sampled:
        return list(every_case(verbs, size))
    random = np.random.default_rng([seed, size, len(verbs)])
    chosen = list(_one_of_each(verbs, size, random))
    whole = list(every_case(verbs, size))
    for index in random.permutation(len(whole))[: max(0, budget - len(chosen))]:
        case = whole[index]
        if case.count * numpy_dtype(case.dtype).itemsize < EDGES[-1] - 8 or random.random() < 0.3:
            chosen.append(case)
    return chosen


def _one_of_each(verbs: Sequence[str], size: int, random: np.random.Generator) -> Iterator[Case]:
    for verb, (dtype, op) in product(verbs, SUPPORTED):
        if verb in REDUCING or op == ReduceOp.SUM:
            count = int(random.integers(0, 3000))
            yield Case(verb, dtype, count, op, int(random.integers(size)), int(random.integers(1 << 30)))


def values(case: Case, rank: int) -> Array:
    """What ``rank`` puts in."""
    random = np.random.default_rng([case.seed, case.count, rank])
    dtype = numpy_dtype(case.dtype)
    if case.dtype == "bool":
        return random.integers(0, 2, case.count).astype(bool)
    if case.dtype in INTEGERS or case.verb not in REDUCING:  # any bits: integers wrap, and what is moved is only moved
        bits = random.integers(0, 256, case.count * dtype.itemsize, dtype=np.uint8)
        return bits.view(dtype)
    return _floats(case, random).astype(dtype)


def _floats(case: Case, random: np.random.Generator) -> Array:
    if case.op == ReduceOp.PRODUCT:
        return random.choice([1.0, -1.0, 2.0, 0.5, -0.5], case.count)
    if case.op in (ReduceOp.MIN, ReduceOp.MAX):
        return random.choice([0.0, -0.0, 1.0, -1.5, np.inf, -np.inf, np.nan], case.count)
    # Next to these, one is lost when a 16-bit float is rounded after each addition.
    large = {"float16": 2048.0, "bfloat16": 256.0}.get(case.dtype, 4096.0)
    return random.choice([large, 1.0, 1.0, 1.0, 3.0, 0.0, -1.0], case.count)


def combined(case: Case, inputs: Sequence[Array]) -> Array:
    """What NumPy says that the reduction gives."""
    if case.dtype not in HALVES:
        return _combined_exactly(case.op, inputs)
    wide = _combined_exactly(case.op, [array.astype(np.float32) for array in inputs])
    return wide.astype(inputs[0].dtype)


def _combined_exactly(op: ReduceOp, inputs: Sequence[Array]) -> Array:
    with np.errstate(all="ignore"):
        if op == ReduceOp.AVG and inputs[0].dtype.kind in "iu":
            return _truncated_mean(inputs)
        if op == ReduceOp.AVG:
            total = reduce(np.add, inputs)
            return np.asarray(total / total.dtype.type(len(inputs)))
        return np.asarray(reduce(_FUNCTIONS[op], inputs))


def _truncated_mean(inputs: Sequence[Array]) -> Array:
    """Return the mean of integers whose sum does not overflow, truncated toward zero."""
    wide = object if inputs[0].dtype.itemsize == 8 else np.int64
    total = reduce(np.add, [array.astype(wide) for array in inputs])
    return np.asarray(np.sign(total) * (abs(total) // len(inputs))).astype(inputs[0].dtype)


def _minimum(left: Array, right: Array) -> Array:
    """NumPy leaves open which zero it picks; here the negative one is the smaller."""
    picked = np.minimum(left, right)
    return np.where((left == right) & np.signbit(left), left, picked) if left.dtype.kind == "f" else picked


def _maximum(left: Array, right: Array) -> Array:
    picked = np.maximum(left, right)
    return np.where((left == right) & ~np.signbit(left), left, picked) if left.dtype.kind == "f" else picked


_FUNCTIONS: dict[ReduceOp, Callable[[Array, Array], Array]] = {
    ReduceOp.SUM: np.add,
    ReduceOp.PRODUCT: np.multiply,
    ReduceOp.MIN: _minimum,
    ReduceOp.MAX: _maximum,
    ReduceOp.BAND: np.bitwise_and,
    ReduceOp.BOR: np.bitwise_or,
    ReduceOp.BXOR: np.bitwise_xor,
}


def same_bits(left: Array, right: Array) -> bool:
    """Tell whether two arrays are equal to the bit; a NaN equals every NaN."""
    if left.dtype.kind in "biu":
        return left.tobytes() == right.tobytes()
    unsigned = np.dtype(f"u{left.dtype.itemsize}")
    equal = left.reshape(-1).view(unsigned) == right.reshape(-1).view(unsigned)
    return bool((equal | (np.isnan(left.reshape(-1)) & np.isnan(right.reshape(-1)))).all())


def difference(got: Array, want: Array) -> str:
    """Describe the first elements in which two arrays differ."""
    flat, wanted = got.reshape(-1), want.reshape(-1)
    where = [index for index in range(flat.size) if not same_bits(flat[index : index + 1], wanted[index : index + 1])]
    shown = ", ".join(f"[{index}] = {flat[index]} instead of {wanted[index]}" for index in where[:3])
    return f"{len(where)} of {flat.size} elements are wrong: {shown}"


def digest(*arrays: Array) -> str:
    """A hash over the bits of arrays."""
    return hashlib.sha256(b"".join(array.tobytes() for array in arrays)).hexdigest()[:16]
