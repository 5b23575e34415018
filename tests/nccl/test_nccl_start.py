"""How groups on backend "nccl" start: on which GPU and when, with which options, or refused in words."""

from __future__ import annotations

import ctypes
import ctypes.util
import importlib.util
import re
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from backends.every_cell import Cell
from failures.waiting_calls import allowance
from nccl import gpu_arrays, stand_ins
from nccl.gpu_arrays import GpuArray
from nccl.gpu_parts import OnGpu

import procgroup as dist
from procgroup.backends import capabilities
from world import attempt, run, run_command

if gpu_arrays.MISSING:
    pytest.skip(gpu_arrays.MISSING, allow_module_level=True)

GPUS = {"PROCGROUP_STAND_IN_GPUS": "4"}


def add_up(**how: Any) -> float:
    """Return the sum of a one of each rank, which NCCL computes."""
    array = GpuArray.of(np.ones(4), **how)
    dist.all_reduce(array)
    return float(array.get()[0])


# --- when the communicator is made, and on which GPU ---

FORMS: dict[str, Callable[[int], Any]] = {
    "a number": lambda gpu: gpu,
    "a name": lambda gpu: f"cuda:{gpu}",
    "an object with type and index": lambda gpu: SimpleNamespace(type="cuda", index=gpu),
}
"""A device_id for a GPU."""


def use_two_gpus(rank: int, size: int, form: str) -> str:
    gpu, other = rank + 1, 3
    gpu_arrays.start(gpu)
    dist.init_process_group("nccl", timeout=20, device_id=FORMS[form](gpu))
    with pytest.raises((dist.ArgumentError, dist.DistBackendError)) as caught:
        add_up(device=other)
    assert add_up() == size
    dist.destroy_process_group()
    return str(caught.value)


@pytest.mark.parametrize("form", FORMS)
def test_device_id_names_the_gpu_of_the_group_and_a_call_on_another_names_both(form: str) -> None:
    for rank, text in enumerate(run(use_two_gpus, 2, args=(form,), environment=GPUS)):
        assert str(rank + 1) in text and "3" in text, text


def start_on_a_failing_gpu(rank: int, size: int, is_eager: bool) -> tuple[str, str]:
    """Return the errors of init_process_group and of the first call on GPU arrays; "" where there is none."""
    gpu_arrays.start()
    texts = ["", ""]
    try:
        dist.init_process_group("nccl", timeout=20, device_id=rank if is_eager else None)
    except dist.DistError as error:
        texts[0] = str(error)
        return texts[0], texts[1]
    dist.barrier()
    dist.all_reduce(np.ones(3))
    try:
        add_up()
    except dist.DistError as error:
        texts[1] = str(error)
    return texts[0], texts[1]


@pytest.mark.parametrize("is_eager", [False, True], ids=["without device_id", "with device_id"])
def test_the_communicator_is_made_at_the_start_with_device_id_and_otherwise_in_the_first_call(is_eager: bool) -> None:
    environments = [GPUS, {**GPUS, "PROCGROUP_STAND_IN_NCCL_FAIL": "init:1:call-system"}]
    results = run(start_on_a_failing_gpu, 2, args=(is_eager,), environments=environments)
    where = 0 if is_eager else 1
    for texts in results:
        assert texts[where] and not texts[1 - where], results
    assert "init failed on request" in results[1][where], results
    assert "rank 1" in results[0][where], results


def call_first_on(rank: int, size: int) -> float:
    """Use a GPU that is not the thread's current one."""
    gpu_arrays.start(0)
    dist.init_process_group("nccl", timeout=20)
    return add_up(device=rank + 1)


def test_without_device_id_the_gpu_is_that_of_the_first_array() -> None:
    assert run(call_first_on, 2, environment=GPUS) == [2.0, 2.0]


def name_a_missing_gpu(rank: int, size: int) -> str:
    gpu_arrays.start()
    try:
        dist.init_process_group("nccl", timeout=20, device_id="cuda:9")
    except Exception as error:
        return str(error)
    return "not refused"


def test_a_gpu_that_is_not_there_is_refused_by_number() -> None:
    assert "9" in run(name_a_missing_gpu, 1, environment=GPUS)[0]


def start_again_and_again(rank: int, size: int) -> None:
    gpu_arrays.start()
    for device_id in (None, rank, None, f"cuda:{rank}"):
        dist.init_process_group("nccl", timeout=20, device_id=device_id)
        assert add_up() == size
        dist.destroy_process_group()
        assert not dist.is_initialized()


def test_groups_can_be_made_again() -> None:
    run(start_again_and_again, 2, environment=GPUS)


def use_backends_by_name(rank: int, size: int) -> None:
    gpu_arrays.start()
    for backend in ("nccl", "NCCL", "cuda:nccl", "cpu:gloo,cuda:nccl", None):
        dist.init_process_group(backend, timeout=20)
        array = np.ones(3)
        dist.all_reduce(array)
        assert add_up() == array[0] == size, backend
        if backend is not None:
            assert "cuda:nccl" in dist.get_backend_config()
        dist.destroy_process_group()
    dist.init_process_group("gloo", timeout=20)
    assert add_up() == size and "nccl" not in dist.get_backend_config()


