"""Whoever starts a PyTorch program and asks why it failed learns of the rank that did, not of those that lost it."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from world import free_port, run_command

pytestmark = pytest.mark.torch

TRAIN = """
import os, signal, sys
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

def main():
    dist.init_process_group(os.environ["BACKEND"])
    model = DistributedDataParallel(torch.nn.Linear(4, 4))
    for step in range(1000):
        if step == 3 and dist.get_rank() == 1:
            if sys.argv[1].isdigit():
                os.kill(os.getpid(), int(sys.argv[1]))
            raise ValueError("the cause")
        try:
            model(torch.ones(2, 4)).sum().backward()
        except RuntimeError:
            if sys.argv[1] == "handled":
                dist.destroy_process_group()
                sys.exit(3)
            raise
"""
PROGRAM = TRAIN + "main()\n"
SPAWNED = """
def of_rank(rank):
    os.environ["RANK"] = str(rank)
    main()

if __name__ == "__main__":
    import torch.multiprocessing
    torch.multiprocessing.spawn(of_rank, nprocs=int(os.environ["WORLD_SIZE"]))
"""


def run(tmp_path: Path, *launcher: str, end: object, **environment: str) -> subprocess.CompletedProcess[str]:
    script = tmp_path / "train.py"
    script.write_text(PROGRAM if launcher else TRAIN + SPAWNED)
    variables = {"PROCGROUP_RECORD_DIR": str(tmp_path / "records"), "BACKEND": "procgroup"} | environment
    return run_command([sys.executable, *launcher, str(script), str(end)], environment=variables)


def explained(tmp_path: Path) -> str:
    environment = {"PROCGROUP_RECORD_DIR": str(tmp_path / "records")}
    return run_command([sys.executable, "-m", "procgroup", "explain"], environment=environment).stdout.splitlines()[0]


@pytest.mark.parametrize("flags", [[], pytest.param(["--replace-gloo"], marks=pytest.mark.slow)])
@pytest.mark.parametrize("number", [signal.SIGKILL, pytest.param(signal.SIGSEGV, marks=pytest.mark.slow)])
def test_the_rank_that_a_signal_has_ended_failed_first(
    tmp_path: Path, number: signal.Signals, flags: list[str]
) -> None:
    backend = "gloo" if flags else "procgroup"
    done = run(tmp_path, "-m", "procgroup", "run", "-n", "3", *flags, end=int(number), BACKEND=backend)
    assert done.returncode == 128 + number
    assert re.search(rf"^rank 1 .* failed first: killed by {number.name}", done.stderr, re.MULTILINE), done.stderr
    assert explained(tmp_path).startswith("rank 1 is lost")


def test_the_rank_that_raised_failed_first(tmp_path: Path) -> None:
    done = run(tmp_path, "-m", "procgroup", "run", "-n", "3", end="raises")
    assert done.returncode == 1
    assert re.search(r"^rank 1 .* failed first: ValueError: the cause$", done.stderr, re.MULTILINE), done.stderr
    assert done.stderr.endswith("ValueError: the cause\n")
    assert explained(tmp_path).startswith("rank 1 failed: ValueError: the cause")


def test_the_sentence_comes_last_and_is_reported_once(tmp_path: Path) -> None:
    done = run(tmp_path, "-m", "procgroup", "run", "-n", "3", end=int(signal.SIGKILL))
    assert "At:" not in done.stderr and "torch_plugin" not in done.stderr
    report = [line for line in done.stderr.splitlines() if not line.startswith("[rank")]
    assert "".join(report).count("all_reduce #") <= 1, "none where the launcher has ended the others"
    of_ranks = [line for line in done.stderr.splitlines() if line.startswith("[rank 0]")]
    assert of_ranks[-1].endswith("Look at that rank's own output for the cause."), done.stderr


def test_a_rank_that_handles_the_loss_and_ends_with_a_status_of_its_own_failed_after_it(tmp_path: Path) -> None:
    done = run(tmp_path, "-m", "procgroup", "run", "-n", "2", end="handled")
    assert done.returncode == 1
    assert re.search(r"^rank 0 .* failed after that: rank 1 failed: ValueError", done.stderr, re.MULTILINE), done.stderr
    assert re.search(r"^rank 1 .* failed first: ValueError: the cause$", done.stderr, re.MULTILINE)


def test_torchrun_takes_the_rank_that_raised_for_the_cause(tmp_path: Path) -> None:
    done = run(tmp_path, "-m", "torch.distributed.run", "--nproc-per-node", "2", end="raises")
    cause = done.stderr.partition("Root Cause")[2]
    assert re.search(r"rank +: 1 ", cause), done.stderr
    assert "ValueError: the cause" in cause, "the rank has left torchrun its traceback"


def test_torch_s_spawn_takes_the_rank_that_raised_for_the_cause(tmp_path: Path) -> None:
    environment = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    done = run(tmp_path, end="raises", **environment)
    assert "-- Process 1 terminated with the following error:" in done.stderr
    assert done.stderr.rstrip().endswith("ValueError: the cause")
