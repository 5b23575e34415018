"""A rank whose program ends with an exception: the others raise PeerFailed with its type, text and line, at once.

Ranks are whole programs here, because what counts is how the interpreter ends them.
"""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from failures.waiting_calls import TRANSPORTS, allowance, on

from procgroup.process import exit_reason
from world import free_port, rank_environment

transports = pytest.mark.parametrize("transport", TRANSPORTS)

PROGRAM = """
import sys, threading, time
import numpy as np
import procgroup as dist

def fail():
    print("raised", time.monotonic(), flush=True)
    raise ValueError("no such file:\\n\\x1b[1m\\u00e4.txt")

def play():
{play}

def wait():
{wait}

if __name__ == "__main__":
    dist.init_process_group(timeout=50)
    rank, size = dist.get_rank(), dist.get_world_size()
    pair = dist.new_group([1, 2]) if size > 2 else None
    try:
        dist.barrier()  # which may fail, too, if another rank has completed it and fails before this one has
        if rank == 1:
            play()
        wait()
    except dist.DistError as error:
        print("told", time.monotonic(), type(error).__name__, getattr(error, "global_peer", None), error, flush=True)
"""

ALL_REDUCE = "while True: dist.all_reduce(np.ones(4))"
LINE = PROGRAM.splitlines().index('    raise ValueError("no such file:\\n\\x1b[1m\\u00e4.txt")') + 1


def run_programs(folder: Path, play: str, wait: str, size: int, transport: str) -> list[str]:
    """Run the program on all ranks; return what each printed on stdout."""
    source = PROGRAM.format(play=_indented(play), wait=_indented(wait))
    (folder / "train.py").write_text(source)
    port = free_port()
    with contextlib.ExitStack() as stack:
        places = [rank_environment(rank, size, port, on(transport)) for rank in range(size)]
        ranks = [stack.enter_context(_started(folder, place)) for place in places]
        outputs = [rank.communicate(timeout=120) for rank in ranks]
    said = "".join(output + errors for output, errors in outputs)
    print(said)  # for the report of a test that fails
    assert ranks[1].returncode != 0 or "thread" in play, said
    return [output for output, _ in outputs]


@contextlib.contextmanager
def _started(folder: Path, environment: dict[str, str]) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "train.py"],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def _indented(lines: str) -> str:
    return "\n".join(f"    {line}" for line in lines.splitlines())


def expect_told(outputs: list[str], seconds: float, reason: str = "ValueError: no such file:") -> None:
    """Expect that every rank but rank 1 was notified within so many seconds."""
    raised = re.search(r"raised (\S+)", outputs[1])
    assert raised, outputs
    for rank, output in enumerate(outputs):
        if rank == 1:
            continue
        told = re.search(r"told (\S+) (\w+) (\w+) (.*)", output)
        assert told and told[2] == "PeerFailed" and told[3] == "1", outputs
        assert f"failed: {reason}" in told[4] and f"(train.py:{LINE})" in told[4], told[4]
        assert float(told[1]) - float(raised[1]) < seconds, outputs


CASES = {
    "no call": "fail()",
    "irecv": "dist.irecv(np.zeros(4), 0, tag=9)\nfail()",
    "large isend": "dist.isend(np.zeros(1_000_000), 0, tag=9)\nfail()",
    "async all_reduce": "dist.all_reduce(np.ones(4), async_op=True)\nfail()",
    "other threads": (
        "threading.Thread(target=time.sleep, args=(3,)).start()\ndist.irecv(np.zeros(4), 0, tag=9)\nfail()"
    ),
}


@transports
@pytest.mark.parametrize("case", CASES)
def test_an_exception_is_told_to_all_at_once(transport: str, case: str, tmp_path: Path) -> None:
    outputs = run_programs(tmp_path, CASES[case], ALL_REDUCE, 3, transport)
    expect_told(outputs, allowance(1.0), r"ValueError: no such file: ?[1m\xe4.txt")


@transports
@pytest.mark.parametrize("wait", ["dist.recv(np.zeros(4), 1)", "dist.new_group(range(size))"])
def test_who_waits_in_another_call_is_told_too(transport: str, wait: str, tmp_path: Path) -> None:
    expect_told(run_programs(tmp_path, "fail()", wait, 2, transport), allowance(1.0))


@transports
def test_a_subgroup_is_told_and_names_the_global_rank_too(transport: str, tmp_path: Path) -> None:
    # Rank 2 has completed the barrier of all ranks when rank 1 fails, or it would be notified in that one.
    wait = f"if rank == 2:\n  dist.send(np.zeros(1), 1, tag=8)\n  dist.all_reduce(np.ones(3), group=pair)\n{ALL_REDUCE}"
    play = "dist.recv(np.zeros(1), 2, tag=8)\ndist.irecv(np.zeros(4), 2, group=pair)\nfail()"
    outputs = run_programs(tmp_path, play, wait, 3, transport)
    expect_told(outputs, allowance(1.0))
    assert "on group 1 (rank 1 of 2; global rank 2): rank 1 (rank 0 of group 1) failed: " in outputs[2]


