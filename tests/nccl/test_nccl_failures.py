"""On backend "nccl", ranks and GPUs that fail are named on all ranks in time, and every process ends by itself.

Whether the ranks agree on a call, and who is lost, is found by procgroup; the GPUs and NCCL are stand-ins.
"""

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
from failures.waiting_calls import ABSENT, allowance
from mpi.test_mpi_failures import error_of, everybody, moment_in
from nccl import gpu_arrays
from nccl.gpu_arrays import GpuArray, comes_true, held, new_stream
from nccl.gpu_parts import GpuPart, case_of
from seeded_cases import Case

import procgroup as dist
from waiting import Meeting, wait_until, wait_until_in_a_call
from world import Outcome, attempt, run, start, without_reports

if gpu_arrays.MISSING:
    pytest.skip(gpu_arrays.MISSING, allow_module_level=True)

SIZE = 3
SURVIVORS = [rank for rank in range(SIZE) if rank != ABSENT]
GPUS = {"PROCGROUP_STAND_IN_GPUS": "4"}
LIMIT = 0.5
"""Seconds after which calls time out."""
END = 5.0
"""Seconds within which a group is destroyed, and processes end, after a failure."""


def join(gpu: int | None = None, **how: Any) -> None:
    gpu_arrays.start(gpu)
    dist.init_process_group("nccl", **{"timeout": 20, **how})


def ones(count: int = 8, **how: Any) -> GpuArray:
    return GpuArray.of(np.ones(count), **how)


def failing(rank: int, requests: str, size: int = SIZE) -> list[dict[str, str]]:
    """Return the environments of a world in which NCCL fails on one rank."""
    return [{**GPUS, **({"PROCGROUP_STAND_IN_NCCL_FAIL": requests} if place == rank else {})} for place in range(size)]


def all_reduce(rank: int, **how: Any) -> None:
    """Make one call and wait for its end: blocking or asynchronous, by the rank."""
    work: Any = dist.all_reduce(ones(), async_op=rank == 2, **how)
    if work is not None:
        work.wait()


def failure_of(call: Callable[[], Any], group: Any = None) -> SimpleNamespace:
    """Make a call; return its error, which a call that waits for no other rank leaves to the group's next call."""

    def call_and_another() -> None:
        call()
        dist.barrier(group)

    return error_of(call_and_another)


def first_error(group: Any = None) -> SimpleNamespace:
    """Make calls on a group until one fails; return its error."""

    def call_again_and_again() -> None:
        for _ in range(10_000):
            dist.barrier(group)
            time.sleep(0.001)

    return error_of(call_again_and_again)


def end_in_time(array: GpuArray | None = None) -> None:
    """Require that the GPU's work ends, and that the groups can be destroyed, soon after a failure."""
    started = time.monotonic()
    if array is not None:
        array.get()
    dist.destroy_process_group()
    assert time.monotonic() - started < allowance(END)


def expect_quiet(outcome: Outcome) -> None:
    """Require that a rank has ended with status 0, and has printed nothing but what its function prints."""
    printed = re.sub(r"^(queued|waiting|\.+|\w+ at \S+)\n?", "", without_reports(outcome.output), flags=re.MULTILINE)
    assert outcome.exit_code == 0 and not printed, f"{outcome.output}{outcome.traceback}"


def expect_error(outcome: Outcome, kind: str, peer: int, since: float, seconds: float = 2.0) -> None:
    assert outcome.value is not None, f"{outcome.output}{outcome.traceback}"
    seen = outcome.value
    assert (seen.kind, seen.peer) == (kind, peer), seen
    assert f"rank {peer}" in seen.text
    assert seen.moment - since < allowance(seconds), f"rank {outcome.rank} raised {seen.moment - since:.2f} s after"
    expect_quiet(outcome)


def kill_in_a_call(world: Any, waits_for: str) -> tuple[float, list[Outcome]]:
    """Kill the absent rank when the others have printed a word; return when, and the outcomes."""
    for rank in SURVIVORS:
        world.wait_for_output(rank, waits_for)
    if waits_for == "waiting":
        wait_until_in_a_call(world.pids[rank] for rank in SURVIVORS)
    killed = time.monotonic()
    world.kill(ABSENT)
    return killed, world.wait(allowance(2.0 + 2 * END))


