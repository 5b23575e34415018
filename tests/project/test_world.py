"""The tests' own ground: worlds of real processes, their outcomes, and what happens at a deadline."""

from __future__ import annotations

import os
import signal
import sys
import time

import pytest

import world
from procgroup.errors import PeerLost


def multiply(rank: int, size: int, factor: int) -> int:
    assert os.environ["RANK"] == str(rank) and os.environ["WORLD_SIZE"] == str(size)
    return rank * factor


def fail_on_one(rank: int, size: int) -> int:
    if rank == 1:
        raise PeerLost(peer=0, pid=7, how="killed", op="barrier", sequence=3, group="world", rank=1, size=size)
    return rank


def sleep_after_ready(rank: int, size: int) -> None:
    print("ready", flush=True)
    time.sleep(60)


def exit_with_three(rank: int, size: int) -> None:
    sys.exit(3)


def return_what_cannot_travel(rank: int, size: int) -> object:
    return lambda: None


@pytest.mark.parametrize("size", [1, 4])
def test_returns_the_values_in_rank_order(size: int) -> None:
    assert world.run(multiply, size, args=(10,)) == [10 * rank for rank in range(size)]


def test_an_exception_comes_back_with_type_text_and_attributes() -> None:
    outcomes = world.attempt(fail_on_one, 2)
    error = outcomes[1].error
    assert isinstance(error, PeerLost) and error.peer == 0 and error.pid == 7
    assert str(error).startswith("barrier #3 on group world (rank 1 of 2): lost rank 0 (pid 7): killed")
    assert outcomes[0].ok and not outcomes[1].ok and outcomes[1].exit_code == 1


def test_run_raises_with_the_traceback_of_the_rank() -> None:
    with pytest.raises(world.WorldFailed, match="in fail_on_one"):
        world.run(fail_on_one, 2)


def test_a_killed_rank_is_seen_by_its_signal() -> None:
    with world.start(sleep_after_ready, 1) as ranks:
        ranks.wait_for_output(0, "ready")
        ranks.kill(0)
        assert ranks.wait(5)[0].exit_code == -signal.SIGKILL


def test_an_exit_status_is_kept() -> None:
    assert [outcome.exit_code for outcome in world.attempt(exit_with_three, 1)] == [3]


def test_a_deadline_shows_the_stack_of_every_rank() -> None:
    with world.start(sleep_after_ready, 2) as ranks, pytest.raises(world.WorldTimeout) as caught:
        ranks.wait_for_output(0, "ready")
        ranks.wait_for_output(1, "ready")
        ranks.wait(timeout=0.2)
    assert all("in sleep_after_ready" in outcome.output for outcome in caught.value.outcomes)


def test_a_stopped_rank_is_dumped_and_killed_too() -> None:
    with world.start(sleep_after_ready, 1) as ranks:
        ranks.wait_for_output(0, "ready")
        ranks.kill(0, signal.SIGSTOP)
        with pytest.raises(world.WorldTimeout, match="in sleep_after_ready"):
            ranks.wait(timeout=0.1)


def test_a_value_that_cannot_travel_is_named() -> None:
    assert "return_what_cannot_travel" in str(world.attempt(return_what_cannot_travel, 1)[0].error)


def test_a_function_inside_a_function_is_refused() -> None:
    def inner(rank: int, size: int) -> None: ...

    with pytest.raises(TypeError, match="must stand at the top of its module"):
        world.start(inner, 1)


def test_environment_is_given_rank_by_rank() -> None:
    assert world.run(read_colour, 2, environments=[{"COLOUR": "red"}, {"COLOUR": "blue"}]) == ["red", "blue"]


def read_colour(rank: int, size: int) -> str:
    return os.environ["COLOUR"]


def test_a_command_returns_status_and_both_streams() -> None:
    program = "import sys; print(input()); print('two', file=sys.stderr); sys.exit(5)"
    done = world.run_command([sys.executable, "-c", program], standard_input="one\n")
    assert (done.returncode, done.stdout, done.stderr) == (5, "one\n", "two\n")


def test_a_command_at_its_deadline_is_dumped_with_its_children() -> None:
    child = "import time\ndef stuck():\n  time.sleep(60)\nstuck()"
    program = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    for timeout in (4, 30):  # most often the child is in its function within 4 s
        with pytest.raises(world.WorldTimeout) as caught:
            world.run_command([sys.executable, "-c", program], timeout=timeout)
        if "in stuck" in str(caught.value):
            break
    assert "in stuck" in str(caught.value)
