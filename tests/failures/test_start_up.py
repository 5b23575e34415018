"""A rank that is killed, stopped or fails while a group starts is named on every other rank, soon."""

from __future__ import annotations

import sys
import textwrap
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from failures import instants
from failures.instants import CONNECTING, JOINING, moment, start_a_group
from failures.waiting_calls import allowance

import procgroup as dist
from procgroup.errors import CollectiveTimeout, PeerFailed, PeerLost
from world import Outcome, run, run_command, start

SOON = 1.0


def check_named(outcomes: list[Outcome], victim: int, error: type[PeerLost] | type[PeerFailed]) -> None:
    ended = moment(outcomes[victim].output)
    for outcome in outcomes:
        if outcome.rank != victim:
            found: Any = outcome.error
            assert isinstance(found, error), outcome
            assert found.peer == victim, outcome
            assert found.when - ended < allowance(SOON), outcome
            assert "rendezvous/" not in str(found), outcome


def cases(instants: list[tuple[str, str]], quick: list[tuple[int, tuple[str, str]]]) -> list[Any]:
    """Return victims and instants; those that are not quick run in make test-all."""
    return [
        pytest.param(
            victim,
            instant,
            id=f"{victim}-{' '.join(instant)}",
            marks=() if (victim, instant) in quick else pytest.mark.slow,
        )
        for victim in (0, 2)
        for instant in instants
    ]


KILLED_AT = [
    (2, JOINING[0]),
    (2, CONNECTING[1]),
    (2, CONNECTING[3]),
    (2, CONNECTING[6]),
    (0, CONNECTING[1]),
    (0, CONNECTING[4]),
]


@pytest.mark.parametrize(("victim", "instant"), cases([*JOINING, *CONNECTING], KILLED_AT))
def test_a_killed_rank_is_named_at_once(victim: int, instant: tuple[str, str]) -> None:
    with start(start_a_group, 4, args=(victim, instant, "kill", 20)) as world:
        outcomes = world.wait()
        check_named(outcomes, victim, PeerLost)
        for outcome in outcomes:
            if outcome.rank != victim:
                assert f"lost rank {victim} (pid {world.pids[victim]}): its process on host " in str(outcome.error)


@pytest.mark.parametrize(("victim", "instant"), [(0, CONNECTING[1]), (1, CONNECTING[1]), (1, CONNECTING[2])])
def test_a_killed_rank_is_named_at_once_over_tcp(victim: int, instant: tuple[str, str]) -> None:
    environment = {"PROCGROUP_TRANSPORT": "tcp"}
    with start(start_a_group, 2, args=(victim, instant, "kill", 20), environment=environment) as world:
        check_named(world.wait(), victim, PeerLost)


@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_rank_is_named_at_once_through_a_store_of_the_program(victim: int) -> None:
    # By then every rank has read who the others are. Before that nobody can tell which rank hosts such a store, and
    # its end is StoreLost.
    with start(start_a_group, 3, args=(victim, CONNECTING[3], "kill", 20, "tcp")) as world:
        check_named(world.wait(), victim, PeerLost)


@pytest.mark.parametrize("how", ["raise", "exit"])
@pytest.mark.parametrize(
    ("victim", "instant"),
    cases([CONNECTING[1], CONNECTING[3], CONNECTING[6]], [(2, CONNECTING[1]), (0, CONNECTING[6])]),
)
def test_a_rank_that_leaves_with_an_exception_is_named_at_once(how: str, victim: int, instant: tuple[str, str]) -> None:
    with start(start_a_group, 4, args=(victim, instant, how, 20)) as world:
        outcomes = world.wait()
    check_named(outcomes, victim, PeerFailed)
    reason = "ValueError: made by the test" if how == "raise" else "SystemExit: 3"
    assert all(reason in str(outcome.error) for outcome in outcomes if outcome.rank != victim)


@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_that_raises_is_named_at_once_through_a_file(victim: int, tmp_path: Path) -> None:
    with start(start_a_group, 3, args=(victim, CONNECTING[1], "raise", 20, str(tmp_path / "store"))) as world:
        check_named(world.wait(), victim, PeerFailed)


