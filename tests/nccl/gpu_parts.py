"""One rank's part in a call on GPU arrays, and the cases of the contract that the backend nccl has to keep.

The values are such that a result is exact in every order of the ranks: what NCCL leaves open is not compared. So
floating-point numbers are small, a MIN or MAX has no NaN, and the sum of an average of integers does not overflow.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from typing import TYPE_CHECKING, Any

import numpy as np
from nccl.gpu_arrays import LEGACY, GpuArray
from operation_table import EVERY_RANK, OPERATIONS, Part
from seeded_cases import Case, CasePart

from layouts import SHAPES
from oracle import COMPLEX, DTYPES, FLOATS, OPS, Array

_PartBase = Part if TYPE_CHECKING else object

ON_GPU = [name for name in EVERY_RANK if name not in ("scan", "exscan", "barrier")]
"""The operations that NCCL has."""
REDUCED = ["int8", "uint8", "int32", "uint32", "int64", "uint64", *FLOATS]
"""The dtypes that NCCL reduces."""
COUNTS = (0, 1, 3, 4099, 70_001)


def is_reduced(op: str, dtype: str) -> bool:
    """Return whether the backend nccl makes this reduction."""
    if dtype in COMPLEX:
        return op in ("SUM", "AVG")
    if dtype == "bool":
        return op not in ("AVG", "BXOR", "LXOR")
    if op == "AVG":  # of integers NCCL's would wrap around
        return dtype in FLOATS
    return dtype in REDUCED and op in ("SUM", "PRODUCT", "MIN", "MAX")


class OnGpu(_PartBase):
    """Let a part pass GPU arrays to the call, each on the next one of ``streams``; inputs are read-only by turns."""

    streams: Sequence[int | None] = (LEGACY,)
    _is_written = True

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.pairs: list[tuple[Array, GpuArray]] = []
        """The arrays that are compared, and those on the GPU."""

    def laid_out(self, elements: Array, place: int, is_written: bool) -> Array:
        self._is_written = is_written
        return super().laid_out(elements, place, is_written)

    def wrap(self, array: Array) -> Any:
        number = len(self.pairs)
        gpu_array = GpuArray.of(array, stream=self.streams[(self.rank + number) % len(self.streams)])
        self.pairs.append((array, gpu_array))
        return gpu_array if self._is_written or number % 2 else gpu_array.readonly()

    def wait(self) -> None:
        super().wait()
        self.fetch()

    def fetch(self) -> None:
        """Copy the elements of the GPU arrays to where they are compared."""
        for array, gpu_array in self.pairs:
            array[...] = gpu_array.get()

    def changed(self) -> str:
        self.fetch()
        return super().changed()


class GpuPart(OnGpu, CasePart):
    """One rank's part in a case, on GPU arrays."""


def case_of(name: str, dtype: str, count: int, op: str = "SUM", root: int = 0, seed: int = 0, **how: Any) -> Case:
    """Return a case; what is only moved has any bits, and arrays have another shape on each rank."""
    values = "exact" if OPERATIONS[name].reduces else "accumulated"
    return Case(
        name,
        dtype,
        count,
        op,
        root,
        layouts=tuple(SHAPES),
        values=values,
        shares_own_block=seed % 2 == 1,
        seed=seed,
        **how,
    )


def every_case(size: int) -> Iterator[Case]:
    """The whole product of operations, dtypes, reduce ops, lengths and roots."""
    for name, dtype in product(ON_GPU, DTYPES):
        row = OPERATIONS[name]
        ops = [op for op in OPS if is_reduced(op, dtype)] if row.reduces else ["SUM"]
        for number, (op, count) in enumerate(product(ops, COUNTS)):
            for root in range(size) if row.root else (0,):
                yield case_of(name, dtype, count, op, root, seed=number)


def choose(size: int, sampled: bool, budget: int = 140) -> list[Case]:
    """The whole product, or a seeded sample with each operation, and each dtype with each reduce op of all_reduce."""
    whole = list(every_case(size))
    if not sampled:
        return whole
    random = np.random.default_rng([7, size])
    chosen: dict[Any, Case] = {}
    for index in random.permutation(len(whole)):
        case = whole[index]
        key: Any = (case.dtype, case.op) if case.operation == "all_reduce" else (case.operation, case.count)
        if key in chosen and len(chosen) < budget and (case.count < COUNTS[-1] or random.random() < 0.2):
            key = case
        chosen.setdefault(key, case)
    return list(chosen.values())


def unequal_blocks() -> Iterator[Case]:
    """Blocks whose sizes differ between the ranks, or between the pairs of ranks; some are empty."""
    uneven = [name for name in ON_GPU if OPERATIONS[name].is_uneven]
    for number, (name, dtype, count) in enumerate(product(uneven, ["int32", "bfloat16"], [0, 1, 5000])):
        yield case_of(name, dtype, count, seed=number, lengths=(0, 3, 1, 0, 17))