# --- the ranks make different calls ---

DIFFERENCES = {
    "operation": (case_of("all_reduce", "float32", 8), case_of("broadcast", "float32", 8)),
    "dtype": (case_of("all_reduce", "float32", 8), case_of("all_reduce", "int32", 8)),
    "shape": (case_of("all_gather", "float32", 8), case_of("all_gather", "float32", 9)),
    "reduce op": (case_of("all_reduce", "float32", 8), case_of("all_reduce", "float32", 8, "MAX")),
    "root": (case_of("reduce", "float32", 8), case_of("reduce", "float32", 8, root=1)),
}


def call_differently(rank: int, size: int, is_connected: bool) -> dict[str, SimpleNamespace]:
    join()
    seen = {}
    for name, cases in DIFFERENCES.items():
        group = everybody()
        if is_connected:
            dist.all_reduce(ones(), group=group)
        part = GpuPart(cases[rank == size - 1], rank, size)

        def call(part: GpuPart = part, group: Any = group) -> None:
            part.start(dist, async_op=rank == 1, group=group)
            part.wait()

        seen[name] = failure_of(call, group)
        assert not part.changed(), name
        seen[name].later = error_of(lambda group=group: dist.all_reduce(ones(), group=group)).kind  # type: ignore[misc]
    total = ones()
    dist.all_reduce(total)  # the other groups go on
    assert (total.get() == size).all()
    end_in_time()
    return seen


def has_words(call: str, case: Case) -> bool:
    return all(word in call for word in (case.operation, case.dtype, str(case.count)))


@pytest.mark.parametrize("is_connected", [False, True], ids=["in the first call", "later"])
def test_ranks_that_make_different_calls_are_named_on_all_and_no_array_changes(is_connected: bool) -> None:
    results = run(call_differently, SIZE, args=(is_connected,), environment=GPUS)
    for name, cases in DIFFERENCES.items():
        calls = results[0][name].calls
        for seen in (result[name] for result in results):
            assert (seen.kind, seen.later) == ("CollectiveMismatch", "GroupBroken"), f"{name}: {seen}"
            assert seen.calls == calls and seen.took < allowance(1.0)
        assert sorted(calls) == [0, 1, 2] and calls[0] == calls[1] != calls[2], f"{name}: {calls}"
        assert has_words(calls[0], cases[0]) and has_words(calls[2], cases[1]), calls


def use_memory_of_the_other_kind(rank: int, size: int) -> list[str]:
    join()
    texts = []
    for name in ("all_reduce", "broadcast"):
        group = everybody()
        on_cpu, on_gpu = np.full(8, 7.0), GpuArray.of(np.full(8, 7.0))
        array = on_cpu if rank == 1 else on_gpu
        arguments = (array,) if name == "all_reduce" else (array, 0)
        seen = error_of(
            lambda name=name, arguments=arguments, group=group: getattr(dist, name)(*arguments, group=group)
        )  # type: ignore[misc]
        assert seen.kind == "CollectiveMismatch", seen
        assert (on_cpu == 7).all() and (on_gpu.get() == 7).all()
        texts.append(seen.text)
    return texts


def test_a_rank_with_an_array_on_the_cpu_among_arrays_on_gpus_is_a_mismatch_that_says_so() -> None:
    for texts in run(use_memory_of_the_other_kind, SIZE, environment=GPUS):
        for text in texts:
            assert re.search("(?i)cpu", text) and re.search("(?i)cuda|gpu", text), text


def receive_another_message(rank: int, size: int) -> list[str]:
    join()
    texts = []
    for dtype, count in (("float64", 4), ("int64", 3)):
        group = everybody()
        sent: Any = None
        if rank == 0:
            sent = dist.isend(ones(3), 1, group=group)
        else:
            array = GpuArray.of(np.full(count, 7, dtype))
            seen = error_of(lambda array=array, group=group: dist.recv(array, 0, group=group))  # type: ignore[misc]
            assert seen.kind == "CollectiveMismatch" and (array.get() == 7).all(), seen
            texts.append(seen.text)
        with suppress(dist.DistError):
            if sent is not None:
                sent.wait()
        dist.barrier()
    return texts


