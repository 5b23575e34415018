"""Recognise the launcher that started this process as a task, and the task's rank, by variables.

These launchers number their tasks, each in variables of its own, and set none of torch.distributed's RANK,
WORLD_SIZE, MASTER_ADDR and MASTER_PORT: Slurm's srun, the mpiexec of Open MPI, MPICH, Intel MPI and HPE Cray (PALS),
Kubernetes Indexed Jobs (JobSet makes such Jobs), and Ray.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import NamedTuple


class TaskLauncher(NamedTuple):
    """A kind of launcher, and its variables for a task's rank and the like; "" where it has no such variable.

    A process is one of its tasks when all variables of ``marks`` are set.
    """

    name: str
    marks: tuple[str, ...]
    rank: str = ""
    world_size: str = ""
    local_rank: str = ""
    local_world_size: str = ""


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
RAY = TaskLauncher(name="Ray", marks=("RAY_JOB_ID", "RAY_RAYLET_PID"))
SLURM = TaskLauncher(
    name="srun (Slurm)",
    marks=("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_PROCID"),
    rank="SLURM_PROCID",
    world_size="SLURM_STEP_NUM_TASKS",
    local_rank="SLURM_LOCALID",
)
SLURM_BATCH = TaskLauncher(name="Slurm, outside srun", marks=("SLURM_JOB_ID",))
PMI = TaskLauncher(name="an MPI launcher (PMI)", marks=("PMI_RANK", "PMI_SIZE"), rank="PMI_RANK", world_size="PMI_SIZE")
KUBERNETES = TaskLauncher(name="a Kubernetes Indexed Job", marks=("JOB_COMPLETION_INDEX",), rank="JOB_COMPLETION_INDEX")

# In a Slurm job, tasks of an MPI launcher and actors of Ray inherit the variables of the srun that started their
# daemons, and srun can set PMI_RANK itself. So the launchers that may run inside another one come first.
ALL = (OPEN_MPI, HYDRA, PALS, RAY, SLURM, SLURM_BATCH, PMI, KUBERNETES)

_FIRST_SPECIAL_STEP = 0xFFFF_FFF0
"""The first SLURM_STEP_ID that is not a step of srun: the batch script, salloc's shell, a login by ssh."""


class LauncherTask(NamedTuple):
    """This process as a launcher's task: the launcher, and its variables with their values."""

    launcher: TaskLauncher
    variables: Mapping[str, str]

    @property
    def rank(self) -> int | None:
        """The launcher's number of this task; None where it has none."""
        return self._number(self.launcher.rank)

    @property
    def world_size(self) -> int | None:
        """The number of tasks that the launcher started; None where it sets no such variable."""
        return self._number(self.launcher.world_size)

    @property
    def local_rank(self) -> int | None:
        """The launcher's number of this task on its host; None where it has none."""
        return self._number(self.launcher.local_rank)

    @property
    def is_on_one_host(self) -> bool:
        """Whether all tasks of the launcher are known to be on one host."""
        if self.launcher is SLURM:
            return self.variables.get("SLURM_STEP_NUM_NODES") == "1"
        local_size = self._number(self.launcher.local_world_size)
        return local_size is not None and local_size == self.world_size

    def described(self) -> str:
        """Return the variables as text: ``SLURM_JOB_ID=17, SLURM_PROCID=1``."""
        return ", ".join(f"{name}={value}" for name, value in self.variables.items())

    def _number(self, name: str) -> int | None:
        """Read a variable. Raises ValueError, which names it, for anything but digits."""
        text = self.variables.get(name)
        if text is None:
            return None
        if not (text.isascii() and text.isdigit()):
            raise ValueError(f"{name}={text!r}, which {self.launcher.name} sets, is not a number. Unset or correct it.")
        return int(text)


def detect(environment: Mapping[str, str] | None = None) -> LauncherTask | None:
    """Return the task that the environment (by default this process's) describes; None without a launcher."""
    environment = os.environ if environment is None else environment
    for launcher in ALL:
        if all(map(environment.get, launcher.marks)) and not (launcher is SLURM and _is_special_step(environment)):
            extra = ("SLURM_STEP_NODELIST", "SLURM_STEP_NUM_NODES") if launcher is SLURM else ()
            place = (launcher.rank, launcher.world_size, launcher.local_rank, launcher.local_world_size, *extra)
            names = dict.fromkeys((*launcher.marks, *filter(None, place)))
            return LauncherTask(launcher, {name: environment[name] for name in names if environment.get(name)})
    return None


def _is_special_step(environment: Mapping[str, str]) -> bool:
    step = environment["SLURM_STEP_ID"]
    return not step.isdigit() or int(step) >= _FIRST_SPECIAL_STEP
