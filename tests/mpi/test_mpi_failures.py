"""On backend "mpi", ranks that fail are named on all others in time, and every process ends by itself."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from failures.waiting_calls import ABSENT, allowance, perform
from seeded_cases import Case, CasePart

import procgroup as dist
from mpi_world import BACKEND, MPIS, MpiWorld, lacks, run, start
from world import Outcome, without_reports

mpis = pytest.mark.parametrize(
    "mpi", [pytest.param(mpi, marks=pytest.mark.skipif(bool(lacks(mpi)), reason=lacks(mpi))) for mpi in MPIS]
)

SIZE = 3
SURVIVORS = [rank for rank in range(SIZE) if rank != ABSENT]
LIMIT = 0.5
"""Of calls that time out."""
END = 5.0
"""Seconds within which processes end after a failure."""
LARGE = 1 << 20
"""Elements of an array whose transfer takes long enough to be hit by a signal."""


def error_of(function: Callable[[], Any]) -> SimpleNamespace:
    """Call the function; return its error as data, and when and after how long it came."""
    started = time.monotonic()
    seen = SimpleNamespace(kind="", text="no error", peer=None, missing=(), calls={})
    try:
        function()
    except dist.DistError as error:
        seen.kind, seen.text = type(error).__name__, str(error)
        vars(seen).update(
            {name: getattr(error, name) for name in ("peer", "missing", "calls", "issued_at") if hasattr(error, name)}
        )
    seen.moment = time.monotonic()
    seen.took = seen.moment - started
    return seen


def everybody() -> Any:
    """Return a new group of all ranks, for a call that is to fail."""
    return dist.new_group(list(range(dist.get_world_size())))


def add_up_large_arrays(timeout: float) -> None:
    """All-reduce without end, with a time limit for each call."""
    array = np.ones(LARGE)
    while True:
        array[:] = 1
        dist.all_reduce(array, timeout=timeout)
        assert (array == SIZE).all()
        print(".", end="", flush=True)


def expect_error(outcome: Outcome, kind: str, peer: int, since: float, seconds: float) -> None:
    assert outcome.value is not None, f"{outcome.output}{outcome.traceback}"
    seen = outcome.value
    assert (seen.kind, seen.peer) == (kind, peer), seen
    assert f"rank {peer}" in seen.text
    assert seen.moment - since < allowance(seconds), f"rank {outcome.rank} raised {seen.moment - since:.2f} s after"
    assert outcome.exit_code == 0 and not re.sub(r"^[.\w]*\n?", "", without_reports(outcome.output)), outcome.output


def moment_in(outcome: Outcome) -> float:
    """Return when a rank was about to go wrong, as it printed itself."""
    found = re.search(r"at (\S+)$", outcome.output, re.MULTILINE)
    assert found, f"{outcome.output}{outcome.traceback}"
    return float(found[1])


DIFFERENCES = {
    "operation": (Case("all_reduce", "float32", 8), Case("broadcast", "float32", 8)),
    "dtype": (Case("all_reduce", "float32", 8), Case("all_reduce", "int32", 8)),
    "shape": (Case("all_gather", "float32", 8), Case("all_gather", "float32", 9)),
    "shape of a large array": (Case("all_reduce", "float64", LARGE), Case("all_reduce", "float64", LARGE - 1)),
    "reduce op": (Case("scan", "float32", 8), Case("scan", "float32", 8, "MAX")),
    "root": (Case("reduce", "float32", 8), Case("reduce", "float32", 8, root=1)),
}


def call_differently(rank: int, size: int) -> dict[str, SimpleNamespace]:
    dist.init_process_group(BACKEND, timeout=20)
    seen = {}
    for name, cases in DIFFERENCES.items():
        group = everybody()
        part = CasePart(cases[rank == size - 1], rank, size)

        def call(part: CasePart = part, group: Any = group) -> None:
            part.start(dist, async_op=rank == 1, group=group)
            part.wait()
            dist.barrier(group)  # a rank that takes nothing in a small call learns it here

        seen[name] = error_of(call)
        assert not part.changed(), name
        seen[name].later = error_of(lambda group=group: dist.barrier(group)).kind  # type: ignore[misc]
    dist.barrier()  # the other groups go on
    dist.destroy_process_group()
    return seen


@mpis
def test_ranks_that_make_different_calls_are_named_on_all_and_no_array_changes(mpi: str) -> None:
    results = run(call_differently, SIZE, mpi=mpi)
    for name, cases in DIFFERENCES.items():
        calls = results[0][name].calls
        for seen in (result[name] for result in results):
            assert (seen.kind, seen.later) == ("CollectiveMismatch", "GroupBroken"), f"{name}: {seen}"
            assert seen.calls == calls and seen.took < allowance(1.0)
        assert sorted(calls) == [0, 1, 2] and calls[0] == calls[1] != calls[2], f"{name}: {calls}"
        for rank, case in ((0, cases[0]), (2, cases[1])):
            assert all(word in calls[rank] for word in (case.operation, case.dtype, str(case.count))), calls


def receive_another_message(rank: int, size: int) -> list[str]:
    dist.init_process_group(BACKEND, timeout=20)
    texts = []
    for dtype, count in (("float64", 4), ("int64", 3), ("float64", LARGE)):
        group = everybody()
        sent: Any = None
        if rank == 0:
            sent = dist.isend(np.ones(3), 1, group=group)
        else:
            array = np.full(count, 7, dtype)
            seen = error_of(lambda array=array, group=group: dist.recv(array, 0, group=group))  # type: ignore[misc]
            assert seen.kind == "CollectiveMismatch" and (array == 7).all(), seen
            texts.append(seen.text)
        with suppress(dist.DistError):
            if sent is not None:
                sent.wait()
        dist.barrier()
    return texts


@mpis
def test_a_message_of_another_size_or_dtype_is_refused(mpi: str) -> None:
    texts = run(receive_another_message, 2, mpi=mpi)[1]
    for text, expected in zip(texts, ("4 float64", "3 int64", f"{LARGE} float64"), strict=True):
        assert f"recv of {expected}" in text and "send of 3 float64" in text, text


WAITS = ["all_reduce", "all_reduce of a large array", "broadcast from the absent rank", "barrier", "send", "recv"]
"""Forms of calls that wait for the absent rank, of failures.waiting_calls."""


def time_out(rank: int, size: int, ended: Path) -> dict[str, SimpleNamespace] | None:
    dist.init_process_group(BACKEND, timeout=30)
    groups = [everybody() for _ in WAITS]
    dist.barrier()
    if rank == ABSENT:
        while not ended.exists():
            time.sleep(0.01)
        return None
    seen = {
        name: error_of(lambda name=name, group=group: perform(name, name == WAITS[0], group=group, timeout=LIMIT))  # type: ignore[misc]
        for name, group in zip(WAITS, groups, strict=True)
    }
    ended.touch()
    return seen


@mpis
def test_a_rank_that_does_not_come_is_named_at_the_deadline(mpi: str, tmp_path: Path) -> None:
    seen = run(time_out, 2, mpi=mpi, args=(tmp_path / "ended",))[0]
    for name, error in seen.items():
        assert (error.kind, error.missing) == ("CollectiveTimeout", (ABSENT,)), f"{name}: {error}"
        assert LIMIT - 0.01 <= error.took < LIMIT + allowance(1.0), f"{name} took {error.took:.2f} s"


def raise_on_one(rank: int, size: int) -> SimpleNamespace:
    dist.init_process_group(BACKEND, timeout=30)
    dist.barrier()
    if rank == ABSENT:
        print(f"raised at {time.monotonic()}", flush=True)
        raise ValueError("no such file")
    return error_of(lambda: perform("all_reduce", async_op=rank == 2))


@mpis
def test_an_exception_of_one_rank_is_raised_on_the_others(mpi: str) -> None:
    with start(raise_on_one, SIZE, mpi=mpi) as world:
        outcomes = world.wait(20 + END)
    raised = moment_in(outcomes[ABSENT])
    assert isinstance(outcomes[ABSENT].error, ValueError) and outcomes[ABSENT].exit_code == 1
    for rank in SURVIVORS:
        expect_error(outcomes[rank], "PeerFailed", ABSENT, raised, 2.0)
        assert "ValueError: no such file" in outcomes[rank].value.text


def end_before_the_call(rank: int, size: int, is_killed: bool) -> SimpleNamespace | None:
    dist.init_process_group(BACKEND, timeout=30)
    groups = [everybody() for _ in WAITS]
    dist.barrier()
    if rank == ABSENT:
        print(f"ended at {time.monotonic()}", flush=True)
        if is_killed:
            os.kill(os.getpid(), signal.SIGKILL)
        return None
    time.sleep(0.3)  # most often it has ended by then
    for name, group in zip(WAITS, groups, strict=True):
        seen = error_of(lambda name=name, group=group: perform(name, group=group))  # type: ignore[misc]
        assert (seen.kind, seen.peer) == ("PeerLost", ABSENT), f"{name}: {seen}"
    return error_of(lambda: perform("all_reduce", async_op=rank == 2))


@mpis
@pytest.mark.parametrize("is_killed", [True, False], ids=["killed", "ended in order"])
def test_a_rank_that_ended_before_the_call_is_named_in_every_operation(mpi: str, is_killed: bool) -> None:
    with start(end_before_the_call, SIZE, mpi=mpi, args=(is_killed,)) as world:
        outcomes = world.wait(20 + END)
    assert outcomes[ABSENT].exit_code == (-signal.SIGKILL if is_killed else 0)
    for rank in SURVIVORS:
        expect_error(outcomes[rank], "PeerLost", ABSENT, moment_in(outcomes[ABSENT]), 0.3 + 2.0)


def wait_for_a_rank(rank: int, size: int, operation: str) -> SimpleNamespace:
    dist.init_process_group(BACKEND, timeout=30)
    dist.barrier()
    if rank == ABSENT:
        time.sleep(60)
    print("waiting", flush=True)
    return error_of(lambda: perform(operation, async_op=rank == 2))


def kill_in_a_call(world: MpiWorld, waits_for: str) -> tuple[float, list[Outcome]]:
    """Kill the absent rank when the others are in their call; return when, and the outcomes."""
    for rank in SURVIVORS:
        world.wait_for_output(rank, waits_for)
    time.sleep(0.2)  # most often they are in the call by then; they fail in the same way if not
    killed = time.monotonic()
    world.kill(ABSENT)
    return killed, world.wait(allowance(2.0 + END))


@mpis
@pytest.mark.parametrize("operation", ["all_reduce", "recv", "send"])
def test_a_rank_that_is_killed_during_a_call_is_named_on_the_others(mpi: str, operation: str) -> None:
    with start(wait_for_a_rank, SIZE, mpi=mpi, args=(operation,)) as world:
        killed, outcomes = kill_in_a_call(world, "waiting")
    for rank in SURVIVORS:
        expect_error(outcomes[rank], "PeerLost", ABSENT, killed, 2.0)


def stream(rank: int, size: int, timeout: float) -> SimpleNamespace:
    dist.init_process_group(BACKEND, timeout=30)
    return error_of(lambda: add_up_large_arrays(timeout))


@mpis
@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_a_rank_that_is_killed_amid_transfers_is_named_on_the_others(mpi: str, transport: str) -> None:
    with start(stream, SIZE, mpi=mpi, args=(30,), environment={"PROCGROUP_TRANSPORT": transport}) as world:
        killed, outcomes = kill_in_a_call(world, "...")
    for rank in SURVIVORS:
        expect_error(outcomes[rank], "PeerLost", ABSENT, killed, 2.0)


def send_large_arrays(rank: int, size: int, timeout: float) -> SimpleNamespace:
    """Send arrays from the absent rank to the others without end, each with other numbers."""
    dist.init_process_group(BACKEND, timeout=30)
    array = np.zeros(LARGE)

    def pass_on() -> None:
        for number in range(1_000_000):
            if rank == ABSENT:
                array[:] = number
                for to in SURVIVORS:
                    dist.send(array, to, timeout=timeout)
            else:
                dist.recv(array, ABSENT, timeout=timeout)
                assert (array == number).all()
                print(".", end="", flush=True)

    return error_of(pass_on)


@mpis
def test_a_rank_that_is_killed_amid_messages_is_named_on_the_others(mpi: str) -> None:
    with start(send_large_arrays, SIZE, mpi=mpi, args=(30,)) as world:
        killed, outcomes = kill_in_a_call(world, "...")
    for rank in SURVIVORS:
        expect_error(outcomes[rank], "PeerLost", ABSENT, killed, 2.0)


def keep_many_calls_outstanding(rank: int, size: int) -> SimpleNamespace:
    dist.init_process_group(BACKEND, timeout=30)
    dist.barrier()
    if rank == ABSENT:
        time.sleep(60)
    works: list[Any] = [dist.all_reduce(np.ones(100), async_op=True) for _ in range(30)]
    futures = [work.get_future() for work in works]
    print("waiting", flush=True)
    first, *rest = [error_of(work.wait) for work in works]
    assert {seen.kind for seen in rest} <= {"PeerLost", "GroupBroken"}
    assert all(work.is_completed() and not work.is_success() for work in works)
    assert all(isinstance(future.exception(5), dist.DistError) for future in futures)
    dist.destroy_process_group()
    return first


@mpis
def test_all_outstanding_works_fail_with_the_rank(mpi: str) -> None:
    with start(keep_many_calls_outstanding, SIZE, mpi=mpi) as world:
        killed, outcomes = kill_in_a_call(world, "waiting")
    for rank in SURVIVORS:
        expect_error(outcomes[rank], "PeerLost", ABSENT, killed, 2.0)


def stop_before_the_call(rank: int, size: int, timeout: float) -> SimpleNamespace:
    dist.init_process_group(BACKEND, timeout=30)
    dist.barrier()
    if rank == ABSENT:
        os.kill(os.getpid(), signal.SIGSTOP)
    return error_of(lambda: perform("all_reduce", timeout=timeout))


def end_without_the_stopped_rank(world: MpiWorld, timeout: float) -> list[SimpleNamespace]:
    """Wait for the end of the others, then kill the stopped rank; return the errors of the others."""
    world.wait_for_end(SURVIVORS, allowance(timeout + 1.0 + END))
    world.kill(ABSENT)
    outcomes = world.wait(END)
    assert all(outcomes[rank].ok for rank in SURVIVORS), outcomes
    seen = [outcomes[rank].value for rank in SURVIVORS]
    kinds = {error.kind for error in seen}
    assert "CollectiveTimeout" in kinds and kinds <= {"CollectiveTimeout", "PeerFailed"}, seen
    return seen


@mpis
def test_a_rank_that_is_stopped_is_named_at_the_deadline_and_the_others_end_without_it(mpi: str) -> None:
    with start(stop_before_the_call, SIZE, mpi=mpi, args=(1.0,)) as world:
        for error in end_without_the_stopped_rank(world, 1.0):
            assert error.took < 1.0 + allowance(1.0), error
            if error.kind == "CollectiveTimeout":
                assert error.took > 1.0 - 0.1 and error.missing == (ABSENT,), error
            else:  # it came later than the other one, which notified it
                assert f"rank {ABSENT}" in error.text, error


@mpis
def test_transfers_with_a_rank_that_is_stopped_end_at_the_deadline(mpi: str) -> None:
    timeout = 4.0
    with start(stream, SIZE, mpi=mpi, args=(timeout,)) as world:
        for rank in range(SIZE):
            world.wait_for_output(rank, "...")
        stopped = time.monotonic()
        world.kill(ABSENT, signal.SIGSTOP)
        for error in end_without_the_stopped_rank(world, timeout):
            assert 0 < error.moment - stopped < timeout + allowance(1.0), error  # the call began before the stop


def be_interrupted(rank: int, size: int, ended: Path) -> SimpleNamespace | None:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    dist.init_process_group(BACKEND, timeout=30)
    dist.barrier()
    if rank == ABSENT:
        while not ended.exists():
            time.sleep(0.01)
        return None
    try:
        print("waiting", flush=True)
        return error_of(lambda: perform("all_reduce"))
    except KeyboardInterrupt:
        print(f"interrupted at {time.monotonic()}", flush=True)
        raise
    finally:
        if rank == 2:
            ended.touch()


@mpis
def test_ctrl_c_in_a_call_ends_the_rank_and_the_others_are_notified(mpi: str, tmp_path: Path) -> None:
    with start(be_interrupted, SIZE, mpi=mpi, args=(tmp_path / "ended",)) as world:
        for rank in SURVIVORS:
            world.wait_for_output(rank, "waiting")
        world.wait_until_asleep(0)
        sent = time.monotonic()
        world.kill(0, signal.SIGINT)
        outcomes = world.wait(allowance(2.0 + END))
    assert isinstance(outcomes[0].error, KeyboardInterrupt), outcomes[0]
    assert moment_in(outcomes[0]) - sent < allowance(1.0)
    expect_error(outcomes[2], "PeerFailed", 0, sent, 2.0)
    assert re.search("KeyboardInterrupt|interrupted by a signal", outcomes[2].value.text), outcomes[2].value
