"""SlurmStore and MPIStore: the store that the tasks of one launcher share, made without an address."""

from __future__ import annotations

from collections.abc import Iterator

from procgroup.rendezvous.tasks import mpi_rendezvous, slurm_rendezvous
from procgroup.stores.prefix import PrefixStore
from procgroup.stores.store import Store
from procgroup.types import DEFAULT_STORE_TIMEOUT, Timeout


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
