"""An array becomes memory through one function, or is refused in words that say what to do."""

from __future__ import annotations

import array
import sys

import ml_dtypes
import numpy as np
import pytest

from procgroup.arrays.array_view import DTYPES
from procgroup.arrays.view import view
from procgroup.errors import ArgumentError


@pytest.mark.parametrize("dtype", sorted(name for name in DTYPES if name != "bfloat16" and "float8" not in name))
def test_every_dtype_has_numpys_name_count_and_address(dtype: str) -> None:
    values = np.zeros((3, 5), dtype=dtype)
    seen = view(values)
    assert (seen.dtype, seen.count, seen.nbytes) == (dtype, 15, values.nbytes)
    assert seen.address == values.__array_interface__["data"][0]
    assert not seen.readonly


def test_bfloat16_of_ml_dtypes_is_known_by_its_name() -> None:
    values = np.ones(7, dtype=ml_dtypes.bfloat16)
    seen = view(values)
    assert (seen.dtype, seen.count, seen.itemsize, seen.address) == ("bfloat16", 7, 2, values.ctypes.data)


@pytest.mark.parametrize(("shape", "count"), [((), 1), ((0,), 0), ((2, 0, 3), 0), ((1, 1), 1)])
def test_zero_dimensional_and_empty_arrays_are_arrays(shape: tuple[int, ...], count: int) -> None:
    assert view(np.ones(shape)).count == count


@pytest.mark.parametrize(
    ("buffer", "dtype", "count"),
    [
        (array.array("d", [1, 2, 3]), "float64", 3),
        (array.array("h", [1, 2]), "int16", 2),
        (bytearray(5), "uint8", 5),
        (memoryview(bytearray(8)).cast("i"), "int32", 2),
    ],
)
def test_every_object_with_the_buffer_protocol_is_taken(buffer: object, dtype: str, count: int) -> None:
    seen = view(buffer, writable=True)
    assert (seen.dtype, seen.count) == (dtype, count)


def test_the_view_shares_the_memory_and_keeps_it_alive() -> None:
    buffer = bytearray(b"abc")
    seen = view(buffer)
    seen.owner[0] = ord("z")
    assert buffer == b"zbc"
    with pytest.raises(BufferError):
        buffer.clear()


@pytest.mark.parametrize(
    "values",
    [
        np.arange(16.0).reshape(4, 4)[:, 1],
        np.arange(8)[::2],
        np.arange(8)[::-1],
        np.asfortranarray(np.arange(6).reshape(2, 3)),
        np.arange(24, dtype="int16").reshape(2, 3, 4).transpose(2, 0, 1)[::-2, :, 1:],
        np.zeros((3, 0, 2))[:, :, ::2],
    ],
    ids=["column", "every second", "reversed", "Fortran", "turned", "empty"],
)
def test_a_strided_array_is_described_by_its_strides_and_copied_right(values: np.ndarray) -> None:
    seen = view(values, writable=True)
    assert (seen.shape, seen.strides, seen.address) == (values.shape, values.strides, values.ctypes.data)
    assert seen.to_bytes() == values.tobytes()
    twice = values * 2
    seen.copy_from(view(twice.reshape(-1)))
    np.testing.assert_array_equal(values, twice)


def test_a_strided_buffer_is_taken() -> None:
    assert view(memoryview(bytearray(b"abcdef"))[::2]).to_bytes() == b"ace"


@pytest.mark.parametrize(("shape", "strides"), [((4,), (0,)), ((3, 4), (0, 8)), ((3, 2), (8, 8)), ((2, 2), (12, 8))])
def test_an_array_with_several_elements_in_one_place_is_read_and_not_written(
    shape: tuple[int, ...], strides: tuple[int, ...]
) -> None:
    values = np.lib.stride_tricks.as_strided(np.arange(8.0), shape, strides)
    assert view(values).to_bytes() == values.tobytes()
    with pytest.raises(ArgumentError, match="`out` has several elements in one place.*Pass a copy"):
        view(values, writable=True, name="out")


def test_strides_that_cross_without_meeting_are_no_overlap() -> None:
    view(np.lib.stride_tricks.as_strided(np.arange(32, dtype=np.int8), (3, 4), (4, 3)), writable=True)


def test_the_other_byte_order_is_refused_with_the_cure() -> None:
    other = ">f4" if sys.byteorder == "little" else "<f4"
    with pytest.raises(ValueError, match="byte order.*astype"):
        view(np.ones(2, dtype=other))


@pytest.mark.parametrize(
    "values",
    [
        np.array([object()]),
        np.array(["a"]),
        np.array([b"a"]),
        np.array(["2020-01-01"], dtype="datetime64[D]"),
        np.zeros(2, dtype=[("a", "i4")]),
        np.ones(2, dtype=np.clongdouble),
        np.ones(2, dtype=ml_dtypes.float8_e4m3),
    ],
    ids=lambda values: str(values.dtype),
)
def test_an_unsupported_dtype_is_refused_with_the_supported_ones(values: np.ndarray) -> None:
    with pytest.raises(TypeError, match=r"has dtype .* cannot be sent; expected one of bfloat16, bool, complex128"):
        view(values)


def test_a_read_only_array_can_be_sent_but_not_received_into() -> None:
    values = np.ones(3)
    values.flags.writeable = False
    assert view(values).readonly
    with pytest.raises(ValueError, match="`tensor` is read-only, and this call writes into it"):
        view(values, writable=True)
    with pytest.raises(ValueError, match="`out` is read-only"):
        view(b"abc", writable=True, name="out")


@pytest.mark.parametrize("value", [3, 2.5, None, "text", [1.0, 2.0], (1,), {1: 2}, object(), len])
def test_what_is_not_an_array_is_a_type_error_that_names_the_type(value: object) -> None:
    with pytest.raises(TypeError, match="Invalid function argument. Expected parameter `tensor`") as caught:
        view(value)
    assert str(type(value)) in str(caught.value)


def test_a_list_is_told_of_asarray() -> None:
    with pytest.raises(TypeError, match=r"numpy.array\(tensor\)"):
        view([1, 2])