def test_a_message_of_another_size_or_dtype_is_refused() -> None:
    texts = run(receive_another_message, 2, environment=GPUS)[1]
    for text, expected in zip(texts, ("4 float64", "3 int64"), strict=True):
        assert f"recv of {expected}" in text and "send of 3 float64" in text, text


def call_on_the_wrong_device(rank: int, size: int) -> str:
    """Let only rank 0 use another GPU; nothing is sent, so that the group can still be used."""
    join()
    dist.all_reduce(ones())
    text = ""
    if rank == 0:
        for call in (dist.all_reduce, lambda array: dist.send(array, 1)):
            array = ones(device=3)
            with pytest.raises((dist.ArgumentError, dist.DistBackendError)) as caught:
                call(array)
            assert (array.get() == 1).all()
            text += str(caught.value).replace("\n", " ") + "\n"
    total = ones()
    dist.all_reduce(total)
    assert (total.get() == size).all()
    return text


def test_a_call_on_another_gpu_than_the_first_one_names_both() -> None:
    for line in run(call_on_the_wrong_device, 2, environment=GPUS)[0].splitlines():
        assert {"0", "3"} <= set(re.findall(r"\d+", line)) and re.search("(?i)cuda|gpu", line), line


def share_a_gpu(rank: int, size: int, is_eager: bool) -> str:
    gpu = (0, 1, 0)[rank]
    gpu_arrays.start(gpu)
    try:
        dist.init_process_group("nccl", timeout=20, device_id=gpu if is_eager else None)
        dist.all_reduce(ones())
    except dist.DistBackendError as error:
        return str(error)
    total = ones()
    dist.all_reduce(total)
    assert (total.get() == size).all()
    return "connected"


@pytest.mark.parametrize("is_eager", [False, True], ids=["lazily", "eagerly"])
def test_two_ranks_on_one_gpu_are_refused_on_all_ranks_with_the_variable_that_allows_it(is_eager: bool) -> None:
    for outcome in attempt(share_a_gpu, SIZE, args=(is_eager,), environment=GPUS):
        assert outcome.ok, outcome
        assert re.search(r"ranks? 0\b.*\b2\b", outcome.value), outcome.value
        assert "NCCL_MULTI_RANK_GPU_ENABLE" in outcome.value


def test_two_ranks_on_one_gpu_are_allowed_by_nccl_s_variable_or_on_two_hosts() -> None:
    variables = {**GPUS, "NCCL_MULTI_RANK_GPU_ENABLE": "1"}
    assert run(share_a_gpu, SIZE, args=(False,), environment=variables) == ["connected"] * SIZE
    hosts = [{**GPUS, "NCCL_HOSTID": host, "PROCGROUP_HOST_ID": host} for host in "112"]
    assert run(share_a_gpu, SIZE, args=(False,), environments=hosts) == ["connected"] * SIZE


# --- ranks that do not come, raise or die ---

WAITS: dict[str, Callable[..., Any]] = {
    "all_reduce": lambda **how: dist.all_reduce(ones(), **how),
    "asynchronous all_reduce": lambda **how: dist.all_reduce(ones(), async_op=True, **how).wait(),  # type: ignore[union-attr]
    "broadcast from the absent rank": lambda **how: dist.broadcast(ones(), ABSENT, **how),
    "all_gather_single": lambda **how: dist.all_gather_single(ones(8 * dist.get_world_size()), ones(), **how),
    "send": lambda **how: dist.send(ones(), ABSENT, **how),
    "recv": lambda **how: dist.recv(ones(), ABSENT, **how),
    "irecv": lambda **how: dist.irecv(ones(), ABSENT, **how).wait(),
    "barrier": lambda **how: dist.barrier(**how),
}
"""Calls that wait for the absent rank."""


