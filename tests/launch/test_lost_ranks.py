"""``procgroup run --replace`` and ``--keep-going``: after a rank fails, the others go on, with a new one or without."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from subprocess import CompletedProcess

import pytest

from world import run_command

# Counts to 60 together; a rank dies in the steps that the arguments say, as in "2:10:kill", if its process is the first
# one, and "0:20:again" if it is a later one. New ranks get the count from another one.
PROGRAM = """
import os, signal, sys
import numpy as np
import procgroup as dist

dist.init_process_group(timeout=20)
rank = dist.get_rank()
is_new = rank in dist.get_new_ranks()
count = np.zeros(1)


def share():
    counts = [0.0] * dist.get_world_size()
    dist.all_gather_object(counts, float(count[0]))
    count[0] = max(counts)


def die(how):
    if how == "raise":
        raise ValueError("bad data")
    os._exit(3) if how == "exit" else os.kill(os.getpid(), signal.SIGKILL)


fresh = True
while count[0] < 60:
    for fault in sys.argv[2:]:
        who, when, how = fault.split(":")
        if int(who) == rank and int(when) == count[0] and is_new == (how == "again"):
            die(how)
    try:
        if fresh:
            share()
            fresh = False
        total = np.ones(1)
        dist.all_reduce(total)
    except (dist.PeerLost, dist.PeerFailed):
        dist.reconfigure() if sys.argv[1] == "replace" else dist.shrink_group()
        fresh = True
        continue
    assert total[0] == dist.get_world_size()
    count += 1
if dist.get_rank() == 0:
    print(f"counted to {count[0]:g} on {dist.get_world_size()} ranks", flush=True)
dist.destroy_process_group()
"""


def launch(tmp_path: Path, *arguments: str) -> CompletedProcess[str]:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    flags, faults = arguments[:-1], arguments[-1].split()
    command = [sys.executable, "-m", "procgroup", "run", "--nproc-per-node", "4", *flags, str(program), *faults]
    return run_command(command)


@pytest.mark.parametrize(
    ("faults", "replaced"),
    [
        ("2:10:kill", [2]),
        ("0:10:kill", [0]),
        ("1:10:exit", [1]),
        ("3:10:raise", [3]),
        ("1:10:kill 2:10:kill", [1, 2]),
        ("0:10:kill 3:30:kill", [0, 3]),
        ("2:10:kill 2:20:again", [2, 2]),
    ],
)
def test_only_the_ranks_that_failed_are_started_again(tmp_path: Path, faults: str, replaced: list[int]) -> None:
    done = launch(tmp_path, "--replace", "--max-restarts", "5", f"replace {faults}")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "counted to 60 on 4 ranks" in done.stdout
    lines = re.findall(r"rank (\d) \(pid \d+\) failed: .*; started again \(replacement (\d) of 5\)", done.stderr)
    assert sorted(int(rank) for rank, _ in lines) == sorted(replaced), done.stderr
    assert [int(number) for _, number in lines] == list(range(1, len(lines) + 1))


def test_when_no_replacement_is_left_the_job_fails_with_the_last_failure(tmp_path: Path) -> None:
    done = launch(tmp_path, "--replace", "--max-restarts", "1", "replace 2:10:kill 1:20:exit")
    assert done.returncode == 3, done.stdout + done.stderr
    assert done.stderr.count("replacement 1 of 1") == 1 and "restart 1 of" not in done.stderr
    assert re.search(r"rank 1 .*failed first: exit code 3", done.stderr)


def test_replace_needs_to_know_how_often(tmp_path: Path) -> None:
    done = launch(tmp_path, "--replace", "replace")
    assert done.returncode == 2
    assert "--replace (--replace) needs --max-restarts N: how often a node may start a rank again" in done.stderr


@pytest.mark.parametrize(("faults", "left"), [("2:10:kill", 3), ("0:10:kill", 3), ("1:10:exit 2:10:kill 3:20:kill", 1)])
def test_the_others_go_on_without_the_ranks_that_failed(tmp_path: Path, faults: str, left: int) -> None:
    done = launch(tmp_path, "--keep-going", f"shrink {faults}")
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"counted to 60 on {left} ranks" in done.stdout
    assert len(re.findall(r"rank \d \(pid \d+\) failed: .*; the others go on", done.stderr)) == 4 - left


def test_a_job_whose_ranks_all_fail_has_failed(tmp_path: Path) -> None:
    done = launch(tmp_path, "--keep-going", "shrink 0:10:exit 1:10:exit 2:10:exit 3:10:exit")
    assert done.returncode == 3, done.stdout + done.stderr
    assert "counted" not in done.stdout and "failed first: exit code 3" in done.stderr


def test_keep_going_is_for_one_node(tmp_path: Path) -> None:
    done = launch(tmp_path, "--keep-going", "--nnodes", "2", "shrink")
    assert done.returncode == 2 and "--keep-going (--keep-going) is for one node, but --nnodes is 2" in done.stderr