@transports
def test_ctrl_c_is_an_exception(transport: str, tmp_path: Path) -> None:
    play = 'dist.irecv(np.zeros(4), 0, tag=9)\nprint("raised", time.monotonic(), flush=True)\nraise KeyboardInterrupt'
    outputs = run_programs(tmp_path, play, ALL_REDUCE, 2, transport)
    assert re.search(r"PeerFailed 1 .* rank 1 failed: KeyboardInterrupt \(train\.py:\d+\)", outputs[0]), outputs


@transports
def test_a_group_that_is_destroyed_for_an_exception_waits_a_second_at_most(transport: str, tmp_path: Path) -> None:
    play = "dist.irecv(np.zeros(4), 0, tag=9)\ntry:\n    fail()\nfinally:\n    dist.destroy_process_group()"
    expect_told(run_programs(tmp_path, play, ALL_REDUCE, 2, transport), allowance(3.0))


@transports
def test_the_main_part_may_run_in_a_thread(transport: str, tmp_path: Path) -> None:
    play = (
        "dist.irecv(np.zeros(4), 0, tag=9)\n"
        "thread = threading.Thread(target=fail)\nthread.start()\nthread.join()\nsys.exit()"
    )
    expect_told(run_programs(tmp_path, play, ALL_REDUCE, 2, transport), allowance(3.0))


def test_an_exception_that_was_handled_before_the_group_was_made_says_nothing(tmp_path: Path) -> None:
    source = (
        PROGRAM.format(play="    pass", wait="    pass").split("if __name__")[0]
        + """
try:
    raise ImportError("of an optional package")
except ImportError:
    dist.init_process_group(timeout=20)
    if dist.get_rank() == 1:
        dist.destroy_process_group()
    else:
        try:
            dist.all_reduce(np.ones(4))
        except dist.DistError as error:
            # Its program leaves the groups first, and then the job.
            ways = ["program ended without an error", "left the group"]
            print(type(error).__name__, any(way in str(error) for way in ways))
"""
    )
    (tmp_path / "train.py").write_text(source)
    port = free_port()
    places = [rank_environment(rank, 2, port, on("shm")) for rank in range(2)]
    with _started(tmp_path, places[0]) as first, _started(tmp_path, places[1]) as second:
        assert second.communicate(timeout=120) == ("", "")
        assert first.communicate(timeout=120)[0] == "PeerLost True\n"


CHILDREN = """
import multiprocessing, sys, time
import numpy as np
import procgroup as dist

def play(rank, starter):
    dist.init_process_group(rank=rank, world_size=2, timeout=50)
    dist.barrier()
    if rank == 1:
        dist.irecv(np.zeros(4), 0, tag=9)
        print("raised", time.monotonic(), flush=True)
        raise ValueError("in a child")
    try:
        dist.all_reduce(np.ones(4))
    except dist.PeerFailed as error:
        print("told", time.monotonic(), error, flush=True)

if __name__ == "__main__":
    starter = sys.argv[1]
    if starter == "procgroup.spawn":
        try:
            dist.spawn(play, (starter,), 2)
        except Exception as error:
            print("ValueError: in a child" in str(error))
    else:
        context = multiprocessing.get_context(starter)
        ranks = [context.Process(target=play, args=(rank, starter)) for rank in range(2)]
        for rank in ranks:
            rank.start()
        for rank in ranks:
            rank.join()
"""


@pytest.mark.parametrize("starter", ["fork", "spawn", "procgroup.spawn"])
def test_a_child_of_multiprocessing_tells_of_its_exception(starter: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(CHILDREN)
    place = {} if starter == "procgroup.spawn" else {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    started = time.monotonic()
    done = subprocess.run(
        [sys.executable, "train.py", starter],
        cwd=tmp_path,
        env={**os.environ, **place},
        capture_output=True,
        text=True,
        timeout=120,
    )
    raised = re.search(r"raised (\S+)", done.stdout)
    told = re.search(r"told (\S+) .*rank 1 failed: ValueError: in a child \(train\.py:12\)", done.stdout)
    if starter == "procgroup.spawn" and raised and not told:  # the parent may end rank 0 before it prints
        assert "True" in done.stdout and time.monotonic() - started < 15, done
        return
    assert raised and told, done
    assert float(told[1]) - float(raised[1]) < allowance(1.0), done.stdout


class Unprintable(Exception):
    def __str__(self) -> str:
        raise RuntimeError


def test_what_is_told_is_one_line_of_ascii_of_at_most_4_kib() -> None:
    text = exit_reason.describe(ValueError("a" * 10_000 + "\n\x00\x1b[2J\u2603"))
    assert len(text) <= 4096 and text.isascii() and text.isprintable()
    assert exit_reason.describe(ValueError("")) == "ValueError"
    assert exit_reason.describe(Unprintable()) == "Unprintable"
    assert exit_reason.describe(ValueError("\x1b \u2603")) == r"ValueError: ? \u2603"


def test_the_line_is_that_of_the_innermost_frame_of_the_users_code() -> None:
    try:
        re.compile("(")
    except re.error as error:
        assert re.search(r"\(test_exceptions\.py:\d+\)$", exit_reason.describe(error)), exit_reason.describe(error)
