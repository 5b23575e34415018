"""Small calls with a root on one host: a rank waits for those whose data it uses, and for nobody else.

The root of a broadcast or a scatter, and all ranks but the root of a reduce or a gather, may be ahead of the others.
They learn later that a rank has failed, is lost, or has made another call: in one of their next calls, or when they
leave the group.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from failures.waiting_calls import ROOTED

import procgroup as dist
from world import run, start, wait_until

AHEAD = 16
"""So many small calls a rank may make before the others have made the first of them."""

GIVERS: dict[str, Callable[[Any, int], Any]] = {
    "broadcast": lambda array, rank: dist.broadcast(array, rank),
    "scatter": lambda array, rank: dist.scatter(array, [array + other for other in range(dist.get_world_size())], rank),
    "reduce": lambda array, rank: dist.reduce(array, 1 - rank),
    "gather": lambda array, rank: dist.gather(array, None, 1 - rank),
}
"""Of each operation a call in which this rank, 0, only gives."""

TAKERS: dict[str, Callable[[Any], float]] = {
    "broadcast": lambda array: dist.broadcast(array, 0) or array[0],
    "scatter": lambda array: dist.scatter(array, None, 0) or array[0],
    "reduce": lambda array: dist.reduce(array, 1) or array[0],
    "gather": lambda array: dist.gather(array, outputs := [np.zeros(1), np.zeros(1)], 1) or outputs[0][0],
}

givers = pytest.mark.parametrize("operation", GIVERS)


def give_before_the_other_comes(rank: int, size: int, operation: str) -> list[float]:
    dist.init_process_group(timeout=60)
    given = Path(os.environ["GIVEN"])
    if rank == 0:
        for number in range(AHEAD):
            GIVERS[operation](np.full(1, float(number)), rank)
        given.touch()
        return []
    wait_until(given.exists)
    return [float(TAKERS[operation](np.zeros(1))) for _ in range(AHEAD)]


@givers
def test_a_rank_that_takes_nothing_may_be_16_calls_ahead_and_may_leave(operation: str, tmp_path: Path) -> None:
    environment = {"GIVEN": str(tmp_path / "given")}
    _, taken = run(give_before_the_other_comes, 2, args=(operation,), environment=environment)
    assert taken == [number + (operation == "scatter") for number in range(AHEAD)]


def take_before_another_comes(rank: int, size: int) -> float:
    dist.init_process_group(timeout=60)
    taken = Path(os.environ["TAKEN"])
    if rank == 2:
        wait_until(taken.exists)
    array = np.full(1, float(rank == 0))
    dist.broadcast(array, 0)
    if rank == 1:
        taken.touch()
    dist.barrier()
    return float(array[0])


def test_a_rank_that_takes_waits_for_the_root_alone(tmp_path: Path) -> None:
    environment = {"TAKEN": str(tmp_path / "taken")}
    assert run(take_before_another_comes, 3, environment=environment) == [1.0, 1.0, 1.0]


def wait_at_the_limit(rank: int, size: int, operation: str) -> tuple[int, Any, str]:
    dist.init_process_group(timeout=1)
    if rank == 1:
        wait_until(Path(os.environ["GO_ON"]).exists)
        return 0, None, ""
    made = 0
    try:
        while True:
            GIVERS[operation](np.zeros(1), rank)
            made += 1
    except dist.CollectiveTimeout as error:
        Path(os.environ["GO_ON"]).touch()
        return made, error.missing, str(error)


@givers
def test_a_rank_that_is_too_far_ahead_waits_and_names_those_behind(operation: str, tmp_path: Path) -> None:
    made, missing, text = run(wait_at_the_limit, 2, args=(operation,), environment={"GO_ON": str(tmp_path / "go on")})[
        0
    ]
    assert made == AHEAD and missing == (1,)
    assert (
        f"{operation} #{AHEAD + 1} on group 0 (rank 0 of 2): not complete after 1 s; still waiting for rank 1" in text
    )


def give_to_the_dead(rank: int, size: int, operation: str) -> tuple[int, int | None]:
    dist.init_process_group(timeout=60)
    dist.barrier()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    made = 0
    try:
        while True:
            GIVERS[operation](np.zeros(1), rank)
            made += 1
    except dist.PeerLost as error:
        return made, error.peer


@givers
def test_a_loss_is_raised_by_one_of_the_next_calls(operation: str) -> None:
    with start(give_to_the_dead, 2, args=(operation,)) as world:
        outcome = world.wait()[0]
    assert outcome.ok, outcome.traceback
    made, peer = outcome.value
    assert made <= AHEAD and peer == 1


def disagree(rank: int, size: int, then: str) -> str:
    """Ranks 0 and 1 both only give, in different calls, and so no rank has anything to compare them for."""
    dist.init_process_group(timeout=20)
    ready = Path(os.environ["READY"])
    array = np.full(2, float(rank))
    if rank == 0:
        dist.broadcast(array, 0)
        ready.touch()
    else:
        wait_until(ready.exists)
        dist.reduce(array, 0)
    assert array.tolist() == [rank, rank]
    Path(os.environ["READY"] + str(rank)).touch()
    wait_until(lambda: Path(os.environ["READY"] + str(1 - rank)).exists())
    if then == "exit":
        return ""
    with pytest.raises(dist.CollectiveMismatch) as caught:
        if then == "destroy":
            dist.destroy_process_group()
        dist.broadcast(array, 1 - rank) if then == "small" else dist.all_reduce(np.ones(ROOTED))
    assert caught.value.op == ("broadcast" if rank == 0 else "reduce")
    assert caught.value.sequence == 1
    if then != "destroy":
        with pytest.raises(dist.GroupBroken):
            dist.barrier()
    return str(caught.value)


@pytest.mark.parametrize("then", ["small", "large", "destroy"])
def test_the_next_call_or_the_end_raises_the_mismatch_as_that_of_the_call_before(then: str, tmp_path: Path) -> None:
    texts = run(disagree, 2, args=(then,), environment={"READY": str(tmp_path / "ready")})
    assert texts[0].startswith(
        "broadcast #1 on group 0 (rank 0 of 2): the ranks made different calls: this rank called"
    )
    assert texts[1].startswith("reduce #1 on group 0 (rank 1 of 2): the ranks made different calls: this rank called")
    for text in texts:
        assert "broadcast of 2 float64 from rank 0 at test_rooted_calls.py:" in text, text
        assert "reduce(SUM) of 2 float64 to rank 0 at test_rooted_calls.py:" in text, text


def test_a_program_that_ends_tells_the_mismatch_of_its_last_call(tmp_path: Path) -> None:
    with start(disagree, 2, args=("exit",), environment={"READY": str(tmp_path / "ready")}) as world:
        outcomes = world.wait()
    told = "procgroup ERROR: no call has raised this: {} #1 on group 0 (rank {} of 2): the ranks made different calls"
    assert told.format("broadcast", 0) in outcomes[0].output
    assert told.format("reduce", 1) in outcomes[1].output


def disagree_on_the_call(rank: int, size: int, third: str) -> str:
    """Ranks 0 and 1 agree, and rank 1 has its result before rank 2 comes with another call."""
    dist.init_process_group(timeout=20)
    has_result = Path(os.environ["HAS_RESULT"])
    array = np.full(2, float(rank))
    with pytest.raises(dist.CollectiveMismatch) as caught:
        if rank == 2:
            wait_until(has_result.exists)
        if rank == 2 and third == "reduce":
            dist.reduce(array, 0)
        else:
            dist.broadcast(array, 2 if rank == 2 else 0)
        if rank == 1:
            assert array.tolist() == [0, 0]
            has_result.touch()
        dist.barrier()
    return str(caught.value)


@pytest.mark.parametrize("third", ["broadcast", "reduce"])
def test_a_mismatch_says_of_this_rank_alone_that_no_array_was_changed(third: str, tmp_path: Path) -> None:
    texts = run(disagree_on_the_call, 3, args=(third,), environment={"HAS_RESULT": str(tmp_path / "has result")})
    assert ["no array of this rank was changed" in text for text in texts] == [True, False, True], texts
    assert "the array that this call writes may have been changed" in texts[1]


def wait_in_a_chain(rank: int, size: int) -> None:
    """Rank 1 awaits the root, and rank 2 awaits rank 1: nobody awaits rank 2."""
    dist.init_process_group(timeout=60)
    dist.barrier()
    array = np.full(1, float(rank))
    if rank == 2:
        dist.recv(array, 1)
    elif rank == 0:
        time.sleep(1)  # longer than it takes to find a deadlock
    dist.broadcast(array, 0)
    if rank == 1:
        dist.send(array, 2)
    assert array[0] == 0


def test_a_rank_that_awaits_the_root_alone_is_in_no_deadlock_with_the_others() -> None:
    run(wait_in_a_chain, 3)


def wait_for_the_last_rank(rank: int, size: int) -> tuple[int, Any]:
    """Ranks 0 and 1 are as far ahead as they can be: both wait for rank 2 alone, and not for each other."""
    dist.init_process_group(timeout=60)
    array = np.full(1, float(rank))
    if rank == 2:
        wait_until(Path(os.environ["GO_ON"]).exists)
    try:
        for number in range(AHEAD + 4):
            dist.broadcast(array, 0, timeout=2 if rank == 0 else 60)
            assert array[0] == 0, number
    except dist.CollectiveTimeout as error:
        Path(os.environ["GO_ON"]).touch()
        return number, error.missing
    except dist.PeerFailed as error:
        return number, error.missing
    return number, None


def test_ranks_that_are_ahead_wait_for_the_late_one_alone(tmp_path: Path) -> None:
    results = run(wait_for_the_last_rank, 3, environment={"GO_ON": str(tmp_path / "go on")})
    assert results[:2] == [(AHEAD, (2,)), (AHEAD, (2,))], results


def differ_before(rank: int, size: int) -> tuple[int, str, float]:
    """Ranks 1 and 2 differ in their first call, and agree in the second; rank 0 has come to neither."""
    dist.init_process_group(timeout=60)
    told = Path(os.environ["TOLD"])
    array = np.full(1, float(rank))
    try:
        if rank == 0:
            wait_until(told.exists)
            dist.barrier()
        elif rank == 1:
            dist.broadcast(array, 1)
            dist.broadcast(array, 1)
            dist.barrier()
        else:
            dist.reduce(array, 0)
            dist.broadcast(array, 1)
    except dist.DistError as error:
        told.touch()
        return getattr(error, "sequence", 0), type(error).__name__, float(array[0])
    return 0, "", float(array[0])


def test_nothing_is_taken_from_a_rank_that_made_another_call_before(tmp_path: Path) -> None:
    results = run(differ_before, 3, environment={"TOLD": str(tmp_path / "told")})
    assert results[2] == (1, "CollectiveMismatch", 2.0), results
    assert all(name in ("CollectiveMismatch", "PeerFailed") for _, name, _ in results), results


def take_turns(rank: int, size: int) -> None:
    """Each call has another root, so that each rank is ahead of some and behind others."""
    dist.init_process_group(timeout=60)
    random = np.random.default_rng(7)
    for number in range(2000):
        root, kind, count = int(random.integers(size)), int(random.integers(6)), int(random.choice([1, 5, 300, ROOTED]))
        if random.integers(50) == rank:
            time.sleep(0.001)
        array = np.full(count, float(number + rank))
        if kind == 0:
            dist.broadcast(array, root)
            assert (array == number + root).all()
        elif kind == 1:
            dist.reduce(array, root)
            assert rank != root or (array == sum(number + other for other in range(size))).all()
        elif kind == 2:
            outputs = [np.zeros(count) for _ in range(size)] if rank == root else None
            dist.gather(array, outputs, root)
            assert all((output == number + other).all() for other, output in enumerate(outputs or []))
        elif kind == 3:
            dist.scatter(array, [array + other for other in range(size)] if rank == root else None, root)
            assert (array == number + root + rank).all()
        elif kind == 4:
            dist.all_reduce(array)
            assert (array == sum(number + other for other in range(size))).all()
        else:
            dist.barrier(async_op=bool(count == 1))


@pytest.mark.parametrize("size", [2, 4])
def test_results_are_right_while_ranks_are_ahead_of_each_other(size: int) -> None:
    run(take_turns, size)
