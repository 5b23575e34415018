"""The store of tasks whose launcher sets no MASTER_ADDR, for env://, slurm:// and mpi://.

============================  ==========================================================================
mpiexec (MPICH, Intel, ...)   rank 0's store on a free port, announced by PMI, with a secret
mpiexec (Open MPI)            the same by PMIx, or by MPI where the program has loaded it
srun                          the first node of the step, a port that job and step determine; no secret
a Kubernetes Indexed Job      the pod with index 0, port 29500; no secret
============================  ==========================================================================

Where no secret is made, PROCGROUP_JOB_KEY in the environment of all tasks is one.
"""

from __future__ import annotations

import os

from procgroup.cluster import kubernetes, slurm, task_launcher
from procgroup.cluster.task_launcher import LauncherTask
from procgroup.errors import RendezvousConflict
from procgroup.process import environ
from procgroup.rendezvous import announced_store, hosting
from procgroup.stores.store import Store
from procgroup.types import Endpoint, Timeout


def open_store(task: LauncherTask, *, rank: int, timeout: Timeout) -> Store | None:
    """Return the store that the launcher's tasks share, connected; None where nothing says where they meet.

    Raises RendezvousError when not all tasks come in ``timeout``, DistNetworkError when the store is not reached.
    """
    if announced_store.can_announce(task):
        return announced_store.open_store(task, rank=rank, timeout=timeout)
    found = meeting_point(task)
    if found is None:
        return None
    if task.launcher is task_launcher.SLURM and not environ.PROCGROUP_JOB.is_set():
        os.environ[environ.PROCGROUP_JOB.name] = slurm.step_name()
    return hosting.open_store(found.host, found.port, rank=rank, timeout=timeout)


def meeting_point(task: LauncherTask) -> Endpoint | None:
    """Return the host and port that follow from the launcher's variables; None where none do."""
    try:
        if task.launcher is task_launcher.SLURM:
            return slurm.meeting_point()
        if task.launcher is task_launcher.KUBERNETES:
            return kubernetes.meeting_point()
    except ValueError:
        return None  # the error about missing variables says what to set
    return None


def check_agreement(task: LauncherTask) -> None:
    """Raise RendezvousConflict where RANK or WORLD_SIZE of the environment contradicts the launcher's numbers.

    Both may be set to others than the launcher's, as by a launcher that one of its tasks has started.
    """
    rank, world_size = environ.RANK.get(), environ.WORLD_SIZE.get()
    is_whole = rank is not None and world_size is not None
    if rank not in (None, task.rank) and not (is_whole and world_size != task.world_size):
        raise conflict(task, environ.RANK.name, rank, task.launcher.rank, task.rank)
    if not is_whole and task.world_size is not None and world_size not in (None, task.world_size):
        raise conflict(task, environ.WORLD_SIZE.name, world_size, task.launcher.world_size, task.world_size)


def conflict(task: LauncherTask, name: str, value: int | None, its_name: str, number: int | None) -> RendezvousConflict:
    """Return the error about a number that is not the launcher's."""
    return RendezvousConflict(
        f"{name}={value} contradicts {its_name}={number}, which {task.launcher.name} set for this task. Unset "
        "RANK and WORLD_SIZE to use the launcher's numbers; or pass rank= and world_size= to use others."
    )
