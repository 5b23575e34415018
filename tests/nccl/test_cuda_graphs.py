"""Collectives in CUDA graphs: captured once, when all ranks capture the same, and run by each launch of the graph.

The GPUs and NCCL are stand-ins; as the real ones, they forbid threads to ask for the end of work during a capture, and
end a communicator only when the graphs with its work are gone.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from failures.waiting_calls import ABSENT, allowance
from mpi.test_mpi_failures import error_of
from nccl import gpu_arrays
from nccl.gpu_arrays import GpuArray, captured, comes_true, held, new_stream

import procgroup as dist
from procgroup.errors import ArgumentError
from world import Outcome, attempt, run, start

if gpu_arrays.MISSING:
    pytest.skip(gpu_arrays.MISSING, allow_module_level=True)

GPUS = {"PROCGROUP_STAND_IN_GPUS": "4"}
KINDS = {
    "GPUs that run work at once": {},
    "completions that come late and many at once": {"PROCGROUP_STAND_IN_BURST_US": "2000"},
    "no stream memory operations": {"PROCGROUP_STAND_IN_NO_STREAM_MEMORY_OPERATIONS": "1"},
}
LIMIT = 1.0
REPLAYS = 20


def join(timeout: float = 60.0) -> Any:
    """Join the ranks, and let NCCL connect them: the first call cannot be captured."""
    gpu_arrays.start()
    dist.init_process_group("nccl", timeout=timeout)
    dist.all_reduce(ones(new_stream()))
    return dist.group.WORLD


def ones(stream: int, count: int = 4) -> GpuArray:
    return GpuArray.of(np.ones(count, np.float32), stream=stream)


def values(array: GpuArray) -> list[float]:
    return [float(value) for value in array.get()]


# --- what a graph does ---


def replay_each_collective(rank: int, size: int) -> None:
    join()
    stream = new_stream()
    summed, sent = ones(stream), GpuArray.of(np.full(4, rank, np.float32), stream=stream)
    gathered, row, exchanged = ones(stream, 4 * size), ones(stream), ones(stream, 2 * size)
    given = GpuArray.of(np.arange(2 * size, dtype=np.float32) + 100 * rank, stream=stream)
    apart = [ones(stream) for _ in range(size)]
    with captured(stream) as graph:
        dist.all_reduce(summed)
        dist.broadcast(sent, 0)
        dist.all_gather_single(gathered, sent)
        dist.all_gather(apart, summed)
        dist.reduce_scatter_single(row, gathered)
        dist.all_to_all_single(exchanged, given)
    assert values(summed) == [1.0] * 4, "nothing runs before the launch"
    sent.set(np.full(4, rank + 5, np.float32))
    for replay in range(1, 4):
        graph.launch(stream)
        assert values(summed) == [float(size**replay)] * 4
        assert [values(block) for block in apart] == [values(summed)] * size
    assert values(sent) == [5.0] * 4
    assert values(gathered) == [5.0] * 4 * size
    assert values(row) == [5.0 * size] * 4
    assert values(exchanged) == [100.0 * peer + 2 * rank + place for peer in range(size) for place in range(2)]
    dist.all_reduce(summed)
    assert values(summed) == [float(size**4)] * 4, "calls outside of graphs go on"
    graph.destroy()
    dist.destroy_process_group()


@pytest.mark.parametrize("kind", KINDS)
def test_each_collective_is_captured_and_runs_at_each_launch(kind: str) -> None:
    run(replay_each_collective, 2, environment={**GPUS, **KINDS[kind]})


def replay_among_calls(rank: int, size: int) -> None:
    join()
    stream = new_stream()
    array = ones(stream)
    with captured(stream) as graph:
        for _ in range(3):
            dist.all_reduce(array)
    expected = 1.0
    for number in range(REPLAYS):
        array.set(np.ones(4, np.float32))
        graph.launch(stream)
        work: Any = dist.all_reduce(array, async_op=True)
        work.wait()
        expected = float(size**4)
        if number % 5 == 0:
            assert values(array) == [expected] * 4
    assert values(array) == [expected] * 4
    graph.destroy()
    dist.destroy_process_group()


@pytest.mark.parametrize("size", [1, 4])
def test_launches_and_calls_may_follow_each_other_without_waiting(size: int) -> None:
    run(replay_among_calls, size, environment=GPUS)


def overlap_in_a_capture(rank: int, size: int) -> None:
    join()
    stream = new_stream()
    array = ones(stream)
    with captured(stream) as graph:
        work: Any = dist.all_reduce(array, async_op=True)
        work.wait()
        assert work.is_completed()
        dist.all_reduce(array)
    graph.launch(stream)
    assert values(array) == [float(size**2)] * 4
    graph.destroy()
    dist.destroy_process_group()


def test_an_asynchronous_call_is_captured_on_another_stream_and_wait_joins_it() -> None:
    run(overlap_in_a_capture, 2, environment=GPUS)


def query_while_capturing(rank: int, size: int) -> None:
    """An asynchronous call is followed by events where streams write no words: this library may ask for them."""
    join()
    stream, busy = new_stream(), new_stream()
    array, slow = ones(stream), ones(busy)
    works: list[Any] = []
    with held(busy):
        works.append(dist.all_reduce(slow, async_op=True))
        with captured(stream) as graph:
            dist.all_reduce(array)
            assert not works[0].is_completed()
            time.sleep(0.05)  # for the progress thread, which looks every millisecond
    works[0].wait()
    graph.launch(stream)
    assert values(array) == [float(size)] * 4
    graph.destroy()
    dist.destroy_process_group()


@pytest.mark.parametrize("kind", ["GPUs that run work at once", "no stream memory operations"])
def test_a_capture_is_not_disturbed_by_work_that_is_followed_meanwhile(kind: str) -> None:
    run(query_while_capturing, 2, environment={**GPUS, **KINDS[kind]})


def keep_arrays(rank: int, size: int) -> None:
    join()
    stream = new_stream()
    array = ones(stream)
    kept = weakref.ref(array)
    with captured(stream) as graph:
        dist.all_reduce(array)
    del array
    for _ in range(3):
        graph.launch(stream)
    assert kept() is not None
    graph.destroy()
    assert comes_true(lambda: kept() is None)
    dist.destroy_process_group()


def test_the_arrays_of_a_captured_call_live_as_long_as_the_graph() -> None:
    run(keep_arrays, 2, environment=GPUS)


# --- what cannot be captured is said ---


def refuse(rank: int, size: int) -> list[str]:
    gpu_arrays.start()
    dist.init_process_group("nccl")
    stream = new_stream()
    array = ones(stream)
    integers = GpuArray.of(np.ones(4, np.int16), stream=stream)
    texts = []

    def refused(call: Callable[[], Any]) -> None:
        with captured(stream), pytest.raises(ArgumentError) as caught:
            call()
        texts.append(str(caught.value))

    refused(lambda: dist.all_reduce(array))
    dist.all_reduce(array)
    refused(lambda: dist.send(array, 1 - rank) if rank == 0 else dist.recv(array, 1 - rank))
    refused(lambda: dist.all_reduce(integers))
    assert values(array) == [float(size)] * 4
    dist.destroy_process_group()
    return texts


def test_the_first_call_messages_and_staged_calls_are_refused_in_words() -> None:
    for first, message, staged in run(refuse, 2, environment=GPUS):
        assert "Make a call before the capture" in first
        assert "messages and calls that go through host memory cannot be captured" in message
        assert "messages and calls that go through host memory cannot be captured" in staged


# --- what ends a graph that cannot end ---


def fail(array: GpuArray, graph: Any, stream: int, how: Callable[[], Any]) -> SimpleNamespace:
    """Return the error of what a rank does; the stream is drained, and the process lives."""
    seen = error_of(how)
    began = time.monotonic()
    array.get()
    if graph is not None:
        graph.destroy()
    dist.destroy_process_group()
    assert time.monotonic() - began < allowance(5.0)
    return seen


def capture_on_one_rank_only(rank: int, size: int) -> SimpleNamespace:
    join()
    stream = new_stream()
    array = ones(stream)

    def differ() -> None:
        if rank == ABSENT:
            dist.all_reduce(array)
            assert comes_true(lambda: dist.all_reduce(array) is not None)
        with captured(stream):
            dist.all_reduce(array)

    return fail(array, None, stream, differ)


def test_a_rank_that_does_not_capture_what_the_others_capture_is_named_before_anything_runs() -> None:
    for seen in run(capture_on_one_rank_only, 3, environment=GPUS):
        assert seen.kind == "CollectiveMismatch"
        assert "all_reduce(SUM) of 4 float32 (captured in a CUDA graph)" in seen.text
        assert "all_reduce(SUM) of 4 float32 " in seen.text.replace(" at ", " ")


def capture_different_sizes(rank: int, size: int) -> SimpleNamespace:
    join()
    stream = new_stream()
    array = ones(stream, 4 + (rank == ABSENT))

    def differ() -> None:
        with captured(stream):
            dist.all_reduce(array)

    return fail(array, None, stream, differ)


def test_sizes_that_differ_in_a_capture_are_a_mismatch_and_the_array_is_intact() -> None:
    for seen in run(capture_different_sizes, 2, environment=GPUS):
        assert seen.kind == "CollectiveMismatch" and "5 float32" in seen.text
        assert "captured" not in seen.text, "which goes without saying"


def make_graph(timeout: float) -> tuple[GpuArray, Any, int]:
    """Return an array, and a graph that reduces it on a stream. All ranks are ready for the launch."""
    join()
    stream = new_stream()
    array = ones(stream)
    with captured(stream) as graph:
        dist.all_reduce(array, timeout=timeout)
    dist.barrier()
    return array, graph, stream


def launch_without_the_others(rank: int, size: int) -> SimpleNamespace:
    array, graph, stream = make_graph(LIMIT)
    for _ in range(REPLAYS):
        graph.launch(stream)
    array.get()
    if rank != ABSENT:
        graph.launch(stream)
    return fail(array, graph, stream, call_until_it_fails)


def call_until_it_fails() -> None:
    """Calls on the host: one of them raises what has ended the group."""
    for _ in range(10_000):
        dist.barrier()
        time.sleep(0.001)


REPLAY = "a replay of this call in a CUDA graph, which "
OTHERS = (0, 2)
NAMED: Any = {
    "texts": dict.fromkeys(OTHERS, f"does not run on rank {ABSENT}"),
    "missing": dict.fromkeys(OTHERS, (ABSENT,)),
}


def expect_timeouts(
    outcomes: list[Outcome], texts: dict[int, str], missing: dict[int, tuple[int, ...]]
) -> list[SimpleNamespace]:
    """Require the error of a replay's deadline on all ranks, and return it from those that have found it themselves.

    ``texts`` and ``missing`` are that error's, by the rank that has found it.
    """
    found = []
    for rank, outcome in enumerate(outcomes):
        seen = outcome.value
        assert seen is not None, f"{outcome.output}{outcome.traceback}"
        assert seen.kind in ("CollectiveTimeout", "PeerFailed"), seen
        finder = rank if seen.kind == "CollectiveTimeout" else seen.peer
        assert REPLAY + texts[finder] in seen.text, seen
        if finder != rank:
            continue
        assert seen.text.startswith("all_reduce #2 on group 0 "), seen
        assert seen.issued_at.startswith(f"{Path(__file__).name}:"), seen
        assert seen.missing == missing.get(rank, ()) and set(seen.calls) == set(seen.missing), seen
        found.append(seen)
    assert found, outcomes
    return found


@pytest.mark.parametrize("transport", ["auto", "spanning"])
def test_a_rank_that_does_not_launch_what_the_others_launch_is_named_at_the_deadline(transport: str) -> None:
    outcomes = attempt(launch_without_the_others, 3, environment={**GPUS, "PROCGROUP_TRANSPORT": transport})
    expect_timeouts(outcomes, **NAMED)


def launch_in_another_order(rank: int, size: int) -> SimpleNamespace:
    array, graph, stream = make_graph(LIMIT)
    other: Any = dist.new_group(list(range(size)))
    dist.all_reduce(array, group=other)
    with captured(stream) as other_graph:
        dist.all_reduce(array, group=other)
    dist.barrier()
    for one in (other_graph, graph) if rank == ABSENT else (graph, other_graph):
        one.launch(stream)

    def call() -> None:
        try:
            call_until_it_fails()
        finally:
            array.get()
            other_graph.destroy()

    return fail(array, graph, stream, call)


@pytest.mark.parametrize("transport", ["auto", "spanning"])
def test_a_rank_that_launches_another_graph_first_is_named_with_what_its_gpu_is_in(transport: str) -> None:
    outcomes = attempt(launch_in_another_order, 3, environment={**GPUS, "PROCGROUP_TRANSPORT": transport})
    for seen in expect_timeouts(outcomes, **NAMED):
        assert "; its GPU is in a replay of call #2 on group " in seen.calls[ABSENT], seen
        assert f" at {Path(__file__).name}:" in seen.calls[ABSENT].partition("its GPU")[2], seen


def launch_behind_held_work(rank: int, size: int) -> SimpleNamespace:
    array, graph, stream = make_graph(LIMIT)
    with held(stream) if rank == ABSENT else nullcontext():
        graph.launch(stream)
        seen = error_of(call_until_it_fails)
    array.get()
    graph.destroy()
    dist.destroy_process_group()
    return seen


def test_a_rank_whose_gpu_does_not_come_to_the_replay_is_named() -> None:
    outcomes = attempt(launch_behind_held_work, 3, environment=GPUS)
    expect_timeouts(outcomes, **NAMED)


def launch_all(rank: int, size: int) -> SimpleNamespace:
    array, graph, stream = make_graph(LIMIT)
    graph.launch(stream)
    return fail(array, graph, stream, call_until_it_fails)


@pytest.mark.parametrize("transport", ["auto", "spanning"])
def test_a_replay_that_all_ranks_run_names_none(transport: str) -> None:
    stuck = [{"PROCGROUP_STAND_IN_NCCL_FAIL": "allreduce:2:hang"} if rank == ABSENT else {} for rank in range(3)]
    environment = {**GPUS, "PROCGROUP_TRANSPORT": transport}
    outcomes = attempt(launch_all, 3, environment=environment, environments=stuck)
    expect_timeouts(outcomes, dict.fromkeys(range(3), "runs on all ranks"), {})


def test_a_rank_whose_launches_are_not_watched_is_not_named() -> None:
    """Its replay runs, too, which the others cannot know."""
    unwatched = {
        "PROCGROUP_STAND_IN_NO_STREAM_MEMORY_OPERATIONS": "1",
        "PROCGROUP_STAND_IN_NCCL_FAIL": "allreduce:2:hang",
    }
    environments = [unwatched if rank == ABSENT else {} for rank in range(3)]
    outcomes = attempt(launch_all, 3, environment=GPUS, environments=environments)
    expect_timeouts(outcomes, dict.fromkeys(OTHERS, "may wait for any of the other ranks"), {})


def lose_a_rank(rank: int, size: int) -> SimpleNamespace | None:
    array, graph, stream = make_graph(60.0)
    if rank == ABSENT:
        print("ready", flush=True)
        time.sleep(60)
    graph.launch(stream)
    print("ready", flush=True)
    return fail(array, graph, stream, call_until_it_fails)


def test_a_rank_that_dies_while_the_others_replay_is_named_and_the_streams_are_drained() -> None:
    with start(lose_a_rank, 3, environment=GPUS) as world:
        for rank in range(3):
            world.wait_for_output(rank, "ready")
        killed = time.monotonic()
        world.kill(ABSENT)
        outcomes: list[Outcome] = world.wait(allowance(20.0))
    for rank in (0, 2):
        assert outcomes[rank].value is not None, f"{outcomes[rank].output}{outcomes[rank].traceback}"
        seen = outcomes[rank].value
        assert (seen.kind, seen.peer) == ("PeerLost", ABSENT), seen
        assert seen.moment - killed < allowance(3.0)


def leave_with_a_graph(rank: int, size: int) -> float:
    array, graph, stream = make_graph(60.0)
    graph.launch(stream)
    array.get()
    began = time.monotonic()
    dist.destroy_process_group()
    took = time.monotonic() - began
    graph.destroy()
    return took


def test_a_group_that_is_left_while_its_graphs_exist_says_so_and_does_not_wait_for_them() -> None:
    for outcome in attempt(leave_with_a_graph, 2, environment=GPUS):
        assert outcome.value is not None and outcome.value < allowance(1.5), f"{outcome.output}{outcome.traceback}"
        assert "in CUDA graphs that still exist" in outcome.output
