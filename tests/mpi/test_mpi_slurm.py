"""MPI programs under Slurm's srun: on one node, and on three nodes that have nothing but a network in common."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

import mpi_world
import slurm_cluster
import slurm_hosts
import world

PROGRAM = """
import os, socket, sys
import numpy as np
import procgroup as dist

dist.init_process_group(*sys.argv[1:])
rank, size = dist.get_rank(), dist.get_world_size()
total = np.array([rank + 1.0])
dist.all_reduce(total)
assert total[0] == size * (size + 1) / 2, total
blocks = [np.empty(1 << 17) for _ in range(size)]  # 1 MiB each
dist.all_gather(blocks, np.full(1 << 17, float(rank)))
assert [set(block) for block in blocks] == [{float(source)} for source in range(size)]
token = np.array([rank])
if rank > 0:
    dist.recv(token, src=rank - 1)
    token += rank
dist.send(token, dst=(rank + 1) % size)
if rank == 0:
    dist.recv(token, src=size - 1)
    assert token[0] == size * (size - 1) / 2, token
dist.destroy_process_group()
os.write(1, f"rank {rank} of {size} on {socket.gethostname()}\\n".encode())
"""

REFUSED = """
import os, sys
import procgroup as dist

try:
    dist.init_process_group(sys.argv[1])
except dist.DistBackendError as error:
    os.write(1, f"{error}\\n".encode())

