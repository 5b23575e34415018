"""The pages on several hosts and on Slurm do what they say: between network namespaces, and under a real Slurm."""

from __future__ import annotations

import os
import re
import shlex
import socket
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import mpi_world
import two_hosts
import world
from documentation.operation_pages import FOR_MPI4PY
from documentation.page_programs import ROOT, blocks
from documentation.test_documentation import can_run, provide_commands

pytestmark = [pytest.mark.slow]

SEVERAL_HOSTS = ROOT / "docs" / "several_hosts.md"
SLURM = ROOT / "docs" / "slurm.md"
COMMAND = re.compile(r"^host([12])\$ (.*)\n((?:(?!host[12]\$).+\n)*)", re.MULTILINE)


@pytest.fixture
def hosts() -> Iterator[tuple[two_hosts.Host, two_hosts.Host]]:
    if lack := two_hosts.lacks():
        pytest.skip(lack)
    with two_hosts.joined() as made:
        yield made


def provide_program(directory: Path) -> None:
    provide_commands(directory)
    (program,) = (block.text for block in blocks(SEVERAL_HOSTS) if block.language == "python")
    (directory / "train.py").write_text(program)


@pytest.mark.parametrize("number", range(4), ids=["fixed addresses", "elastic", "by hand", "torchrun"])
@pytest.mark.parametrize("first", [0, 1], ids=["host1 first", "host2 first"])
def test_the_lines_for_two_hosts_start_a_job(
    number: int, first: int, hosts: tuple[two_hosts.Host, two_hosts.Host], tmp_path: Path
) -> None:
    provide_program(tmp_path)
    pages_commands = [found for block in blocks(SEVERAL_HOSTS) if (found := COMMAND.findall(block.text))]
    commands = pages_commands[number]
    if not can_run(commands[0][1], tmp_path):
        pytest.skip("torchrun is not installed")
    key = f"PROCGROUP_JOB_KEY={os.urandom(32).hex()}"
    environment = {"PATH": f"{tmp_path}/bin:{os.environ['PATH']}"}

    def start(command: tuple[str, str, str]) -> None:
        host, line, expected = command
        line = line.replace("PROCGROUP_JOB_KEY=KEY", key)
        expected = expected.replace(f" host{host}]", f" {socket.gethostname()}]")  # both hosts are this machine
        inside = hosts[int(host) - 1].command(["bash", "-c", line])
        done = world.run_command(inside, directory=tmp_path, environment=environment, timeout=250)
        assert done.returncode == 0, done.stderr
        assert sorted(done.stdout.splitlines()) == sorted(expected.splitlines()), done.stderr
        assert "without a job key" not in done.stderr

    with ThreadPoolExecutor(2) as pool:
        running = [pool.submit(start, command) for command in (commands if first == 0 else reversed(commands))]
        for each in running:
            each.result()


def provide_program_of_slurm(directory: Path) -> None:
    provide_commands(directory)
    (program,) = (block.text for block in blocks(SLURM) if block.language == "python")
    (directory / "train.py").write_text(program)


def line_of_slurm(name: str) -> str:
    """Return the page's line that starts the ranks with this launcher."""
    (lines,) = (block.text for block in blocks(SLURM) if block.language == "bash")
    (line,) = (line for line in lines.splitlines() if line.startswith(f"{name} "))
    return line


def test_the_line_for_srun_starts_the_ranks(slurm: Mapping[str, str], tmp_path: Path) -> None:
    provide_program_of_slurm(tmp_path)
    environment = {**slurm, "PATH": f"{tmp_path}/bin:{slurm['PATH']}"}
    command = shlex.split(line_of_slurm("srun"))
    done = world.run_command(command, directory=tmp_path, environment=environment, timeout=250)
    expected = [f"rank {rank} of 4, local rank {rank}: the sum is 10" for rank in range(4)]
    assert sorted(done.stdout.splitlines()) == expected, done.stderr


needs_mpich = pytest.mark.skipif(bool(mpi_world.lacks("mpich")), reason=mpi_world.lacks("mpich"))


@needs_mpich
def test_the_line_for_mpiexec_starts_the_ranks(tmp_path: Path) -> None:
    provide_program_of_slurm(tmp_path)
    environment = {"PATH": f"{tmp_path}/bin:{os.environ['PATH']}"}
    line = line_of_slurm("mpiexec").replace("mpiexec", mpi_world.mpiexec("mpich", 4)[0], 1)
    done = world.run_command(["bash", "-c", line], directory=tmp_path, environment=environment)
    expected = [f"rank {rank} of 4, local rank {rank}: the sum is 10" for rank in range(4)]
    assert sorted(done.stdout.splitlines()) == expected, done.stderr


@needs_mpich
def test_the_program_of_mpi4py_prints_what_ours_does(tmp_path: Path) -> None:
    program = next(block.text for block in blocks(FOR_MPI4PY) if "from mpi4py import MPI" in block.text)
    (tmp_path / "heat_mpi.py").write_text(program)
    shown = next(block.text for block in blocks(FOR_MPI4PY) if block.language == "console")
    done = mpi_world.run_program("mpich", 4, tmp_path / "heat_mpi.py", timeout=60)
    assert f"[rank 0] {done.stdout}" == shown.split("\n", 1)[1], done.stderr
