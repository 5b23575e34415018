"""The command lines of torchrun's documentation and of the tutorials start stock PyTorch programs here, too."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from world import free_port

pytestmark = pytest.mark.torch
pytest.importorskip("torch")

PROGRAM = """
import argparse, os, torch, torch.distributed as dist

parser = argparse.ArgumentParser()
parser.add_argument("--local-rank", "--local_rank", type=int)
parser.add_argument("--fail-at-first", action="store_true")
arguments = parser.parse_args()
dist.init_process_group("gloo")
total = torch.ones(1)
dist.all_reduce(total)
if arguments.fail_at_first and dist.get_rank() == 1 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    os.kill(os.getpid(), 9)
dist.barrier()
print("total", int(total), "local", arguments.local_rank, "attempt", os.environ["TORCHELASTIC_RESTART_COUNT"])
dist.destroy_process_group()
"""


@pytest.fixture
def program(tmp_path: Path) -> Path:
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    return path


def run_nodes(
    directory: Path, lines: Sequence[Sequence[str]], command: Sequence[str] = ("-m", "procgroup", "run")
) -> list[str]:
    """Start one launcher for each line, in that order; return what each has printed, once all have succeeded."""
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo"}
    nodes = [
        subprocess.Popen(
            [sys.executable, *command, *line],
            cwd=directory,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for line in lines
    ]
    try:
        printed = [node.communicate(timeout=250)[0] for node in nodes]
    finally:
        for node in nodes:
            node.kill()
            node.wait()
    assert [node.returncode for node in nodes] == [0] * len(nodes), printed
    return printed


def test_a_single_node(program: Path) -> None:
    (printed,) = run_nodes(program.parent, [["--standalone", "--nnodes=1", "--nproc-per-node=2", program.name]])
    assert printed.count("total 2") == 2


def test_a_single_node_with_a_rendezvous_on_a_free_port(program: Path) -> None:
    flags = ["--nnodes=1", "--nproc-per-node=2", "--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0"]
    (printed,) = run_nodes(program.parent, [[*flags, program.name]])
    assert printed.count("total 2") == 2


@pytest.mark.parametrize("first", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_two_nodes_with_fixed_addresses(program: Path, first: int) -> None:
    port = free_port()
    lines = [
        ["--nproc_per_node=1", "--nnodes=2", f"--node_rank={rank}", "--master_addr=127.0.0.1", f"--master_port={port}"]
        for rank in (first, 1 - first)
    ]
    printed = run_nodes(program.parent, [[*line, program.name] for line in lines])
    assert [text.count("total 2") for text in printed] == [1, 1]


def test_two_nodes_that_meet_without_node_ranks(program: Path) -> None:
    line = ["--nnodes=2", "--nproc_per_node=1", "--rdzv_id=456", "--rdzv_backend=c10d"]
    line += [f"--rdzv_endpoint=127.0.0.1:{free_port()}", program.name]
    printed = run_nodes(program.parent, [line, line])
    assert [text.count("total 2") for text in printed] == [1, 1]


# With c10d such a program is started again in test_restarts.py, too.
@pytest.mark.parametrize("meeting", ["static", pytest.param("c10d", marks=pytest.mark.slow)])
def test_a_rank_that_is_killed_is_no_end_while_a_restart_is_left(program: Path, meeting: str) -> None:
    port = free_port()
    lines = []
    for rank in (0, 1):
        place = [f"--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-backend=c10d", "--rdzv-id=7"]
        if meeting == "static":
            place = [f"--node-rank={rank}", f"--master-port={port}"]
        lines.append(["--nnodes=2", "--max-restarts=3", *place, program.name, "--fail-at-first"])
    printed = run_nodes(program.parent, lines)
    assert ["total 2 local None attempt 1" in text for text in printed] == [True, True]


def test_an_elastic_job_of_one_to_two_nodes_begins_with_one(program: Path) -> None:
    line = ["--nnodes=1:2", "--nproc-per-node=2", "--max-restarts=3", "--rdzv-id=8", "--rdzv-backend=c10d"]
    line += [f"--rdzv-endpoint=127.0.0.1:{free_port()}", "--rdzv-conf=last_call_timeout=1", program.name]
    (printed,) = run_nodes(program.parent, [line])
    assert printed.count("total 2") == 2


@pytest.mark.parametrize(
    "line",
    [["-m", "program"], ["--no-python", sys.executable, "program.py"], ["--run-path", "program.py"]],
    ids=["module", "no-python", "run-path"],
)
def test_the_ways_to_name_the_program(tmp_path: Path, line: list[str]) -> None:
    (tmp_path / "program.py").write_text("import os; print('rank', os.environ['RANK'])")
    (printed,) = run_nodes(tmp_path, [["--nproc-per-node=2", *line]])
    assert "rank 0\n" in printed and "rank 1\n" in printed


@pytest.mark.parametrize("use_env", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_the_older_launcher_on_two_nodes(program: Path, use_env: bool) -> None:
    port = free_port()
    lines = [
        ["--nproc_per_node=1", "--nnodes=2", f"--node_rank={rank}", "--master_addr=127.0.0.1", f"--master_port={port}"]
        for rank in (0, 1)
    ]
    flag = ["--use_env"] if use_env else []
    printed = run_nodes(program.parent, [[*line, *flag, program.name] for line in lines], ["-m", "procgroup.launch"])
    local = "None" if use_env else "0"
    assert [text.count(f"total 2 local {local}") for text in printed] == [1, 1]