def test_gpu_arrays_go_by_nccl_unless_the_backend_is_for_cpu_arrays_only() -> None:
    run(use_backends_by_name, 2, environment=GPUS)


# --- what is missing ---


def refused_start(rank: int, size: int) -> tuple[str, float]:
    """Return the text of the first error, of the start or of a call after it, and how long it took."""
    stand_ins.load()
    started = time.monotonic()
    text = "no error"
    try:
        dist.init_process_group("nccl", timeout=3)
        dist.barrier()
    except dist.DistError as error:
        text = f"{type(error).__name__}: {error}"
    return text, time.monotonic() - started


LACKS = {
    "no GPU": ({"PROCGROUP_STAND_IN_GPUS": "0"}, r"(?i)\bgpu"),
    "an old NCCL": ({"PROCGROUP_STAND_IN_NCCL_VERSION": "21805"}, r"(?s)2\.18\.5.*(install|upgrade|update)"),
}


@pytest.mark.parametrize("lack", LACKS)
def test_a_rank_that_lacks_something_says_so_at_once_and_the_others_name_it(lack: str) -> None:
    variables, words = LACKS[lack]
    outcomes = attempt(refused_start, 2, environments=[GPUS, {**GPUS, **variables}])
    assert all(outcome.ok for outcome in outcomes), outcomes
    (text, _), (own_text, _) = (outcome.value for outcome in outcomes)
    assert own_text.startswith("DistBackendError: ") and re.search(words, own_text), own_text
    assert text.startswith("RendezvousTimeout: ") and "missing rank 1" in text, text
    assert outcomes[1].value[1] < allowance(2.0), outcomes


@pytest.mark.parametrize("lack", LACKS)
def test_a_world_of_one_is_refused_alike(lack: str) -> None:
    variables, words = LACKS[lack]
    text, _ = run(refused_start, 1, environment={**GPUS, **variables})[0]
    assert text.startswith("DistBackendError: ") and re.search(words, text), text


def start_without_gpus(rank: int, size: int) -> float:
    stand_ins.load()
    dist.init_process_group(timeout=20)
    array = np.ones(3)
    dist.all_reduce(array)
    return float(array[0])


def test_the_default_backend_needs_no_gpu_for_cpu_arrays() -> None:
    assert run(start_without_gpus, 2, environment={"PROCGROUP_STAND_IN_GPUS": "0"}) == [2.0, 2.0]


def start_without_the_library(rank: int, size: int) -> str:
    ctypes.CDLL(str(stand_ins.build() / "libcuda.so.1"), mode=ctypes.RTLD_GLOBAL)
    try:
        dist.init_process_group("nccl", timeout=20)
    except dist.DistBackendError as error:
        return str(error)
    return "not refused"


def _has_nccl() -> bool:
    try:
        is_in_wheel = importlib.util.find_spec("nvidia.nccl") is not None
    except ModuleNotFoundError:
        is_in_wheel = False
    return is_in_wheel or ctypes.util.find_library("nccl") is not None


@pytest.mark.skipif(_has_nccl(), reason="the real NCCL is installed here")
def test_without_the_library_of_nccl_the_error_says_what_to_install() -> None:
    (text,) = run(start_without_the_library, 1)
    assert "libnccl" in text and "pip install" in text, text


PROGRAM = """
import sys
import numpy as np
import procgroup as dist

assert dist.is_nccl_available() and dist.is_backend_available("nccl")
assert not [name for name in ("nccl.core", "nccl.bindings", "cuda.bindings", "torch") if name in sys.modules]
dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
dist.all_reduce(np.ones(3))
assert not [name for name in ("nccl.core", "nccl.bindings", "cuda.bindings", "torch") if name in sys.modules]
print(dist.get_backend(), end="")
"""


def test_the_backend_is_available_where_its_packages_are_installed_and_they_are_imported_for_it_alone() -> None:
    done = run_command([sys.executable, "-c", PROGRAM], environment=stand_ins.environment(gpus=1))
    assert (done.returncode, done.stdout, done.stderr) == (0, "gloo", ""), done.stderr


# --- options ---


def start_with_options(rank: int, size: int) -> None:
    gpu_arrays.start()
    import nccl.core

    options: list[Any] = [
        {"max_ctas": 4, "comm_name": "x"},
        nccl.core.NCCLConfig(max_ctas=4, comm_name="x"),
        {"nccl": {"min_ctas": 1}},
        {"nccl": nccl.core.NCCLConfig(min_ctas=1)},
        {"split_share": True},
        {},
        None,
    ]
    for option in options:
        for device_id in (None, rank):
            dist.init_process_group("nccl", timeout=20, pg_options=option, device_id=device_id)
            assert add_up() == size
            group: Any = dist.new_group(list(range(size)), pg_options=option)
            array = GpuArray.of(np.ones(3))
            dist.all_reduce(array, group=group)
            assert (array.get() == size).all()
            dist.destroy_process_group()