def time_out(rank: int, size: int, ended: Path) -> dict[str, SimpleNamespace] | None:
    join()
    groups = [everybody() for _ in WAITS]
    dist.all_reduce(ones(), group=groups[1])  # one of them has a communicator
    dist.barrier()
    if rank == ABSENT:
        while not ended.exists():
            time.sleep(0.01)
        return None
    seen = {
        name: failure_of(lambda call=call, group=group: call(group=group, timeout=LIMIT), group)  # type: ignore[misc]
        for (name, call), group in zip(WAITS.items(), groups, strict=True)
    }
    ended.touch()
    return seen


def test_a_rank_that_does_not_come_is_named_at_the_deadline(tmp_path: Path) -> None:
    seen = run(time_out, 2, args=(tmp_path / "ended",), environment=GPUS)[0]
    for name, error in seen.items():
        assert (error.kind, error.missing) == ("CollectiveTimeout", (ABSENT,)), f"{name}: {error}"
        assert LIMIT - 0.01 <= error.took < LIMIT + allowance(1.0), f"{name} took {error.took:.2f} s"


def raise_on_one(rank: int, size: int) -> SimpleNamespace:
    join()
    all_reduce(rank)
    dist.barrier()
    if rank == ABSENT:
        print(f"raised at {time.monotonic()}", flush=True)
        try:
            raise ValueError("no such file")
        finally:
            dist.destroy_process_group()
    return failure_of(lambda: all_reduce(rank))


def test_an_exception_of_one_rank_is_raised_on_the_others() -> None:
    outcomes = attempt(raise_on_one, SIZE, environment=GPUS)
    raised = moment_in(outcomes[ABSENT])
    assert isinstance(outcomes[ABSENT].error, ValueError) and outcomes[ABSENT].exit_code == 1
    for rank in SURVIVORS:
        expect_error(outcomes[rank], "PeerFailed", ABSENT, raised)
        assert "ValueError: no such file" in outcomes[rank].value.text


def end_before_the_call(rank: int, size: int, meeting: Meeting, is_killed: bool) -> SimpleNamespace | None:
    join()
    groups = [everybody() for _ in WAITS]
    for group in groups[:2]:
        dist.all_reduce(ones(), group=group)
    dist.barrier()
    if rank == ABSENT:
        print(f"ended at {time.monotonic()}", flush=True)
        meeting.reach("end")
        if is_killed:
            os.kill(os.getpid(), signal.SIGKILL)
        return None
    meeting.wait_until_collected("end")
    for (name, call), group in zip(WAITS.items(), groups, strict=True):
        seen = failure_of(lambda call=call, group=group: call(group=group), group)  # type: ignore[misc]
        assert (seen.kind, seen.peer) == ("PeerLost", ABSENT), f"{name}: {seen}"
    seen = failure_of(lambda: all_reduce(rank))
    end_in_time()
    return seen


@pytest.mark.parametrize("is_killed", [True, False], ids=["killed", "ended in order"])
def test_a_rank_that_ended_before_the_call_is_named_in_every_operation(tmp_path: Path, is_killed: bool) -> None:
    outcomes = attempt(end_before_the_call, SIZE, args=(Meeting(tmp_path), is_killed), environment=GPUS)
    assert outcomes[ABSENT].exit_code == (-signal.SIGKILL if is_killed else 0)
    for rank in SURVIVORS:
        expect_error(outcomes[rank], "PeerLost", ABSENT, moment_in(outcomes[ABSENT]), 0.3 + 2.0)


def wait_for_a_rank(rank: int, size: int, name: str) -> SimpleNamespace:
    join()
    dist.barrier()
    if rank == ABSENT:
        time.sleep(60)
    print("waiting", flush=True)
    return failure_of(WAITS[name])


