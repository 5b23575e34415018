"""``python -m procgroup.launch``: a local rank as the first argument, or only in the environment."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

import two_hosts
from two_hosts import Host
from world import free_port, run_command

Process = subprocess.Popen[str]

SHOW_WORLD = """
    import os, sys
    import numpy as np
    import procgroup as dist
    dist.init_process_group()
    total = np.array([float(os.environ["RANK"])])
    dist.all_reduce(total)
    size, node = os.environ["WORLD_SIZE"], os.environ["GROUP_RANK"]
    print(f"rank {dist.get_rank()} of {size}, node {node}, {sys.argv[1:]}, sum {total[0]}")
    dist.destroy_process_group()
"""
SHOW = "import os, sys; print(os.environ['LOCAL_RANK'], sys.argv[1:])"


def launch(launcher: Any, *arguments: str) -> Any:
    return run_command([sys.executable, "-m", "procgroup.launch", *arguments])


def test_each_rank_gets_its_local_rank_before_the_user_s_arguments(launcher: Any) -> None:
    script = str(launcher.script(SHOW))
    done = launch(launcher, "--nproc_per_node=2", script, "--epochs", "3")
    assert sorted(done.stdout.splitlines()) == [
        "[rank 0] 0 ['--local-rank=0', '--epochs', '3']",
        "[rank 1] 1 ['--local-rank=1', '--epochs', '3']",
    ]


@pytest.mark.parametrize("flag", ["--use-env", "--use_env"])
def test_with_use_env_it_gets_none(launcher: Any, flag: str) -> None:
    done = launch(launcher, "--nproc-per-node", "2", flag, str(launcher.script(SHOW)), "x")
    assert sorted(done.stdout.splitlines()) == ["[rank 0] 0 ['x']", "[rank 1] 1 ['x']"]


def test_no_python_needs_use_env(launcher: Any) -> None:
    done = launch(launcher, "--no-python", "sh", "-c", "true")
    assert done.returncode == 2
    assert "--no-python needs --use-env" in done.stderr
    done = launch(launcher, "--no-python", "--use-env", "sh", "-c", "echo $LOCAL_RANK")
    assert done.stdout == "[rank 0] 0\n"


def test_it_is_a_command_too_and_passes_the_exit_code_on(launcher: Any) -> None:
    done = launcher.run("import sys; sys.exit(17)", command="launch")
    assert done.returncode == 17


def launch_node(
    script: Path, node: int, address: str, port: int, *flags: str, inside: Callable[[Sequence[str]], list[str]] = list
) -> Process:
    """Start one of two nodes as torch.distributed.launch's documentation has it.

    ``inside`` returns the command that runs a command on the node's host.
    """
    place = ["--nnodes=2", f"--node_rank={node}", f"--master_addr={address}", f"--master_port={port}"]
    command = ["-m", "procgroup.launch", "--nproc_per_node=2", *place, *flags, str(script), "--epochs=3"]
    return subprocess.Popen(
        inside([sys.executable, *command]), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def expect_four_ranks(nodes: Sequence[Process], uses_env: bool) -> None:
    """Wait for two nodes of two ranks each, and expect the place, the arguments and the sum that every rank shows."""
    try:
        shown = [node.communicate(timeout=120) for node in nodes]
    finally:
        for node in nodes:
            node.kill()
            node.wait()
    assert [node.returncode for node in nodes] == [0, 0], shown
    lines = sorted(line.partition("] ")[2] for output, _ in shown for line in output.splitlines())
    arguments = [["--epochs=3"] if uses_env else [f"--local-rank={rank % 2}", "--epochs=3"] for rank in range(4)]
    assert lines == [f"rank {rank} of 4, node {rank // 2}, {arguments[rank]}, sum 6.0" for rank in range(4)]


@pytest.mark.parametrize("flags", [(), ("--use-env",)])
def test_each_rank_of_two_nodes_gets_its_rank_on_its_node(launcher: Any, flags: tuple[str, ...]) -> None:
    script, port = launcher.script(SHOW_WORLD), free_port()
    nodes = [launch_node(script, node, "127.0.0.1", port, *flags) for node in (1, 0)]
    expect_four_ranks(nodes, uses_env=bool(flags))


@pytest.fixture
def hosts() -> Iterator[tuple[Host, Host]]:
    if lack := two_hosts.lacks():
        pytest.skip(lack)
    with two_hosts.joined() as made:
        yield made


@pytest.mark.parametrize(
    ("order", "flags"),
    [
        ((1, 0), ()),
        ((0, 1), ("--use-env",)),
        pytest.param((0, 1), (), marks=pytest.mark.slow),
        pytest.param((1, 0), ("--use-env",), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_nodes_on_two_hosts_meet_at_the_address_of_node_0_in_either_order(
    launcher: Any, hosts: tuple[Host, Host], order: tuple[int, int], flags: tuple[str, ...]
) -> None:
    script = launcher.script(SHOW_WORLD)
    address = hosts[0].address
    nodes = [launch_node(script, node, address, 29500, *flags, inside=hosts[node].command) for node in order]
    expect_four_ranks(nodes, uses_env=bool(flags))


def test_a_node_without_the_others_ends_with_the_reason(launcher: Any) -> None:
    flags = [f"--master_port={free_port()}", "--rdzv-conf", "timeout=1", "--nnodes=2", "--node_rank=1"]
    done = launch(launcher, *flags, str(launcher.script(SHOW)))
    assert done.returncode == 1
    assert "the nodes have not come together within 1 s" in done.stderr
