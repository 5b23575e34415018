"""Ten thousand small reductions in a plain loop, none waited for: each is made once, in order, and the loop ends.

A training loop can be that far ahead of its GPU. What a stream has no room for yet, a late completion, a hardware queue
that all streams share, and an event that is used again too early all show in the sums, or as a loop that never ends.
The GPUs and NCCL are stand-ins. The tier "all" plays the loop of blocking calls 20 times.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import cycle, islice, product
from typing import Any

import numpy as np
import pytest
from nccl import gpu_arrays
from nccl.gpu_arrays import GpuArray

import procgroup as dist
from tiers import SAMPLED
from world import run

if gpu_arrays.MISSING:
    pytest.skip(gpu_arrays.MISSING, allow_module_level=True)
pytestmark = pytest.mark.timeout(650)

CALLS = 10_000
SOME = 2_000 if SAMPLED else CALLS
"""On GPUs of other kinds."""
FEWER = 1_000
"""Where every call has to wait for the other ranks."""
ARRAYS = 200
"""That are reduced in turn. Each is so 50 times at most: the sum, 4 ** 50 times a small number, is exact."""
REPETITIONS = 1 if SAMPLED else 20

SETTINGS: dict[str, dict[str, str]] = {
    "GPUs that run work at once": {},
    "completions that come late and many at once": {"PROCGROUP_STAND_IN_BURST_US": "2000"},
    "events that may not be recorded again too early": {"PROCGROUP_STAND_IN_STRICT_EVENTS": "1"},
    "one hardware queue for all streams": {"PROCGROUP_STAND_IN_CHANNELS": "1"},
}
NO_WORDS = {"PROCGROUP_STAND_IN_NO_STREAM_MEMORY_OPERATIONS": "1"}
"""Streams that cannot wait for words of memory."""

ORDINARY, LATE, STRICT, CROWDED = SETTINGS


def each_setting(*chosen: tuple[int, str]) -> pytest.MarkDecorator:
    """Give a test each number of ranks with each setting: these in all tiers, the others in the tier "all"."""
    products = list(product((2, 4), SETTINGS))
    marks: dict[bool, Any] = {True: (), False: pytest.mark.slow}
    return pytest.mark.parametrize(
        ("size", "setting"), [pytest.param(*one, marks=marks[one in chosen]) for one in products]
    )


each_time = pytest.mark.parametrize("repetition", range(REPETITIONS))


def joined_group() -> Any:
    gpu_arrays.start()
    dist.init_process_group("nccl")
    return dist.group.WORLD


def start_of(number: int, rank: int) -> np.ndarray:
    """Return the two elements of an array before its first reduction: small, and others on each rank."""
    return np.array([rank + 1, (number + rank) % 7], np.float32)


class Sums:
    """Arrays on the default stream, and how often each was reduced."""

    def __init__(self, rank: int, size: int) -> None:
        self._size = size
        self._starts = [[start_of(number, peer) for peer in range(size)] for number in range(ARRAYS)]
        self._arrays = [GpuArray.of(starts[rank]) for starts in self._starts]
        self._times = [0] * ARRAYS

    def in_turn(self, calls: int) -> Iterator[GpuArray]:
        """Yield an array for each of so many reductions."""
        for number in islice(cycle(range(ARRAYS)), calls):
            self._times[number] += 1
            yield self._arrays[number]

    def require_exact(self) -> None:
        for array, starts, times in zip(self._arrays, self._starts, self._times, strict=True):
            wanted = np.sum(starts, axis=0, dtype=np.float64) * float(self._size) ** (times - 1)
            assert (array.get() == wanted.astype(np.float32)).all(), f"{array.get()} after {times} sums, not {wanted}"


def reduce_in_a_loop(rank: int, size: int, calls: int) -> None:
    joined_group()
    sums = Sums(rank, size)
    for array in sums.in_turn(calls):
        dist.all_reduce(array)
    sums.require_exact()
    dist.destroy_process_group()


def reduce_asynchronously(rank: int, size: int, calls: int) -> None:
    joined_group()
    sums = Sums(rank, size)
    work: Any = None
    for array in sums.in_turn(calls):
        work = dist.all_reduce(array, async_op=True)
    assert work.wait()
    sums.require_exact()
    dist.destroy_process_group()


def reduce_in_two_groups_in_turn(rank: int, size: int, calls: int) -> None:
    groups = [joined_group(), dist.new_group(list(range(size)))]
    sums = Sums(rank, size)
    for array, group in zip(sums.in_turn(calls), cycle(groups), strict=False):
        dist.all_reduce(array, group=group)
    sums.require_exact()
    dist.destroy_process_group()


def play(burst: Any, size: int, setting: Mapping[str, str], calls: int = SOME) -> None:
    run(burst, size, args=(calls,), environment={"PROCGROUP_STAND_IN_GPUS": "4", **setting}, timeout=600)


@each_time
@each_setting((2, ORDINARY), (2, LATE), (2, STRICT), (2, CROWDED), (4, ORDINARY))
def test_blocking_reductions_in_a_plain_loop_are_exact(size: int, setting: str, repetition: int) -> None:
    play(reduce_in_a_loop, size, SETTINGS[setting], CALLS if size == 2 and setting == ORDINARY else SOME)


@each_setting((2, CROWDED))
def test_of_asynchronous_reductions_only_the_last_need_be_waited_for(size: int, setting: str) -> None:
    play(reduce_asynchronously, size, SETTINGS[setting])


@each_setting((2, STRICT))
def test_two_groups_may_reduce_in_turn(size: int, setting: str) -> None:
    play(reduce_in_two_groups_in_turn, size, SETTINGS[setting])


@pytest.mark.parametrize("size", [pytest.param(2, marks=pytest.mark.slow), 4])
@pytest.mark.parametrize(
    "burst",
    [
        reduce_in_a_loop,
        pytest.param(reduce_asynchronously, marks=pytest.mark.slow),
        pytest.param(reduce_in_two_groups_in_turn, marks=pytest.mark.slow),
    ],
)
def test_bursts_are_exact_where_streams_cannot_wait_for_words_of_memory(burst: Any, size: int) -> None:
    play(burst, size, NO_WORDS, FEWER)
