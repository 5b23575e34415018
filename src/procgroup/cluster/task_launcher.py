"""Which launcher of tasks started this process, recognised by the variables that it sets.

These launchers number their tasks, each in variables of its own, and set none of torch.distributed's RANK,
WORLD_SIZE, MASTER_ADDR and MASTER_PORT: Slurm's srun, the mpiexec of Open MPI, MPICH, Intel MPI and HPE Cray (PALS),
Kubernetes Indexed Jobs, and Ray.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import NamedTuple


class TaskLauncher(NamedTuple):
    """A kind of launcher, and which of its variables tell a task's place; "" where it has none for that.

    A process is one of its tasks when all variables of ``marks`` are set and none of ``unless`` is. ``master_addr`` and
    ``master_port`` are POSIX shell text that finds the host of rank 0, and a port there, in every task.
    """

    name: str
    marks: tuple[str, ...]
    unless: tuple[str, ...] = ()
    rank: str = ""
    world_size: str = ""
    local_rank: str = ""
    local_world_size: str = ""
    master_addr: str = ""
    master_port: str = "29500"


# Jobs that share a node must not share a port.
_PORT_OF_JOB = "$((20000 + SLURM_JOB_ID % 10000))"

OPEN_MPI = TaskLauncher(
    name="mpiexec (Open MPI)",
    marks=("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    rank="OMPI_COMM_WORLD_RANK",
    world_size="OMPI_COMM_WORLD_SIZE",
    local_rank="OMPI_COMM_WORLD_LOCAL_RANK",
    local_world_size="OMPI_COMM_WORLD_LOCAL_SIZE",
)
HYDRA = TaskLauncher(
    name="mpiexec (MPICH or Intel MPI)",
    marks=("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID"),
    rank="PMI_RANK",
    world_size="PMI_SIZE",
    local_rank="MPI_LOCALRANKID",
    local_world_size="MPI_LOCALNRANKS",
)
PALS = TaskLauncher(
    name="mpiexec (PALS on HPE Cray)",
    marks=("PMI_RANK", "PMI_SIZE", "PALS_APID"),
    rank="PMI_RANK",
    world_size="PMI_SIZE",
    local_rank="PMI_LOCAL_RANK",
    local_world_size="PMI_LOCAL_SIZE",
)
SLURM = TaskLauncher(
    name="srun (Slurm)",
    marks=("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_PROCID"),
    rank="SLURM_PROCID",
    world_size="SLURM_NTASKS",
    local_rank="SLURM_LOCALID",
    master_addr='$(scontrol show hostnames "$SLURM_STEP_NODELIST" | head -n 1)',
    master_port=_PORT_OF_JOB,
)
SLURM_BATCH = SLURM._replace(name="Slurm, outside srun", marks=("SLURM_JOB_ID",), unless=("SLURM_STEP_ID",))
PMI = TaskLauncher(name="an MPI launcher (PMI)", marks=("PMI_RANK", "PMI_SIZE"), rank="PMI_RANK", world_size="PMI_SIZE")
KUBERNETES = TaskLauncher(
    name="a Kubernetes Indexed Job",
    marks=("JOB_COMPLETION_INDEX",),
    rank="JOB_COMPLETION_INDEX",
    master_addr="${HOSTNAME%-*}-0.SERVICE",
)
RAY = TaskLauncher(name="Ray", marks=("RAY_JOB_ID", "RAY_RAYLET_PID"))

# Inside a Slurm job an MPI launcher's tasks inherit the variables of the srun that started its daemons, and srun can
# set MPI's PMI_RANK itself: the launcher that is nearest to the task comes first.
ALL = (OPEN_MPI, HYDRA, PALS, SLURM, SLURM_BATCH, PMI, KUBERNETES, RAY)


class Task(NamedTuple):
    """This process as a launcher's task: the launcher, and the variables that told so, with their values."""

    launcher: TaskLauncher
    variables: Mapping[str, str]

    @property
    def is_on_one_host(self) -> bool:
        """Whether all tasks of the launcher are known to be on one host."""
        sizes = self.launcher.local_world_size, self.launcher.world_size
        return bool(all(sizes)) and self.variables.get(sizes[0]) == self.variables.get(sizes[1], "")


def detect(environment: Mapping[str, str] | None = None) -> Task | None:
    """Return the launcher that the environment (by default this process's) shows; None where it shows none."""
    environment = os.environ if environment is None else environment
    for launcher in ALL:
        if all(map(environment.get, launcher.marks)) and not any(map(environment.get, launcher.unless)):
            place = (launcher.rank, launcher.world_size, launcher.local_rank, launcher.local_world_size)
            names = dict.fromkeys((*launcher.marks, *filter(None, place)))
            return Task(launcher, {name: environment[name] for name in names if environment.get(name)})
    return None