def test_a_rank_that_is_stopped_or_killed_unseen_is_named_at_the_deadline(tmp_path: Path) -> None:
    """The timeout is that of all of the start, whatever part of it the others are in."""
    limit = 5.0
    worlds_to_start = [
        (2, JOINING[1], "stop", limit),  # it has come, but cannot say that it was the last one
        (2, CONNECTING[0], "stop", limit),
        (2, CONNECTING[1], "stop", limit),
        (2, CONNECTING[4], "stop", limit),
        (0, JOINING[0], "stop", limit),  # with the store
        (0, CONNECTING[1], "stop", limit),
        (1, CONNECTING[2], "kill", limit, str(tmp_path / "first")),
        (0, CONNECTING[5], "kill", limit, str(tmp_path / "second")),
    ]
    with ExitStack() as stack:
        worlds = [stack.enter_context(start(start_a_group, 3, args=case)) for case in worlds_to_start]
        for (victim, *_), world in zip(worlds_to_start, worlds, strict=True):
            world.wait_for_output(victim, "moment")
        for (victim, *_), world in zip(worlds_to_start, worlds, strict=True):
            world.wait_for_end([rank for rank in range(3) if rank != victim])
            if world.is_alive(victim):
                world.kill(victim)
            outcomes = world.wait()
            for outcome in outcomes:
                if outcome.rank != victim:
                    error: Any = outcome.error
                    assert isinstance(error, CollectiveTimeout), outcome
                    assert error.missing == (victim,), outcome
                    assert error.when - moment(outcomes[victim].output) < limit + allowance(0.5), outcome


def test_a_killed_rank_is_named_under_the_launcher(tmp_path: Path) -> None:
    program = """\
        import os, procgroup as dist
        from failures.instants import CONNECTING, start_a_group
        start_a_group(int(os.environ["RANK"]), 3, 1, CONNECTING[4], "kill", 20)
    """
    script = tmp_path / "program.py"
    script.write_text(textwrap.dedent(program))
    command = [sys.executable, "-m", "procgroup", "run", "--nproc-per-node", "3", str(script)]
    done = run_command(command, environment={"PYTHONPATH": str(Path(__file__).parents[1])})
    assert done.returncode != 0
    for rank in (0, 2):
        assert f"init_process_group #0 on group 0 (rank {rank} of 3): lost rank 1 (pid " in done.stdout + done.stderr


def start_again_and_again(rank: int, size: int, rounds: int) -> None:
    for number in range(rounds):
        dist.init_process_group()
        if (number + rank) % size:
            dist.barrier(async_op=True)
        dist.destroy_process_group()


def test_leaving_at_once_is_no_loss_to_those_who_are_still_starting() -> None:
    run(start_again_and_again, 3, args=(20,))


def start_a_group_twice(rank: int, size: int, victim: int) -> str:
    from procgroup.errors import DistError

    if rank == victim:
        instants.end_at(*CONNECTING[4], "raise")
    try:
        dist.init_process_group(timeout=20)
    except (DistError, ValueError) as error:
        failed = type(error).__name__
    dist.init_process_group(timeout=20)
    dist.barrier()
    return failed


def test_the_same_ranks_can_start_again_after_a_failure() -> None:
    assert run(start_a_group_twice, 3, args=(1,)) == ["PeerFailed", "ValueError", "PeerFailed"]


def make_the_group_anew(rank: int, size: int, victim: int, timeout: float) -> None:
    dist.init_process_group()
    if rank == victim:
        instants.end_at(*CONNECTING[4], "stop", starts_before=1)
    try:
        dist.reconfigure(timeout=timeout)
    except Exception as error:
        error.when = time.monotonic()  # type: ignore[attr-defined]
        raise


def test_a_rank_that_stops_while_a_group_is_made_anew_is_named_at_the_deadline_of_reconfigure() -> None:
    with start(make_the_group_anew, 3, args=(1, 3.0)) as world:
        world.wait_for_output(1, "moment")
        world.wait_for_end([0, 2])
        world.kill(1)
        outcomes = world.wait()
    for outcome in (outcomes[0], outcomes[2]):
        error: Any = outcome.error
        assert isinstance(error, CollectiveTimeout) and error.missing == (1,), outcome
        assert error.when - moment(outcomes[1].output) < 3.0 + allowance(0.5), outcome


def wait_for_a_subgroup(rank: int, size: int, victim: int, how: str) -> None:
    dist.init_process_group(timeout=5)
    dist.barrier()
    if rank == victim:
        instants._end(how)
    try:
        dist.new_group([0, 1, 2])
    except Exception as error:
        error.when = time.monotonic()  # type: ignore[attr-defined]
        raise


def test_a_rank_that_is_killed_or_stopped_while_a_further_group_is_made_is_named() -> None:
    with (
        start(wait_for_a_subgroup, 3, args=(1, "kill")) as killed,
        start(wait_for_a_subgroup, 3, args=(1, "stop")) as stopped,
    ):
        check_named(killed.wait(), 1, PeerLost)
        stopped.wait_for_output(1, "moment")
        stopped.wait_for_end([0, 2])
        stopped.kill(1)
        outcomes = stopped.wait()
    for outcome in (outcomes[0], outcomes[2]):
        assert isinstance(outcome.error, CollectiveTimeout) and outcome.error.missing == (1,), outcome
