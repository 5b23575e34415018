"""slurm:// and mpi://: the rank, the world size and the place where the ranks meet are those of srun, or of mpiexec.

No address is given. mpi:// reads the variables that mpiexec sets for its tasks; MPI itself is not used. SlurmStore and
MPIStore are the stores that these tasks share.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from procgroup.errors import RendezvousError
from procgroup.rendezvous import urls
from procgroup.stores.prefix import PrefixStore
from procgroup.stores.store import Store
from procgroup.types import DEFAULT_STORE_TIMEOUT, DEFAULT_TIMEOUT, Timeout

if TYPE_CHECKING:
    from procgroup.cluster.task_launcher import LauncherTask, TaskLauncher


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

    parts = urlsplit(url)
    scheme = parts.scheme
    if parts.netloc or parts.path.strip("/"):
        raise ValueError(f"{scheme}:// finds the address itself, got {url!r}. Write {scheme}://, or tcp://host:port.")
    task, rank, world_size = _placed(scheme, launchers)
    query_rank, query_size = urls.from_query(url)
    if query_rank not in (None, rank):
        raise launched.conflict(task, "rank", query_rank, task.launcher.rank, rank)
    if query_size not in (None, world_size):
        raise launched.conflict(task, "world_size", query_size, task.launcher.world_size, world_size)
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


def _placed(scheme: str, launchers: tuple[TaskLauncher, ...]) -> tuple[LauncherTask, int, int]:
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


class _LauncherStore(PrefixStore):
    def __init__(self, found: Iterator[tuple[Store, int, int]], prefix: str, timeout: Timeout) -> None:
        store, rank, world_size = next(found)
        self.rank: int = rank
        self.world_size: int = world_size
        super().__init__(prefix, store)
        self.set_timeout(timeout)


class SlurmStore(_LauncherStore):
    """A store that the tasks of one srun share; rank 0 hosts it. The tasks also are the ranks of slurm://.

    ``rank`` and ``world_size`` are srun's numbers. ``timeout``, a timedelta or seconds, limits the start and is that of
    the waiting methods. Raises RendezvousError when this process is no task of srun.
    """

    def __init__(self, timeout: Timeout = DEFAULT_STORE_TIMEOUT) -> None:
        super().__init__(slurm_rendezvous("slurm://", timeout), "slurm_store", timeout)


class MPIStore(_LauncherStore):
    """A store that the tasks of one mpiexec share; rank 0 hosts it. The tasks also are the ranks of mpi://.

    ``rank`` and ``world_size`` are mpiexec's numbers. ``timeout``, a timedelta or seconds, limits the start and is that
    of the waiting methods. Raises RendezvousError when this process is no task of mpiexec.
    """

    def __init__(self, timeout: Timeout = DEFAULT_STORE_TIMEOUT) -> None:
        super().__init__(mpi_rendezvous("mpi://", timeout), "mpi_store", timeout)