@pytest.mark.parametrize("name", ["all_reduce", "asynchronous all_reduce", "recv", "send"])
def test_a_rank_that_is_killed_while_the_others_wait_for_it_is_named(name: str) -> None:
    with start(wait_for_a_rank, SIZE, args=(name,), environment=GPUS) as world:
        killed, outcomes = kill_in_a_call(world, "waiting")
    for rank in SURVIVORS:
        expect_error(outcomes[rank], "PeerLost", ABSENT, killed)


def poll_exception(work: Any) -> None:
    assert comes_true(lambda: work.exception() is not None)
    assert work.is_completed() and not work.is_success()
    raise work.exception()


def poll_is_completed(work: Any) -> None:
    assert comes_true(work.is_completed)
    raise work.exception()


def reduce_until_one_fails() -> None:
    """A call that is queued behind its gate has returned before anybody knows that the rank is lost."""
    assert comes_true(lambda: dist.all_reduce(ones()) is not None)


WAYS: dict[str, Callable[[Any], Any]] = {
    "the next calls": lambda work: reduce_until_one_fails(),
    "the next calls after wait": lambda work: (work.wait(), reduce_until_one_fails()),
    "exception()": poll_exception,
    "is_completed()": poll_is_completed,
    "the future": lambda work: work.get_future().result(40),
}
"""How a rank finds that work which NCCL has begun, or is about to begin, cannot end."""


def lose_a_rank_on_the_gpu(rank: int, size: int, way: str) -> SimpleNamespace | None:
    join()
    array = ones(stream=new_stream())
    work: Any = dist.all_reduce(array, async_op=True)  # never ends on the absent rank's GPU, and so on no other
    work.wait()
    print("queued", flush=True)
    if rank == ABSENT:
        time.sleep(60)
    seen = error_of(lambda: WAYS[way](work))
    end_in_time(array)
    return seen


@pytest.mark.parametrize("way", WAYS)
def test_a_rank_that_is_killed_while_gpus_work_is_named_by_whatever_comes_next(way: str) -> None:
    environments = failing(ABSENT, "allreduce:1:hang")
    with start(lose_a_rank_on_the_gpu, SIZE, args=(way,), environments=environments) as world:
        killed, outcomes = kill_in_a_call(world, "queued")
    for rank in SURVIVORS:
        seen = outcomes[rank].value
        if (
            seen is not None and seen.kind == "GroupBroken"
        ):  # the first of the next calls came after the end of the group
            assert way.startswith("the next calls") and f"lost rank {ABSENT}" in seen.text, seen
            continue
        expect_error(outcomes[rank], "PeerLost", ABSENT, killed)


def stream_arrays(rank: int, size: int) -> SimpleNamespace:
    join()
    array = ones(100_000, stream=new_stream())

    def reduce_without_end() -> None:
        while True:
            dist.all_reduce(array)
            print(".", end="", flush=True)
            array.get()  # ends, too, when the rank is lost

    return error_of(reduce_without_end)


def test_a_rank_that_is_killed_amid_transfers_is_named_on_the_others() -> None:
    with start(stream_arrays, SIZE, environment={**GPUS, "PROCGROUP_STAND_IN_DELAY_US": "5000"}) as world:
        killed, outcomes = kill_in_a_call(world, "...")
    for rank in SURVIVORS:
        expect_error(outcomes[rank], "PeerLost", ABSENT, killed)


def keep_many_calls_outstanding(rank: int, size: int) -> SimpleNamespace:
    join()
    dist.barrier()
    if rank == ABSENT:
        time.sleep(60)
    works: list[Any] = [dist.all_reduce(ones(100), async_op=True) for _ in range(30)]
    futures = [work.get_future() for work in works]
    print("waiting", flush=True)
    first, *rest = [error_of(work.wait) for work in works]
    assert {seen.kind for seen in rest} <= {"PeerLost", "GroupBroken"}
    assert all(work.is_completed() and not work.is_success() for work in works)
    assert all(isinstance(future.exception(40), dist.DistError) for future in futures)
    end_in_time()
    return first


def test_all_outstanding_works_fail_with_the_rank() -> None:
    with start(keep_many_calls_outstanding, SIZE, environment=GPUS) as world:
        killed, outcomes = kill_in_a_call(world, "waiting")
    for rank in SURVIVORS:
        expect_error(outcomes[rank], "PeerLost", ABSENT, killed)


