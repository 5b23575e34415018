"""The tests' own ground: worlds of real processes, their outcomes, and what happens at a deadline."""

from __future__ import annotations

import os
import re
import signal
import socket
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

import outputs
import world
from procgroup.errors import PeerLost
from project.test_time_limit import run_pytest


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


def test_a_port_is_given_to_one_test_only(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = iter([9_011, 9_012, 9_011, 9_013, 9_014])
    monkeypatch.setattr(world, "_ports", SimpleNamespace(randrange=lambda *limits: next(drawn)))
    with socket.socket(socket.AF_UNIX) as other_test:
        other_test.bind(f"\0{world.PORT_NAME}9013")
        assert [world.free_port() for _ in range(3)] == [9_011, 9_012, 9_014]


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
        assert ranks.wait()[0].exit_code == -signal.SIGKILL


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


def print_many_lines(rank: int, size: int, text: str) -> None:
    for number in range(1000):
        print(f"line {number} of rank {rank}")
    raise RuntimeError("no luck")


def test_a_failure_shows_the_end_of_each_output_and_names_the_file_with_all_of_it() -> None:
    with pytest.raises(world.WorldFailed) as caught:
        world.run(print_many_lines, 2, args=("x" * 1000,), environment={"COLOUR": "red"})
    text = str(caught.value)
    assert re.match("print_many_lines\\(rank, 2, 'x{200,300}\\.\\.\\.\\), COLOUR=red: a rank failed\n", text)
    for rank, outcome in enumerate(caught.value.outcomes):
        assert f"--- rank {rank}: exit status 1, printed to {outcome.file}\n(940 lines before these" in text
        assert f"line 999 of rank {rank}" in text and f"line 939 of rank {rank}" not in text
        assert outcome.file is not None and outcome.file.read_text() == outcome.output
    assert text.count("RuntimeError: no luck") == 2
    assert [outcome.file for outcome in caught.value.outcomes] == outputs.of_this_test()


FAILING = """
from pathlib import Path
from types import SimpleNamespace
import pytest, outputs, world

outputs.FAILED = Path(__file__).parent / "failed"

def fail_on_two(rank, size):
    print(f"rank {rank} was here")
    assert rank != 2

def test_that_passes():
    world.attempt(fail_on_two, 3)

@pytest.mark.parametrize("text", ["a b"])
def test_that_fails(text):
    for size in (1, 1, 2, 2, 3):
        world.run(fail_on_two, size)

@pytest.fixture
def ranks():
    with world.start(fail_on_two, 2) as ranks:
        ranks.wait()
        yield

def test_whose_ranks_go_on(ranks):
    assert False
"""


def test_a_failed_test_says_how_to_run_it_again_and_keeps_the_last_that_its_ranks_printed(tmp_path: Path) -> None:
    output = run_pytest(tmp_path, FAILING)
    assert "- To run it again -" in output
    assert "-m pytest 'test_it.py::test_that_fails[a b]'\n" in output and output.count("-m pytest") == 2
    kept = [file.relative_to(tmp_path) for file in tmp_path.glob("failed/*/*")]
    assert all(f"{file}\n" in output for file in kept)
    names = sorted(file.name for file in kept)  # of three worlds of one test, and one of the other
    assert names == ["0.output"] * 4 + ["1.output"] * 4 + ["2.output"]
    assert {file.read_text() for file in tmp_path.glob("failed/*/2.output")} == {"rank 2 was here\n"}


FAILING_WITHOUT_RANKS = """
from pathlib import Path
from types import SimpleNamespace
import outputs

outputs.FAILED = Path(__file__).parent / "no" / "such"

def test_that_fails():
    assert "the one" == "the other"
"""


def test_a_test_can_fail_where_no_ranks_have_printed_anything_yet(tmp_path: Path) -> None:
    output = run_pytest(tmp_path, FAILING_WITHOUT_RANKS)
    assert "the other" in output and "INTERNALERROR" not in output, output