def test_options_are_the_fields_of_nccl_s_configuration_or_the_configuration() -> None:
    run(start_with_options, 2, environment=GPUS)


def refuse_options(rank: int, size: int) -> dict[str, str]:
    gpu_arrays.start()
    texts = {}
    wrong: list[Any] = [
        {"max_cta": 4},
        {"nccl": {"max_cta": 4}},
        {"max_ctas": "four"},
        {"comm_name": 5},
        5,
        {"nccl": 5},
    ]
    for option in wrong:
        try:
            dist.init_process_group("nccl", timeout=20, pg_options=option)
        except (TypeError, ValueError) as error:
            texts[repr(option)] = f"{type(error).__name__}: {error}"
        assert not dist.is_initialized(), option
    return texts


def test_unknown_options_are_refused_with_the_known_ones_and_values_of_wrong_types_by_name() -> None:
    (texts,) = run(refuse_options, 1, environment=GPUS)
    for option in ("{'max_cta': 4}", "{'nccl': {'max_cta': 4}}"):
        text = texts[option]
        assert text.startswith("ValueError: ") and "'max_cta'" in text, text
        assert all(name in text for name in ("max_ctas", "min_ctas", "comm_name", "traffic_class")), text
    for option, name in (("{'max_ctas': 'four'}", "max_ctas"), ("{'comm_name': 5}", "comm_name")):
        assert texts[option].startswith("TypeError: ") and name in texts[option], texts[option]
    for option in ("5", "{'nccl': 5}"):
        assert texts[option].startswith("TypeError: "), texts[option]


def timeouts(rank: int, size: int) -> dict[str, float]:
    gpu_arrays.start()
    minutes: dict[str, float] = {}
    for backend in ("nccl", "gloo", "cpu:gloo,cuda:nccl", None):
        dist.init_process_group(backend)
        world: Any = dist.group.WORLD
        minutes[str(backend)] = world.timeout / timedelta(minutes=1)
        dist.destroy_process_group()
    dist.init_process_group("nccl", timeout=timedelta(minutes=3))
    world = dist.group.WORLD
    minutes["given"] = world.timeout / timedelta(minutes=1)
    minutes["of a new group"] = dist.new_group([0]).timeout / timedelta(minutes=1)
    return minutes


def test_calls_may_take_ten_minutes_with_nccl_and_thirty_with_others() -> None:
    others = {"gloo": 30.0, "cpu:gloo,cuda:nccl": 30.0, "None": 30.0}
    assert run(timeouts, 1, environment=GPUS) == [{"nccl": 10.0, **others, "given": 3.0, "of a new group": 3.0}]


# --- capabilities ---

SAMPLE = ("all_reduce", "broadcast", "scan", "recv")


class GpuCell(OnGpu, Cell):
    """One rank's part in the call of a row, on GPU arrays."""


def make_every_call(rank: int, size: int, backend: str, sampled: bool) -> list[str]:
    """Return what differs from the table on this rank."""
    gpu_arrays.start()
    dist.init_process_group(backend, timeout=20)
    differences = []
    for row in capabilities(backend, "cuda"):
        if not row.dtype or (sampled and row.operation not in SAMPLE):
            continue
        cell, refusal, wrong = GpuCell(row, rank, size), "", ""
        try:
            cell.start(dist)
            cell.wait()
            wrong = cell.wrong()
        except (TypeError, ValueError, dist.DistError) as error:
            refusal = f"{type(error).__name__}: {error}"
        if bool(refusal) == row.is_supported or wrong:
            differences.append(f"{row}: {refusal or wrong or 'not refused'}")
    dist.destroy_process_group()
    return differences


@pytest.mark.parametrize("backend", ["nccl", "gloo"])
def test_every_row_of_the_table_is_what_the_call_does(backend: str, sampled: bool) -> None:
    assert run(make_every_call, 2, args=(backend, sampled), environment=GPUS) == [[], []]


def test_the_table_says_what_nccl_moves_and_reduces_itself() -> None:
    rows = {(row.operation, row.reduce_op, row.dtype): row for row in capabilities("nccl", "cuda")}
    for key in (("all_reduce", "SUM", "bfloat16"), ("reduce_scatter", "AVG", "complex64"), ("recv", "", "float8_e5m2")):
        assert rows[key].is_supported and not rows[key].is_staged, rows[key]
    for key in (
        ("all_reduce", "BAND", "int32"),
        ("reduce", "SUM", "int16"),
        ("scan", "SUM", "float32"),
        ("all_reduce", "PRODUCT", "complex128"),
    ):
        assert rows[key].is_supported and rows[key].is_staged, rows[key]
    assert [row._replace(backend="gloo") for row in capabilities("nccl", "cpu")] == capabilities("gloo", "cpu")
