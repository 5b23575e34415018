"""Arrays of every library become memory through one function, without a copy, or are refused with advice."""

from __future__ import annotations

import ctypes
import gc
import sys
from types import ModuleType
from typing import Any, ClassVar

import ml_dtypes
import numpy as np
import pytest

from procgroup.arrays import dlpack, making
from procgroup.arrays.view import view
from procgroup.errors import ArgumentError


class Exporter:
    """What has DLPack and nothing else; ``versions`` says whether it knows of DLPack 1.0."""

    def __init__(self, values: Any, *, versions: bool = True, device: int = 1) -> None:
        self.values = values
        self.versions = versions
        self.device = device

    def __dlpack__(self, **keywords: Any) -> Any:
        if keywords and not self.versions:
            raise TypeError("__dlpack__() got an unexpected keyword argument")
        return self.values.__dlpack__(**keywords)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.device, 0


@pytest.mark.parametrize("versions", [True, False])
@pytest.mark.parametrize("dtype", ["bool", "int8", "uint64", "float16", "float32", "complex128"])
def test_dlpack_shares_the_memory_with_any_strides(dtype: str, versions: bool) -> None:
    values = np.zeros((3, 4), dtype)[:, 1:]
    seen = view(Exporter(values, versions=versions), writable=True)
    assert (seen.address, seen.shape, seen.strides) == (values.ctypes.data, values.shape, values.strides)
    assert (seen.dtype, seen.itemsize) == (dtype, values.itemsize)


def test_dlpack_keeps_the_memory_alive_without_the_exporter() -> None:
    exporter = Exporter(np.arange(1000.0))
    seen = view(exporter)
    del exporter
    gc.collect()
    assert seen.to_bytes() == np.arange(1000.0).tobytes()


def test_dlpack_says_what_is_read_only() -> None:
    values = np.ones(3)
    values.flags.writeable = False
    try:
        values.__dlpack__(max_version=(1, 0))
    except (TypeError, BufferError):
        pytest.skip("this NumPy does not export read-only arrays")
    assert view(Exporter(values)).readonly
    with pytest.raises(ArgumentError, match="`tensor` is read-only"):
        view(Exporter(values), writable=True)


def test_a_byte_offset_and_null_strides_are_understood(monkeypatch: pytest.MonkeyPatch) -> None:
    values = np.arange(6, dtype=np.int32)
    shape = (ctypes.c_int64 * 2)(2, 2)
    tensor = dlpack._Tensor(values.ctypes.data, 1, 0, 2, 0, 32, 1, shape, None, 8)
    monkeypatch.setattr(dlpack, "_read", lambda capsule, name: (tensor, 0))
    seen = dlpack.view(Exporter(values), "tensor")
    assert (seen.address, seen.strides) == (values.ctypes.data + 8, (8, 4))
    assert seen.to_bytes() == values[2:].tobytes()


