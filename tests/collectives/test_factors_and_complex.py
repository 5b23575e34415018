"""PREMUL_SUM with a factor, and complex numbers: every reduction, every dtype that they are for, every transport.

The values are small and dyadic, so that every sum, product and quotient is exact and equals NumPy's to the bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import reduce
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import procgroup as dist
from procgroup.testing import run_ranks
from procgroup.types import AnyReduceOp, ReduceOp
from world import placed

Array = np.ndarray[Any, np.dtype[Any]]

SIZE = 4
"""A power of two: an average is exact."""
COUNTS = [0, 1, 5, 9000, 70_000]
"""What is small, what is cut into pieces, and what is read in place."""
FACTORS = [0.5, 2, -1.0, np.float32(0.25)]
"""One per rank."""
OTHERS = ["bool", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64"]

transports = pytest.mark.parametrize("transport", ["shm", "tcp", "spanning"])


def dtype_of(name: str) -> Any:
    return np.dtype(getattr(ml_dtypes, name, name))


def values(name: str, count: int, rank: int) -> Array:
    real = (np.arange(count) + 3 * rank) % 5 - 2.0
    if name.startswith("complex"):
        return (real + 1j * ((np.arange(count) + rank) % 3 - 1.0)).astype(name)
    return real.astype(dtype_of(name))


def expect_reductions(
    name: str, count: int, op_of: Callable[[int], AnyReduceOp], combined: Callable[[list[Array]], Array]
) -> None:
    """Make every reduction of arrays of ``count`` elements, and compare it with the combined inputs of all ranks."""
    rank = dist.get_rank()
    op, total = op_of(rank), combined([values(name, count, other) for other in range(SIZE)])
    array = values(name, count, rank)
    dist.all_reduce(array, op)
    same(array, total, f"all_reduce of {count} {name}")
    for root in (0, SIZE - 1):
        array = values(name, count, rank)
        work = dist.reduce(array, root, op, async_op=root == 0)
        if work is not None:
            work.wait()
        same(array, total if rank == root else values(name, count, rank), f"reduce of {count} {name}")
    for verb, output in scattered(name, count, op):
        same(output, total, f"{verb} of {count} {name}")


def scattered(name: str, count: int, op: AnyReduceOp) -> Iterator[tuple[str, Array]]:
    """Reductions whose every part is what ``values`` gives, so that every rank gets what all_reduce gives."""
    given = values(name, count, dist.get_rank())
    output = np.zeros_like(given)
    dist.reduce_scatter(output, [given] * SIZE, op)
    yield "reduce_scatter", output
    output = np.zeros_like(given)
    dist.reduce_scatter_single(output, np.stack([given] * SIZE), op)
    yield "reduce_scatter_single", output


def same(got: Array, wanted: Array, what: str) -> None:
    assert got.dtype == wanted.dtype
    np.testing.assert_array_equal(got.view(np.uint8), wanted.view(np.uint8), what)


def scale_and_add(name: str) -> None:
    wide = np.float32 if dtype_of(name).itemsize == 2 else dtype_of(name)

    def combined(inputs: list[Array]) -> Array:
        scaled = [array.astype(wide) * np.asarray(factor, wide) for array, factor in zip(inputs, FACTORS, strict=True)]
        return np.asarray(reduce(np.add, scaled)).astype(inputs[0].dtype)

    for count in COUNTS:
        expect_reductions(name, count, lambda rank: ReduceOp.PREMUL_SUM(float(FACTORS[rank])), combined)


@transports
@pytest.mark.parametrize("name", ["float16", "bfloat16", "float32", "float64", "complex64", "complex128"])
def test_each_rank_has_a_factor_of_its_own(transport: str, name: str) -> None:
    run_ranks(scale_and_add, SIZE, name, **placed(transport, SIZE))


def refuse_factors() -> None:
    for name in OTHERS:
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
    array = np.arange(1, 500).astype(dtype_of(name)) * (1 if dist.get_rank() == 0 else 0)
    if name.startswith("complex") and dist.get_rank() == 0:
        array[:2] = complex(np.inf, 1.5), complex(3.0, -np.inf)
    dist.all_reduce(array, ReduceOp.PREMUL_SUM(0.1))
    return array.tobytes()


@pytest.mark.parametrize("name", ["float16", "bfloat16", "float32", "float64", "complex64", "complex128"])
def test_a_world_of_one_multiplies_as_a_world_of_two(name: str) -> None:
    (alone,) = run_ranks(scale_beside_zeros, 1, name)
    assert run_ranks(scale_beside_zeros, 2, name) == [alone] * 2


def multiply(inputs: list[Array]) -> Array:
    """The product part by part, which NumPy leaves open: so a zero has the sign that the formula gives it."""
    left = inputs[0].copy()
    for right in inputs[1:]:
        real = left.real * right.real - left.imag * right.imag
        left.imag = left.real * right.imag + left.imag * right.real
        left.real = real
    return left


def average(inputs: list[Array]) -> Array:
    parts = sum(array.view(array.real.dtype) for array in inputs) / inputs[0].real.dtype.type(SIZE)
    return parts.view(inputs[0].dtype)


def combine_complex_numbers(name: str) -> None:
    ways: dict[ReduceOp, Callable[[list[Array]], Array]] = {
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