def keep_a_subgroup(rank: int, size: int) -> bool:
    join()
    pair: Any = dist.new_group(SURVIVORS)
    dist.all_reduce(ones())
    print("queued", flush=True)
    if rank == ABSENT:
        time.sleep(60)
    assert failure_of(lambda: dist.all_reduce(ones())).kind == "PeerLost"
    total = ones()
    dist.all_reduce(total, group=pair)
    assert (total.get() == len(SURVIVORS)).all()
    end_in_time()
    return True


def test_a_group_without_the_lost_rank_goes_on() -> None:
    with start(keep_a_subgroup, SIZE, environment=GPUS) as world:
        _, outcomes = kill_in_a_call(world, "queued")
    for rank in SURVIVORS:
        assert outcomes[rank].value, f"{outcomes[rank].output}{outcomes[rank].traceback}"
        expect_quiet(outcomes[rank])


def fail_behind_work_on_the_gpu(rank: int, size: int, ended: Path) -> SimpleNamespace | None:
    join()
    array = ones()
    dist.all_reduce(array)
    dist.barrier()
    dist.all_reduce(array)
    if rank == ABSENT:
        wait_until(lambda: len(list(ended.iterdir())) == len(SURVIVORS))
        return None
    seen = error_of(lambda: dist.all_reduce(np.ones(4), timeout=LIMIT if rank == SURVIVORS[0] else None))
    dist.destroy_process_group()
    (ended / str(rank)).touch()
    return seen


def test_the_error_of_a_call_whose_work_goes_on_never_says_that_its_array_is_intact(tmp_path: Path) -> None:
    """The failure is that of a later call, which has written nothing."""
    outcomes = attempt(
        fail_behind_work_on_the_gpu, SIZE, args=(tmp_path,), environments=failing(ABSENT, "allreduce:2:hang")
    )
    assert outcomes[SURVIVORS[0]].value.kind == "CollectiveTimeout", outcomes
    seen = outcomes[SURVIVORS[1]].value
    assert seen.kind == "PeerFailed", seen
    is_of_later = seen.text.startswith("all_reduce #4 ")  # the work on the GPU had ended with its group
    assert is_of_later or (seen.text.startswith("all_reduce #3 ") and "No array was changed" not in seen.text), seen


def be_interrupted(rank: int, size: int, ended: Path) -> SimpleNamespace | None:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    join()
    dist.barrier()
    if rank == ABSENT:
        while not ended.exists():
            time.sleep(0.01)
        return None
    try:
        print("waiting", flush=True)
        return failure_of(lambda: dist.all_reduce(ones()))
    except KeyboardInterrupt:
        print(f"interrupted at {time.monotonic()}", flush=True)
        raise
    finally:
        if rank == 2:
            ended.touch()


def test_ctrl_c_in_a_call_ends_the_rank_and_the_others_are_notified(tmp_path: Path) -> None:
    with start(be_interrupted, SIZE, args=(tmp_path / "ended",), environment=GPUS) as world:
        for rank in SURVIVORS:
            world.wait_for_output(rank, "waiting")
        wait_until_in_a_call(world.pids[rank] for rank in SURVIVORS)
        sent = time.monotonic()
        world.kill(0, signal.SIGINT)
        outcomes = world.wait(allowance(2.0 + END))
    assert isinstance(outcomes[0].error, KeyboardInterrupt), outcomes[0]
    assert moment_in(outcomes[0]) - sent < allowance(1.0)
    expect_error(outcomes[2], "PeerFailed", 0, sent)


# --- NCCL and GPUs that fail ---


def fail_in_nccl(rank: int, size: int, is_async: bool) -> SimpleNamespace:
    join()
    array = ones(stream=new_stream())
    works: list[Any] = []
    seen = error_of(lambda: works.append(dist.all_reduce(array, async_op=is_async)))
    if not seen.kind:
        seen = error_of(works[0].get_future().wait) if is_async else first_error()
    seen.later = error_of(lambda: dist.all_reduce(ones())).kind
    end_in_time(array)
    return seen