from mpi4py import MPI
MPI.Finalize()  # else MPI's shared memory outlives the program
"""

PROCESS_MANAGEMENT = {"mpich": "--mpi=pmi2", "openmpi": "--mpi=pmix"}
"""The option with which srun answers what the ranks of this MPI ask when they start."""

BACKENDS = pytest.mark.parametrize("arguments", [[mpi_world.BACKEND], []], ids=["mpi", "built-in"])


@dataclass(frozen=True)
class Cluster:
    """A Slurm that runs: its nodes, their host names, and the environment of its commands."""

    nodes: Sequence[slurm_cluster.Node]
    host_names: Sequence[str]
    environment: dict[str, str]

    def run(self, command: Sequence[str], mpi: str, directory: Path) -> subprocess.CompletedProcess[str]:
        """Run a command on the first node, in the environment of programs that use this MPI."""
        environment = mpi_world.environment_of(mpi) | self.environment
        command = [*self.nodes[0].prefix, *command]
        return world.run_command(command, directory=directory, environment=environment)

    def received(self) -> list[int]:
        """Return how many bytes each node, a host of its own, has received from the others."""
        return [_received(node.prefix) for node in self.nodes]


@pytest.fixture(params=mpi_world.MPIS)
def mpi(request: pytest.FixtureRequest) -> str:
    """An MPI. Skips where it is missing."""
    if lack := mpi_world.lacks(request.param):
        pytest.skip(lack)
    return str(request.param)


@pytest.fixture(scope="module")
def one_node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    if lack := slurm_cluster.lacks():
        pytest.skip(lack)
    # PMIx knows a node by its host name: a rank finds how many ranks its node has where Slurm names the node so too.
    host = socket.gethostname()
    nodes = [slurm_cluster.Node(host, f"NodeAddr=127.0.0.1 Port={world.free_port()}")]
    controller, port = f"{host}(127.0.0.1)", world.free_port()
    with slurm_cluster.running_on(tmp_path_factory.mktemp("slurm"), nodes, controller, port) as environment:
        yield Cluster(nodes, [host], environment)


@pytest.fixture(scope="module")
def three_nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    if lack := slurm_hosts.lacks():
        pytest.skip(lack)
    with running_on_three_hosts(tmp_path_factory.mktemp("slurm")) as cluster:
        yield cluster


@contextmanager
def running_on_three_hosts(folder: Path) -> Iterator[Cluster]:
    """Start Slurm on three hosts, each with a folder of its own for the files of PMIx."""
    (folder / "tmp").mkdir()
    # The names of these files differ from job to job, not from node to node: on one machine the nodes would share them.
    (folder / "mpi.conf").write_text(f"PMIxCliTmpDirBase={folder}/tmp\n")
    with slurm_hosts.joined(folder, ["node1", "node2", "node3"]) as hosts:
        nodes = []
        for host in hosts:
            own = folder / f"tmp.{host.name}"
            own.mkdir()
            prefix = (*host.prefix, "sh", "-c", f'mount --bind {own} {folder}/tmp; exec "$@"', "sh")
            nodes.append(slurm_cluster.Node(host.name, f"NodeAddr={host.address}", prefix))
        controller, port = f"{hosts[0].name}({hosts[0].address})", world.free_port()
        with slurm_cluster.running_on(folder, nodes, controller, port) as environment:
            # MPICH's UCX takes hosts that share a kernel for one, and would go round the network.
            yield Cluster(nodes, [host.name for host in hosts], {**environment, "UCX_TLS": "tcp,self"})


@BACKENDS
def test_srun_starts_ranks_on_one_node(one_node: Cluster, mpi: str, arguments: list[str], tmp_path: Path) -> None:
    srun = ["srun", PROCESS_MANAGEMENT[mpi], "-n", "4"]
    assert start_ranks(one_node, srun, mpi, arguments, tmp_path) == [*one_node.host_names] * 4


@BACKENDS
def test_srun_starts_ranks_on_three_nodes(three_nodes: Cluster, mpi: str, arguments: list[str], tmp_path: Path) -> None:
    srun = ["srun", PROCESS_MANAGEMENT[mpi], "-N", "3", "-n", "4"]
    check_three_nodes(three_nodes, srun, mpi, arguments, tmp_path)


def test_mpiexec_starts_ranks_in_an_allocation(three_nodes: Cluster, mpi: str, tmp_path: Path) -> None:
    """It needs nothing of Slurm but srun: where srun lacks PMIx, Open MPI starts so."""
    options = ["--map-by", "slot"] if mpi == "openmpi" else []  # oversubscribed, it fills the first node
    command = ["salloc", "-Q", "-N", "3", "-n", "4", *mpi_world.mpiexec(mpi, 4, *options)]
    check_three_nodes(three_nodes, command, mpi, [mpi_world.BACKEND], tmp_path)


def test_tasks_that_srun_does_not_make_one_mpi_job_are_refused(one_node: Cluster, tmp_path: Path) -> None:
    if lack := mpi_world.lacks("mpich"):  # Open MPI's processes leave files behind, where each is a job of its own
        pytest.skip(lack)
    (tmp_path / "train.py").write_text(REFUSED)
    srun = ["srun", "--mpi=none", "-n", "2", sys.executable, "train.py", mpi_world.BACKEND]
    done = one_node.run(srun, "mpich", tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("ranks 0 and 1 are both rank 0 of 1 in MPI") == 2, done.stdout + done.stderr


def check_three_nodes(
    cluster: Cluster, launcher: Sequence[str], mpi: str, arguments: Sequence[str], directory: Path
) -> None:
    """Check that the ranks run on the nodes in order, and that their arrays pass the network."""
    before = cluster.received()
    assert start_ranks(cluster, launcher, mpi, arguments, directory) == ["node1", "node1", "node2", "node3"]
    received = [after - start for after, start in zip(cluster.received(), before, strict=True)]
    assert min(received) >= 2 << 20, received


def start_ranks(
    cluster: Cluster, launcher: Sequence[str], mpi: str, arguments: Sequence[str], directory: Path
) -> list[str]:
    """Start the program on four ranks; return the host name of each. Skips where srun has no PMIx."""
    (directory / "train.py").write_text(PROGRAM)
    command = [*launcher, sys.executable, "train.py", *arguments]
    done = cluster.run(command, mpi, directory)
    if "mpi/pmi2: invalid client request" in done.stderr:
        # MPICH and slurmstepd have misunderstood each other inside of MPI_Init: once in some hundred starts.
        done = cluster.run(command, mpi, directory)
    if "Invalid MPI type 'pmix'" in done.stderr:
        pytest.skip("srun cannot load PMIx: Debian's packages libpmix2 and libpmix-dev are not installed")
    assert done.returncode == 0, done.stderr + done.stdout
    places, host_names = zip(*(line.split(" on ") for line in sorted(done.stdout.splitlines())), strict=True)
    assert list(places) == [f"rank {rank} of 4" for rank in range(4)]
    return list(host_names)


def _received(prefix: Sequence[str]) -> int:
    devices = world.run_command([*prefix, "cat", "/proc/net/dev"]).stdout
    return int(devices.partition("eth0:")[2].split()[0])
