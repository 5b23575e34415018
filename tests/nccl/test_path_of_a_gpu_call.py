"""A call on a GPU array goes through the same functions of procgroup's in Python as one on a CPU array.

They end with the group's method, which crosses into C++ (tests/api/test_one_call.py): nothing of the backend is among
them. What the array's own class does is not procgroup's.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import numpy as np
import pytest
from nccl import gpu_arrays
from nccl.gpu_arrays import GpuArray

import procgroup as dist
from world import run

if gpu_arrays.MISSING:
    pytest.skip(gpu_arrays.MISSING, allow_module_level=True)

SIZE = 2
GPUS = {"PROCGROUP_STAND_IN_GPUS": "4"}
PACKAGE = str(Path(dist.__file__).parent)
WARM_UP = 3
"""Calls after which nothing is done for the first time."""

Make = Callable[[int], Any]
"""Makes an array of so many elements."""

CALLS: dict[str, Callable[[Make, bool], Any]] = {
    "all_reduce": lambda make, async_op: dist.all_reduce(make(4), async_op=async_op),
    "broadcast": lambda make, async_op: dist.broadcast(make(4), 0, async_op=async_op),
    "all_gather_single": lambda make, async_op: dist.all_gather_single(make(4 * SIZE), make(4), async_op=async_op),
    "all_gather_into_tensor": lambda make, async_op: dist.all_gather_into_tensor(
        make(4 * SIZE), make(4), async_op=async_op
    ),
}
PATHS = {
    "all_reduce": ["api/reductions.py: all_reduce", "groups/reductions.py: Reductions.all_reduce"],
    "broadcast": [
        "api/collectives.py: broadcast",
        "api/default_group.py: choose",
        "api/ranks.py: group_rank_of",
        "groups/collectives.py: Collectives.broadcast",
        "groups/checks.py: group_rank",  # refuses a root that there is not
    ],
    "all_gather_single": [
        "api/collectives.py: all_gather_single",
        "api/default_group.py: choose",
        "groups/collectives.py: Collectives.all_gather_single",
    ],
}
"""The functions that each call enters: the public one, what chooses the group and the root, and the group's method."""
OLD_NAMES = {"all_gather_into_tensor": "all_gather_single"}
"""Names that warn first, and then are the same."""


def ones(count: int) -> GpuArray:
    return GpuArray.of(np.ones(count, np.float32))


def entered(code: CodeType) -> list[str]:
    """Return the name of a function, if it is procgroup's."""
    file = Path(code.co_filename)
    return [f"{file.relative_to(PACKAGE)}: {code.co_qualname}"] if file.is_relative_to(PACKAGE) else []


@contextmanager
def profiled(functions: list[str]) -> Iterator[None]:
    """Collect the functions that this thread enters."""

    def profile(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call":
            functions.extend(entered(frame.f_code))

    sys.setprofile(profile)
    try:
        yield
    finally:
        sys.setprofile(None)


@contextmanager
def monitored(functions: list[str]) -> Iterator[None]:
    """Collect the functions that any thread enters, also one that native code has started."""
    monitoring: Any = sys.monitoring  # type: ignore[attr-defined,unused-ignore]
    tool, start = monitoring.PROFILER_ID, monitoring.events.PY_START
    monitoring.use_tool_id(tool, "path of a call")
    monitoring.register_callback(tool, start, lambda code, offset: functions.extend(entered(code)))
    monitoring.set_events(tool, start)
    try:
        yield
    finally:
        monitoring.set_events(tool, 0)
        monitoring.free_tool_id(tool)


WAYS = {"profiled": profiled, "monitored": monitored}


def paths_of_calls(rank: int, size: int, way: str, async_op: bool) -> dict[str, tuple[list[str], list[str]]]:
    """Return the functions that each call enters, on arrays in memory of the host, and on those of a GPU."""
    warnings.simplefilter("ignore", FutureWarning)  # all_gather_into_tensor is an old name
    gpu_arrays.start()
    dist.init_process_group("nccl", timeout=20)
    paths = {
        name: (path(call, np.ones, way, async_op), path(call, ones, way, async_op)) for name, call in CALLS.items()
    }
    dist.destroy_process_group()
    return paths


def path(call: Callable[[Make, bool], Any], make: Make, way: str, async_op: bool) -> list[str]:
    for _ in range(WARM_UP):
        end(call(make, async_op))
    dist.barrier()
    functions: list[str] = []
    with WAYS[way](functions):
        work = call(make, async_op)
    end(work)
    return functions


def end(work: Any) -> None:
    if work is not None:
        work.wait()


@pytest.mark.parametrize("async_op", [False, True], ids=["blocking", "async"])
@pytest.mark.parametrize(
    "way",
    [
        "profiled",
        pytest.param("monitored", marks=pytest.mark.skipif(sys.version_info < (3, 12), reason="needs Python 3.12")),
    ],
)
def test_a_call_on_a_gpu_array_enters_the_few_functions_of_one_on_a_cpu_array(way: str, async_op: bool) -> None:
    for paths in run(paths_of_calls, SIZE, args=(way, async_op), environment=GPUS):
        for name, (on_cpu, on_gpu) in paths.items():
            assert on_gpu == on_cpu, name
            path = PATHS[OLD_NAMES.get(name, name)]
            assert on_gpu[-len(path) :] == path, name
            assert name in OLD_NAMES or on_gpu == path, name
