"""The element kernels against NumPy: every dtype, reduce op, number of sources and instruction set."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import pytest

from oracle import COMPLEX, DTYPES, FLOAT8, FLOATS, HALVES, INTEGERS, Array, combined, numpy_dtype
from procgroup import _native
from procgroup.types import ReduceOp

COMBINES = {row["name"]: row["combines"] for row in _native.reduce_ops()}
"""By reduce op: the one whose kernels combine the elements, which each rank may have prepared."""
REDUCED = [name for name in DTYPES if name not in FLOAT8]
FLOAT8_HERE = ["float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"]
SOURCE_COUNTS = [1, 2, 3, 4, 7]
COUNTS = [0, 1, 7, 64, 1000, 4097]

SUPPORTED = [(name, op) for name in REDUCED for op in ReduceOp if _native.supports(op, name)]
UNSUPPORTED = [(name, op) for name in [*REDUCED, *FLOAT8_HERE] for op in ReduceOp if not _native.supports(op, name)]


def random_array(name: str, count: int, random: np.random.Generator) -> Array:
    """Any bits for integers; for floats, values whose sums and products stay finite, with both zeros among them."""
    dtype = numpy_dtype(name)
    if name == "bool":
        return random.integers(0, 2, count).astype(bool)
    if name in INTEGERS:
        return random.integers(0, 256, count * dtype.itemsize, dtype=np.uint8).view(dtype)
    if name in COMPLEX:  # products of these are exact: NumPy may compute them with fused multiply-adds
        return (
            random.choice([0.0, 1.0, -1.0, 0.5, -2.0, np.inf], 2 * count).astype(f"f{dtype.itemsize // 2}").view(dtype)
        )
    values = random.standard_normal(count) * random.choice([0.0, -0.0, 0.01, 1.0, 3.0], count)
    return values.astype(dtype)


def expected(name: str, op: ReduceOp, sources: Sequence[Array]) -> Array:
    return combined(COMBINES[op.name], sources)


def as_bytes(array: Array) -> Array:
    return array.view(np.uint8)


def reduce_into(out: Array, name: str, op: ReduceOp, sources: Sequence[Array]) -> Array:
    _native.reduce_elements(name, int(op), as_bytes(out), [as_bytes(source) for source in sources])
    return out


def reduced(name: str, op: ReduceOp, sources: Sequence[Array]) -> Array:
    return reduce_into(np.empty_like(sources[0]), name, op, sources)


def assert_same(got: Array, want: Array) -> None:
    """The same bits, except that any NaN is as good as another."""
    if got.dtype.kind == "c":
        got, want = (array.view(f"f{array.itemsize // 2}") for array in (got, want))
    if got.dtype.kind not in "biu":
        with np.errstate(invalid="ignore"):  # ml_dtypes says so of a signalling NaN
            nan = np.isnan(want)
        np.testing.assert_array_equal(np.isnan(got), nan)
        got, want = got[~nan], want[~nan]
    np.testing.assert_array_equal(as_bytes(got), as_bytes(want))


@pytest.fixture(params=_native.instruction_sets())
def instruction_set(request: pytest.FixtureRequest) -> Iterator[str]:
    before = _native.instruction_set()
    _native.set_instruction_set(request.param)
    yield request.param
    _native.set_instruction_set(before)


@pytest.mark.parametrize(("name", "op"), SUPPORTED)
def test_agrees_with_numpy(name: str, op: ReduceOp, instruction_set: str) -> None:
    random = np.random.default_rng(7)
    for source_count in SOURCE_COUNTS:
        for count in COUNTS:
            sources = [random_array(name, count, random) for _ in range(source_count)]
            assert_same(reduced(name, op, sources), expected(name, op, sources))


@pytest.mark.parametrize(("name", "op"), SUPPORTED)
def test_out_may_be_any_of_the_sources(name: str, op: ReduceOp, instruction_set: str) -> None:
    random = np.random.default_rng(8)
    for source_count in SOURCE_COUNTS:
        originals = [random_array(name, 4097, random) for _ in range(source_count)]
        want = expected(name, op, originals)
        for position in range(source_count):
            sources = [original.copy() for original in originals]
            assert_same(reduce_into(sources[position], name, op, sources), want)
            for other in set(range(source_count)) - {position}:
                np.testing.assert_array_equal(as_bytes(sources[other]), as_bytes(originals[other]))


@pytest.mark.parametrize(("name", "op"), SUPPORTED)
def test_addresses_need_not_be_aligned(name: str, op: ReduceOp, instruction_set: str) -> None:
    random = np.random.default_rng(9)
    for source_count in (2, 3, 7):
        sources = [random_array(name, 321, random) for _ in range(source_count)]
        size = sources[0].nbytes
        memory = np.full((source_count + 1) * (size + 8), 0xA5, np.uint8)
        starts = [index * (size + 8) + 1 + 2 * (index % 3) for index in range(source_count + 1)]
        for start, source in zip(starts, sources, strict=False):
            memory[start : start + size] = as_bytes(source)
        views = [memory[start : start + size] for start in starts]
        _native.reduce_elements(name, int(op), views[-1], views[:-1])
        assert_same(views[-1].copy().view(sources[0].dtype), expected(name, op, sources))
        outside = np.ones(memory.size, bool)
        for start in starts:
            outside[start : start + size] = False
        assert (memory[outside] == 0xA5).all(), "bytes beside the arrays were written"


@pytest.mark.parametrize("name", FLOATS)
def test_minimum_and_maximum_pass_nan_on_from_any_source(name: str, instruction_set: str) -> None:
    for sign in (1.0, -1.0):
        for source_count in SOURCE_COUNTS:
            for position in range(source_count):
                sources = [np.full(37, 1.5).astype(numpy_dtype(name)) for _ in range(source_count)]
                sources[position][::3] = numpy_dtype(name).type(np.copysign(np.nan, sign))
                for op in (ReduceOp.MIN, ReduceOp.MAX):
                    got = reduced(name, op, sources)
                    assert np.isnan(got[::3]).all()
                    assert (got[1::3] == 1.5).all()


@pytest.mark.parametrize("name", FLOATS)
@pytest.mark.parametrize("negative_first", [True, False])
def test_negative_zero_is_smaller_than_positive_zero(name: str, negative_first: bool, instruction_set: str) -> None:
    zeros = [np.full(37, zero).astype(numpy_dtype(name)) for zero in ((-0.0, 0.0) if negative_first else (0.0, -0.0))]
    for sources in (zeros, [*zeros, *zeros, *zeros]):
        assert np.signbit(reduced(name, ReduceOp.MIN, sources)).all()
        assert not np.signbit(reduced(name, ReduceOp.MAX, sources)).any()


@pytest.mark.parametrize("name", FLOATS)
@pytest.mark.parametrize("op", [op for op in ReduceOp if _native.supports(op, "float32")])
def test_infinities_follow_ieee(name: str, op: ReduceOp, instruction_set: str) -> None:
    special = np.array([np.inf, -np.inf, 0.0, -0.0, 1.0, -2.0])
    left, right = (part.ravel().astype(numpy_dtype(name)) for part in np.meshgrid(special, special))
    assert_same(reduced(name, op, [left, right]), expected(name, op, [left, right]))


@pytest.mark.parametrize("name", HALVES)
def test_every_16_bit_float_survives_the_way_through_float32(name: str, instruction_set: str) -> None:
    everything = np.arange(1 << 16, dtype=np.uint16).view(numpy_dtype(name))
    ones = np.ones_like(everything)
    assert_same(reduced(name, ReduceOp.PRODUCT, [everything, ones]), everything)


@pytest.mark.parametrize("name", HALVES)
def test_16_bit_floats_are_rounded_once_to_nearest_even(name: str, instruction_set: str) -> None:
    dtype = numpy_dtype(name)
    random = np.random.default_rng(10)
    left, right, third = (random.integers(0, 1 << 16, 1 << 15, dtype=np.uint16).view(dtype) for _ in range(3))
    for op in (ReduceOp.SUM, ReduceOp.AVG, ReduceOp.PRODUCT):
        for sources in ([left, right], [left, right, third], [left, right, third, left, right]):
            assert_same(reduced(name, op, sources), expected(name, op, sources))


@pytest.mark.parametrize("name", HALVES)
def test_small_addends_are_not_lost_before_the_final_rounding(name: str) -> None:
    digits = {"float16": 11, "bfloat16": 8}[name]
    big = float(2**digits)
    sources = [np.full(9, value).astype(numpy_dtype(name)) for value in (big, 1.0, 1.0)]
    assert (reduced(name, ReduceOp.SUM, sources).astype(float) == big + 2).all()


@pytest.mark.parametrize("name", INTEGERS)
def test_integer_sums_and_products_wrap(name: str, instruction_set: str) -> None:
    dtype = numpy_dtype(name)
    largest, smallest = np.full(70, np.iinfo(dtype).max, dtype), np.iinfo(dtype).min
    assert (reduced(name, ReduceOp.SUM, [largest, np.ones_like(largest)]) == smallest).all()
    assert (reduced(name, ReduceOp.PRODUCT, [largest, largest]) == 1).all()


@pytest.mark.parametrize("name", INTEGERS)
def test_the_mean_of_integers_does_not_overflow_and_is_truncated_toward_zero(name: str, instruction_set: str) -> None:
    dtype = numpy_dtype(name)
    smallest, largest = np.iinfo(dtype).min, np.iinfo(dtype).max
    edges = [smallest, smallest + 1, largest, largest - 1, 0, 1, 2, 3, 5, 7]
    edges += [] if smallest == 0 else [-1, -2, -3, -5, -7]
    random = np.random.default_rng(12)
    for source_count in range(1, 9):
        for extreme in (smallest, largest):
            everywhere = [np.full(37, extreme, dtype) for _ in range(source_count)]
            assert (reduced(name, ReduceOp.AVG, everywhere) == extreme).all()
        sources = [random.choice(np.array(edges, dtype), 999) for _ in range(source_count)]
        assert_same(reduced(name, ReduceOp.AVG, sources), combined("AVG", sources))
    if smallest < 0:
        assert reduced(name, ReduceOp.AVG, [np.array([-7, 7], dtype), np.zeros(2, dtype)]).tolist() == [-3, 3]


@pytest.mark.skipif(len(_native.instruction_sets()) < 2, reason="this processor has the baseline only")
@pytest.mark.parametrize(("name", "op"), SUPPORTED)
def test_every_instruction_set_gives_the_same_bits(name: str, op: ReduceOp) -> None:
    random = np.random.default_rng(11)
    before = _native.instruction_set()
    size = numpy_dtype(name).itemsize
    for source_count in (2, 3, 4, 7):
        sources = [random.integers(0, 256, 1999 * size, dtype=np.uint8) for _ in range(source_count)]
        if name == "bool":
            sources = [source & 1 for source in sources]
        results = []
        try:
            for instruction_set in _native.instruction_sets():
                _native.set_instruction_set(instruction_set)
                results.append(reduced(name, op, [source.view(numpy_dtype(name)) for source in sources]))
        finally:
            _native.set_instruction_set(before)
        for other in results[1:]:
            assert_same(other, results[0])


@pytest.mark.parametrize(("name", "op"), UNSUPPORTED)
def test_an_op_without_meaning_for_the_dtype_is_refused(name: str, op: ReduceOp) -> None:
    array = np.zeros(4, numpy_dtype(name))
    with pytest.raises(ValueError, match=f"{op.name} is not defined for {name}"):
        reduced(name, op, [array, array])


def test_misuse_is_refused() -> None:
    array = np.zeros(4, np.float32)
    with pytest.raises(ValueError, match="dtype that can be reduced, got complex256"):
        reduced("complex256", ReduceOp.SUM, [array])
    with pytest.raises(ValueError, match="expected a ReduceOp, got 99"):
        _native.reduce_elements("float32", 99, array, [array])
    with pytest.raises(ValueError, match="at least 1 source, got 0"):
        reduce_into(array, "float32", ReduceOp.SUM, [])
    with pytest.raises(ValueError, match="sources of 16 bytes, as out has, got 12"):
        reduce_into(array, "float32", ReduceOp.SUM, [array, array[:3]])
    with pytest.raises(BufferError):
        _native.reduce_elements("float32", 0, bytes(16), [array])
    with pytest.raises(ValueError, match=r"instruction set of this processor .* got mmx"):
        _native.set_instruction_set("mmx")