NCCL_ERRORS = {
    "allreduce:1:system": "AllReduce failed on request",
    "allreduce:1:call-internal": "allreduce failed on request",
    "init:1:call-system": "init failed on request",
    "init:1:internal": "failed on request",
}
"""Requests of errors, and NCCL's texts."""


@pytest.mark.parametrize("is_async", [False, True], ids=["blocking", "async"])
@pytest.mark.parametrize("request_", NCCL_ERRORS)
def test_an_error_of_nccl_ends_the_group_on_all_ranks_and_has_nccl_s_text(request_: str, is_async: bool) -> None:
    outcomes = attempt(fail_in_nccl, 2, args=(is_async,), environments=failing(1, request_, 2))
    for rank, outcome in enumerate(outcomes):
        assert outcome.value is not None, f"{outcome.output}{outcome.traceback}"
        seen = outcome.value
        assert seen.later == "GroupBroken", seen
        if rank == 1:
            assert NCCL_ERRORS[request_] in seen.text, seen
        else:
            assert seen.kind in ("PeerFailed", "GroupBroken") and "rank 1" in seen.text, seen
        expect_quiet(outcome)


def hang_on_the_gpu(rank: int, size: int, is_async: bool) -> SimpleNamespace:
    join()
    dist.all_reduce(ones())
    array = ones(stream=new_stream())
    began = time.monotonic()
    work: Any = dist.all_reduce(array, async_op=is_async, timeout=6 * LIMIT)
    if is_async:
        work.wait()
    assert time.monotonic() - began < 6 * LIMIT, "the host has waited for the GPU"
    seen = error_of(work.get_future().wait) if is_async else first_error()
    seen.took = seen.moment - began
    seen.later = error_of(lambda: dist.all_reduce(ones())).kind
    end_in_time(array)
    return seen


@pytest.mark.parametrize("is_async", [False, True], ids=["blocking", "async"])
def test_a_gpu_that_never_finishes_is_a_timeout_of_its_call(is_async: bool) -> None:
    outcomes = attempt(hang_on_the_gpu, 2, args=(is_async,), environments=failing(1, "allreduce:2:hang", 2))
    seen = [outcome.value for outcome in outcomes]
    assert all(error is not None for error in seen), outcomes
    kinds = {error.kind for error in seen}
    assert "CollectiveTimeout" in kinds and kinds <= {"CollectiveTimeout", "PeerFailed"}, seen
    for error, outcome in zip(seen, outcomes, strict=True):
        assert 6 * LIMIT - 0.01 <= error.took < 6 * LIMIT + allowance(1.0), error
        assert error.later == "GroupBroken"
        expect_quiet(outcome)


def hang_in_the_start_of_nccl(rank: int, size: int) -> SimpleNamespace:
    join()
    seen = failure_of(lambda: dist.all_reduce(ones(), timeout=2 * LIMIT))
    end_in_time()
    return seen


def test_a_communicator_that_is_never_made_is_a_timeout_of_the_first_call() -> None:
    outcomes = attempt(hang_in_the_start_of_nccl, 2, environments=failing(1, "init:1:hang", 2))
    kinds = {outcome.value.kind if outcome.value else outcome.traceback for outcome in outcomes}
    assert "CollectiveTimeout" in kinds and kinds <= {"CollectiveTimeout", "PeerFailed"}, outcomes
    for outcome in outcomes:
        assert outcome.value.took < 2 * LIMIT + allowance(1.0)
        expect_quiet(outcome)


def fail_in_one_group_after_the_other(rank: int, size: int) -> list[SimpleNamespace]:
    join()
    groups = [everybody(), everybody()]
    for group in groups:
        dist.all_reduce(ones(), group=group)
        dist.barrier(group)
    arrays = [ones(stream=new_stream()) for _ in groups]
    works: list[Any] = [
        dist.all_reduce(array, group=group, async_op=True, timeout=limit)
        for array, group, limit in zip(arrays, groups, (LIMIT, 3 * LIMIT), strict=True)
    ]
    seen = [error_of(work.get_future().wait) for work in works]
    for array in arrays:
        array.get()
    end_in_time()
    return seen


