"""slurm:// and mpi://: the rank, the world size and the place where the ranks meet are those of srun, or of mpiexec.

No address is given. mpi:// reads the variables that mpiexec sets for its tasks; MPI itself is not used.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from procgroup.errors import RendezvousError
from procgroup.rendezvous import urls
from procgroup.stores.store import Store
from procgroup.types import DEFAULT_TIMEOUT, Timeout

if TYPE_CHECKING:
    from procgroup.cluster.task_launcher import Task, TaskLauncher


def slurm_rendezvous(url: str, timeout: Timeout = DEFAULT_TIMEOUT, **_: Any) -> Iterator[tuple[Store, int, int]]:
    """Yield (store, rank, world size) of this task of srun.

    Raises ValueError for a URL with an address, RendezvousError when this process is no task of srun or nothing says
    where the tasks meet, RendezvousConflict when the environment or an argument contradicts srun's numbers.
    """
    from procgroup.cluster import task_launcher

    yield _meet(url, (task_launcher.SLURM,), timeout)


def mpi_rendezvous(url: str, timeout: Timeout = DEFAULT_TIMEOUT, **_: Any) -> Iterator[tuple[Store, int, int]]:
    """Yield (store, rank, world size) of this task of mpiexec, or of srun, which starts MPI programs, too.

    Raises what slurm_rendezvous raises.
    """
    from procgroup.cluster import task_launcher

    mpiexecs = task_launcher.OPEN_MPI, task_launcher.HYDRA, task_launcher.PALS, task_launcher.PMI
    yield _meet(url, (*mpiexecs, task_launcher.SLURM), timeout)


def _meet(url: str, launchers: tuple[TaskLauncher, ...], timeout: Timeout) -> tuple[Store, int, int]:
    from procgroup.rendezvous import launched

    scheme = _scheme(url)
    task, rank, world_size = _placed(scheme, launchers)
    _check_query(url, task)
    launched.check_agreement(task)
    urls.check(rank, world_size)
    if world_size == 1:
        from procgroup.stores.hash import HashStore

        return HashStore(), rank, world_size
    store = launched.open_store(task, rank=rank, timeout=timeout)
    if store is None:
        raise RendezvousError(
            f"{scheme}:// does not find where the tasks of {task.launcher.name} meet, which shows {task.described()}. "
            "Use env:// and set MASTER_ADDR to rank 0's host and MASTER_PORT to a free port there, on every rank."
        )
    return store, rank, world_size


def _scheme(url: str) -> str:
    """Return the URL's scheme. Raises ValueError for one with an address."""
    parts = urlsplit(url)
    if parts.netloc or parts.path.strip("/"):
        scheme = parts.scheme
        raise ValueError(f"{scheme}:// finds the address itself, got {url!r}. Write {scheme}://, or tcp://host:port.")
    return parts.scheme


def _placed(scheme: str, launchers: tuple[TaskLauncher, ...]) -> tuple[Task, int, int]:
    """Return this task, its rank and the world size. Raises RendezvousError for a task of no such launcher."""
    from procgroup.cluster import task_launcher

    task = task_launcher.detect()
    if task is not None and task.launcher in launchers and task.rank is not None and task.world_size is not None:
        return task, task.rank, task.world_size
    found = f"by {task.launcher.name} ({task.described()})" if task is not None else "by no launcher that is known"
    raise RendezvousError(
        f"{scheme}:// is for tasks of {', '.join(launcher.name for launcher in launchers)}; this process was started "
        f"{found}. Start it with one of these, or use env://, which takes the launcher that there is."
    )


def _check_query(url: str, task: Task) -> None:
    """Raise RendezvousConflict where the rank or the world size that was passed is not the launcher's."""
    from procgroup.rendezvous.launched import conflict

    rank, world_size = urls.from_query(url)
    if rank not in (None, task.rank):
        raise conflict(task, "rank", rank, task.launcher.rank, task.rank)
    if world_size not in (None, task.world_size):
        raise conflict(task, "world_size", world_size, task.launcher.world_size, task.world_size)
