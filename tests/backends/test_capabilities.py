"""The capability table says what becomes of every call: each row is compared with the call itself."""

from __future__ import annotations

import json
import sys

import pytest
from backends.every_cell import make_every_call

import procgroup
from mpi_world import MPIS, lacks
from mpi_world import run as run_by_mpiexec
from procgroup import _native
from procgroup.arrays.array_view import DTYPES
from procgroup.backends import capabilities
from procgroup.types import ReduceOp
from world import run, run_command


def test_every_row_of_the_built_in_transport_is_what_the_call_does() -> None:
    assert run(make_every_call, 2, args=("gloo",)) == [[], []]


@pytest.mark.parametrize("mpi", MPIS)
def test_every_row_of_mpi_is_what_the_call_does(mpi: str) -> None:
    if missing := lacks(mpi):
        pytest.skip(missing)
    assert run_by_mpiexec(make_every_call, 2, mpi=mpi, args=("mpi",)) == [[], []]


def test_the_table_has_a_row_for_each_backend_device_operation_reduce_op_and_dtype() -> None:
    rows = capabilities()
    assert len(set(rows)) == len(rows)
    for backend in ("gloo", "mpi", "nccl"):
        for device in ("cpu", "cuda"):
            found = {(row.operation, row.reduce_op, row.dtype) for row in capabilities(backend, device)}
            assert {operation for operation, _, _ in found} == {row["name"] for row in _native.operations()}
            assert {op for _, op, _ in found} == {"", *ReduceOp.__members__}
            assert {dtype for _, _, dtype in found} == {"", *DTYPES}
    assert all(row.reason for row in rows if not row.is_supported)


def test_the_table_has_no_holes_on_a_gpu() -> None:
    on_cpu = [row._replace(device="cuda") for row in capabilities("gloo", "cpu")]
    for backend in ("gloo", "mpi", "nccl"):
        assert [row._replace(backend="gloo", is_staged=False) for row in capabilities(backend, "cuda")] == on_cpu
    assert all(row.is_staged for row in capabilities("gloo", "cuda") if row.dtype and row.is_supported)


def test_an_array_that_gives_itself_by_dlpack_alone_is_refused_on_a_gpu() -> None:
    class OnGpu:
        def __dlpack_device__(self) -> tuple[int, int]:
            return 2, 0

        def __dlpack__(self, **_: object) -> object:
            raise AssertionError("it must not be exported")

    procgroup.init_process_group(rank=0, world_size=1, store=procgroup.HashStore())
    try:
        with pytest.raises(TypeError, match="is on a CUDA device, and this group moves arrays in CPU memory"):
            procgroup.all_reduce(OnGpu())
    finally:
        procgroup.destroy_process_group()


def test_an_unknown_name_is_refused() -> None:
    with pytest.raises(ValueError, match="expected `backend` to be one of gloo, mpi, nccl, got 'foo'"):
        capabilities("foo")
    with pytest.raises(ValueError, match="expected `device` to be one of cpu, cuda, got 'tpu'"):
        capabilities(device="tpu")


def test_the_command_prints_the_rows_of_the_function() -> None:
    command = [sys.executable, "-m", "procgroup", "capabilities"]
    printed = run_command([*command, "--json", "--backend", "gloo"])
    assert json.loads(printed.stdout) == [row._asdict() for row in capabilities("gloo")]
    assert run_command([*command, "--backend", "foo"]).returncode == 2