def test_a_group_fails_in_time_while_another_one_s_communicators_wait_for_its_work() -> None:
    """What frees the first one's memory waits for all work on the GPU, and other threads' calls wait for that."""
    environments = failing(1, "allreduce:3:hang,allreduce:4:hang", 2)
    blocking = {"PROCGROUP_STAND_IN_FREES_BLOCK": "1"}
    for outcome in attempt(fail_in_one_group_after_the_other, 2, environment=blocking, environments=environments):
        assert outcome.value is not None, f"{outcome.output}{outcome.traceback}"
        for seen in outcome.value:
            assert seen.kind in ("CollectiveTimeout", "PeerFailed"), seen
        assert outcome.value[1].took < 3 * LIMIT + allowance(1.0)


def abort_one(rank: int, size: int) -> SimpleNamespace:
    join()
    array = ones(stream=new_stream())
    work: Any = dist.all_reduce(array, async_op=True)
    work.wait()
    dist.all_reduce(np.ones(1))  # on the CPU: a barrier would wait for the GPU
    began = time.monotonic()
    if rank == 0:
        group: Any = dist.group.WORLD
        group.abort()
    seen = error_of(work.get_future().wait)
    seen.took = seen.moment - began
    array.get()
    assert time.monotonic() - began < allowance(2.0)
    end_in_time()
    return seen


def test_abort_ends_the_work_of_all_gpus_at_once() -> None:
    outcomes = attempt(abort_one, 2, environments=failing(1, "allreduce:1:hang", 2))
    for outcome, kind in zip(outcomes, ("GroupBroken", "PeerFailed"), strict=True):
        assert outcome.value is not None, f"{outcome.output}{outcome.traceback}"
        assert outcome.value.kind == kind and outcome.value.took < allowance(1.0), outcome.value
        expect_quiet(outcome)


def destroy_while_the_gpu_works(rank: int, size: int) -> float:
    join()
    stream = new_stream()
    array = ones(stream=stream)
    with held(stream):
        array.set(np.full(8, 2.0))
        dist.all_reduce(array)
    dist.destroy_process_group()
    return float(array.get()[0])


def test_work_that_was_queued_before_the_group_was_destroyed_is_done() -> None:
    variables = {**GPUS, "PROCGROUP_STAND_IN_DELAY_US": "20000"}
    assert run(destroy_while_the_gpu_works, 2, environment=variables) == [4.0, 4.0]


def leave_before_calls_have_run(rank: int, size: int, left: Path) -> SimpleNamespace | None:
    join()
    array = ones(stream=new_stream())
    dist.all_reduce(array)
    dist.barrier()
    if rank == 0:
        for _ in range(3):
            dist.all_reduce(array)
        dist.destroy_process_group(timeout=0.2)
        array.get()
        left.touch()
        return None
    wait_until(left.exists)
    error = failure_of(lambda: dist.all_reduce(array))
    end_in_time(array)
    return error


def test_a_rank_that_leaves_before_its_calls_have_run_is_named_and_all_streams_run_on(tmp_path: Path) -> None:
    none, error = run(leave_before_calls_have_run, 2, args=(tmp_path / "left",), environment=GPUS)
    assert none is None and error is not None
    assert (error.kind, error.peer) == ("PeerFailed", 0) and "left the group before its calls on a GPU" in error.text


def leave_work_behind(rank: int, size: int) -> None:
    """End the program without destroying the groups."""
    join()
    dist.all_reduce(ones(10_000), async_op=True)
    dist.all_reduce(ones(), group=everybody())
    if rank == 0:
        dist.isend(ones(), 1)
    else:
        dist.irecv(ones(), 0)


def test_a_program_that_never_destroys_its_groups_ends_in_silence() -> None:
    for outcome in attempt(leave_work_behind, 2, environment=GPUS):
        assert outcome.ok, outcome
        expect_quiet(outcome)