@pytest.mark.parametrize(("code", "bits", "lanes"), [(2, 32, 4), (2, 4, 1), (3, 64, 1), (0, 128, 1), (17, 6, 1)])
def test_foreign_dlpack_dtypes_are_refused(code: int, bits: int, lanes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    values = np.zeros(4)
    shape = (ctypes.c_int64 * 1)(1)
    tensor = dlpack._Tensor(values.ctypes.data, 1, 0, 1, code, bits, lanes, shape, None, 0)
    monkeypatch.setattr(dlpack, "_read", lambda capsule, name: (tensor, 0))
    with pytest.raises(TypeError, match="`out` has .*cannot be sent"):
        view(Exporter(values), name="out")


@pytest.mark.parametrize(("device", "where"), [(2, "a CUDA device"), (10, "a ROCm device"), (99, "DLPack's type 99")])
def test_other_devices_are_refused_by_name(device: int, where: str) -> None:
    with pytest.raises(TypeError, match=f"`tensor` is on .*{where}.*CPU memory"):
        view(Exporter(np.ones(3), device=device))


def test_what_is_no_capsule_is_refused() -> None:
    exporter = Exporter(np.ones(3))
    exporter.values = type("Other", (), {"__dlpack__": lambda self, **keywords: 7})()
    with pytest.raises(TypeError, match="expected a capsule"):
        view(exporter)


@pytest.fixture
def torch() -> Any:
    return pytest.importorskip("torch")


@pytest.mark.torch
@pytest.mark.parametrize("name", ["bfloat16", "float32", "complex64", "bool", "uint16", "float8_e5m2"])
def test_torch_tensors_share_their_memory(name: str, torch: Any) -> None:
    tensor = torch.zeros(4, 6, dtype=getattr(torch, name))[1:, ::2].T
    seen = view(tensor, writable=True)
    assert (seen.address, seen.dtype, seen.shape) == (tensor.data_ptr(), name, (3, 3))
    assert seen.strides == tuple(stride * tensor.element_size() for stride in tensor.stride())


@pytest.mark.torch
def test_torch_tensors_that_require_a_gradient_are_taken_as_torch_takes_them(torch: Any) -> None:
    parameter = torch.nn.Parameter(torch.ones(3))
    view(parameter, writable=True).copy_from(view(np.full(3, 7, np.float32)))
    assert parameter.tolist() == [7, 7, 7]


@pytest.mark.torch
def test_lazy_views_of_torch_are_resolved_to_be_read_and_refused_to_be_written(torch: Any) -> None:
    values = torch.tensor([1 + 2j, 3 - 4j])
    assert view(values.conj()).to_bytes() == np.array([1 - 2j, 3 + 4j], np.complex64).tobytes()
    assert view(values.conj().imag).to_bytes() == np.array([-2, 4], np.float32).tobytes()
    for lazy in (values.conj(), values.conj().imag):
        with pytest.raises(ArgumentError, match="lazy conjugate or negative view.*resolve_conj"):
            view(lazy, writable=True)


@pytest.mark.torch
def test_torch_tensors_without_plain_memory_are_refused(torch: Any) -> None:
    with pytest.raises(TypeError, match="`tensor` is a meta tensor, which has no elements"):
        view(torch.empty(3, device="meta"))
    with pytest.raises(TypeError, match=r"layout torch.sparse_coo.*to_dense\(\)"):
        view(torch.eye(3).to_sparse())
    with pytest.raises(ArgumentError, match="several elements in one place"):
        view(torch.ones(1).expand(4), writable=True)


@pytest.fixture
def jax() -> Any:
    return pytest.importorskip("jax")


@pytest.mark.parametrize("name", ["float32", "int32", "bool", "complex64", "bfloat16", "float8_e4m3fn"])
def test_jax_arrays_are_read_in_place_and_never_written(name: str, jax: Any) -> None:
    array = jax.numpy.ones((3, 2), name)
    seen = view(array)
    assert (seen.address, seen.dtype, seen.shape) == (array.unsafe_buffer_pointer(), name, (3, 2))
    with pytest.raises(ArgumentError, match=r"immutable.*procgroup\.functional"):
        view(array, writable=True)


def test_traced_jax_arrays_are_refused(jax: Any) -> None:
    with pytest.raises(TypeError, match="is being traced by JAX"):
        jax.jit(lambda array: view(array).count)(jax.numpy.ones(3))


def test_cupy_arrays_are_refused_with_the_way_through_cpu_memory() -> None:
    class FakeArray:
        __module__ = "cupy"
        device = type("Device", (), {"id": 3})
        __cuda_array_interface__: ClassVar[dict[str, object]] = {}

    with pytest.raises(TypeError, match=r"`tensor` is on CUDA device 3.*tensor\.get\(\)"):
        view(FakeArray())


@pytest.mark.parametrize("name", ["bfloat16", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e8m0fnu"])
def test_the_dtypes_of_ml_dtypes_are_known_by_their_names(name: str) -> None:
    values = np.ones(7, getattr(ml_dtypes, name))
    seen = view(values, writable=True)
    assert (seen.dtype, seen.address) == (name, values.ctypes.data)
    assert seen.numbers().dtype == values.dtype


@pytest.mark.parametrize("library", ["numpy.ma", "torch", "jax"])
def test_a_library_that_another_thread_is_importing_has_no_arrays_yet(
    library: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, library, ModuleType(library))
    values = np.arange(3.0)
    assert view(values).shape == view(memoryview(values)).shape == (3,)
    assert making.library_of(values) == "numpy"
