"""PREMUL_SUM with a factor, and complex numbers: every reduction, every dtype that they are for, every transport.

The values are small and dyadic, so that every sum, product and quotient is exact and equals NumPy's to the bit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any

import numpy as np
import pytest
from operation_table import REDUCING, Part

import procgroup as dist
from oracle import INTEGERS, Array, numpy_dtype
from procgroup.testing import run_ranks
from procgroup.types import AnyReduceOp, ReduceOp
from world import placed

SIZE = 4
"""A power of two: an average is exact."""
COUNTS = [0, 1, 5, 9000, 70_000]
"""Counts of small calls, of calls in several chunks, and of single copy."""
FACTORS = [0.5, 2, -1.0, np.float32(0.25)]
"""One per rank."""

transports = pytest.mark.parametrize("transport", ["shm", "tcp", "spanning"])


def values(name: str, count: int, rank: int) -> Array:
    real = (np.arange(count) + 3 * rank) % 5 - 2.0
    if name.startswith("complex"):
        return (real + 1j * ((np.arange(count) + rank) % 3 - 1.0)).astype(name)
    return real.astype(numpy_dtype(name))


class Reduction(Part):
    """A part whose blocks are what ``values`` gives, for every target, and whose result ``reduced`` computes."""

    to_the_bit = True
    reduced: Callable[[Sequence[Array]], Array]

    def block(self, source: int, target: int = 0) -> Array:
        return values(self.dtype.name, self.count, source)

    def combined(self, blocks: Sequence[Array]) -> Array:
        return self.reduced(blocks)


def expect_reductions(
    name: str, count: int, op_of: Callable[[int], AnyReduceOp], reduced: Callable[[Sequence[Array]], Array]
) -> None:
    """Make every reduction of arrays of ``count`` elements, and compare it with the combined inputs of all ranks."""
    rank = dist.get_rank()
    for operation in REDUCING:
        for root in (0, SIZE - 1):
            part = Reduction(operation, rank, SIZE, root=root, op=op_of(rank), count=count, dtype=name)
            part.reduced = reduced
            part.start(dist, async_op=root == 0)
            part.wait()
            assert not part.wrong(), f"{operation} of {count} {name}: {part.wrong()}"


def scale_and_add(name: str) -> None:
    wide = np.float32 if numpy_dtype(name).itemsize == 2 else numpy_dtype(name)

    def combined(inputs: Sequence[Array]) -> Array:
        scaled = [array.astype(wide) * np.asarray(factor, wide) for array, factor in zip(inputs, FACTORS, strict=False)]
        return np.asarray(reduce(np.add, scaled)).astype(inputs[0].dtype)

    for count in COUNTS:
        expect_reductions(name, count, lambda rank: ReduceOp.PREMUL_SUM(float(FACTORS[rank])), combined)


@transports
@pytest.mark.parametrize("name", ["float16", "bfloat16", "float32", "float64", "complex64", "complex128"])
def test_each_rank_has_a_factor_of_its_own(transport: str, name: str) -> None:
    run_ranks(scale_and_add, SIZE, name, **placed(transport, SIZE))


def refuse_factors() -> None:
    for name in ("bool", *INTEGERS):
        array = np.ones(3, name)
        for call in (dist.all_reduce, lambda array, op: dist.reduce(array, 0, op)):
            with pytest.raises(dist.ArgumentError, match=f"PREMUL_SUM is not defined for {name} arrays"):
                call(array, ReduceOp.PREMUL_SUM(2.0))
        assert (array == 1).all()
    with pytest.raises(TypeError, match=r"needs a factor; pass ReduceOp\.PREMUL_SUM\(factor\)"):
        dist.all_reduce(np.ones(3), ReduceOp.PREMUL_SUM)
    dist.barrier()


@pytest.mark.parametrize("size", [1, 2])
def test_a_factor_is_refused_where_it_would_have_to_be_rounded(size: int) -> None:
    run_ranks(refuse_factors, size)


@pytest.mark.parametrize("factor", [1j, np.complex64(2), "2", None, [2.0], b"2"])
def test_a_factor_is_a_real_number(factor: Any) -> None:
    with pytest.raises(TypeError, match="Expected the factor of ReduceOp.PREMUL_SUM to be a real number, got "):
        ReduceOp.PREMUL_SUM(factor)


@pytest.mark.parametrize("factor", [2, True, 0.5, np.float16(0.5), np.int64(3), np.array(0.25)])
def test_a_factor_of_any_real_type_is_taken(factor: Any) -> None:
    def add() -> float:
        array = np.ones(1)
        dist.all_reduce(array, ReduceOp.PREMUL_SUM(factor))
        return float(array[0])

    assert run_ranks(add, 2) == [2 * float(factor)] * 2


def scale_beside_zeros(name: str) -> bytes:
    """Multiply by a factor that has to be rounded; all ranks but the first add nothing."""
    array = np.arange(1, 500).astype(numpy_dtype(name)) * (1 if dist.get_rank() == 0 else 0)
    if name.startswith("complex") and dist.get_rank() == 0:
        array[:2] = complex(np.inf, 1.5), complex(3.0, -np.inf)
    dist.all_reduce(array, ReduceOp.PREMUL_SUM(0.1))
    return array.tobytes()


@pytest.mark.parametrize("name", ["float16", "bfloat16", "float32", "float64", "complex64", "complex128"])
def test_a_world_of_one_multiplies_as_a_world_of_two(name: str) -> None:
    (alone,) = run_ranks(scale_beside_zeros, 1, name)
    assert run_ranks(scale_beside_zeros, 2, name) == [alone] * 2


def multiply(inputs: Sequence[Array]) -> Array:
    """The product part by part, which NumPy leaves open: so a zero has the sign that the formula gives it."""
    left = inputs[0].copy()
    for right in inputs[1:]:
        real = left.real * right.real - left.imag * right.imag
        left.imag = left.real * right.imag + left.imag * right.real
        left.real = real
    return left


def average(inputs: Sequence[Array]) -> Array:
    parts = sum(array.view(array.real.dtype) for array in inputs) / inputs[0].real.dtype.type(len(inputs))
    return parts.view(inputs[0].dtype)


def combine_complex_numbers(name: str) -> None:
    ways: dict[ReduceOp, Callable[[Sequence[Array]], Array]] = {
        ReduceOp.SUM: lambda inputs: np.asarray(sum(inputs[1:], inputs[0])),
        ReduceOp.AVG: average,
        ReduceOp.PRODUCT: multiply,
    }
    for op, combined in ways.items():
        for count in COUNTS:
            expect_reductions(name, count, lambda rank, op=op: op, combined)  # type: ignore[misc]
    for op in ReduceOp:
        if op not in ways and op is not ReduceOp.PREMUL_SUM:
            with pytest.raises(ValueError, match=f"does not support ReduceOp.{op.name} on complex tensors"):
                dist.all_reduce(np.ones(2, name), op)
    dist.barrier()


@pytest.mark.parametrize("transport", ["shm", "tcp"])  # where reductions are in rank order
@pytest.mark.parametrize("name", ["complex64", "complex128"])
def test_complex_numbers_are_added_averaged_and_multiplied(transport: str, name: str) -> None:
    run_ranks(combine_complex_numbers, SIZE, name, **placed(transport, SIZE))
