"""Where the flight records of a job are kept: one file for each rank, which outlives its process.

::

    /dev/shm/procgroup-1000/        PROCGROUP_RECORD_DIR, or a directory of the user's own
        3f9ac21b07/                 a job: the processes that have met at one store
            0-1.record              rank 0, its first process group
            1-1.record

In memory (/dev/shm), because a page of a file on a disk or a network file system may make its writer wait. When a
job begins, the records of older ones are removed, oldest first, until those of 16 jobs and 32 MiB are left. A rank
holds a shared lock on its file while it lives, so that no record of a running job is removed.

The form of a record is in native/runtime/flight_record.hpp.
"""

from __future__ import annotations

import fcntl
import os
import stat
import sys
from contextlib import suppress
from pathlib import Path

from procgroup.process import environ, state

SUFFIX = ".record"
KEPT_JOBS = 16
KEPT_BYTES = 32 << 20
# Of the process groups that a process makes one after the other, so many records are kept.
_KEPT_OF_PROCESS = 8


def directory() -> Path | None:
    """Return the directory that holds the directories of all jobs; None when no records are to be kept."""
    chosen = environ.PROCGROUP_RECORD_DIR.get()
    if chosen:
        return None if chosen == "none" else Path(chosen)
    base = "/dev/shm" if os.access("/dev/shm", os.W_OK) else environ.TMPDIR.get()
    return Path(base, f"procgroup-{os.getuid()}")


def new_file(job: str, rank: int) -> str:
    """Return the path of a new record of this rank; "" where none can be kept. ``job`` is the same on all ranks."""
    if state.recorded_process != os.getpid():  # also in a forked child
        state.recorded_process, state.job_directory, state.records = os.getpid(), None, []
    root = directory()
    if root is None or not _is_own(root):
        return ""
    if state.job_directory is None:
        state.job_directory = root / job
        if not state.job_directory.exists():
            remove_old(root, state.job_directory)
    if not _is_own(state.job_directory):
        return ""
    path = state.job_directory / f"{rank}-{len(state.records) + 1}{SUFFIX}"
    state.records.append(path)
    if len(state.records) > _KEPT_OF_PROCESS:
        _remove(state.records[-_KEPT_OF_PROCESS - 1])
    return str(path)


def job_name() -> str:
    """Return the name that the launcher gave this job; "" when it has none."""
    name = environ.TORCHELASTIC_RUN_ID.get() or environ.PROCGROUP_JOB.get()
    return "" if name == "none" else name


def program() -> str:
    """Return how this process was started, for people."""
    return " ".join(argument.encode("ascii", "replace").decode() for argument in sys.argv)


def remove_old(root: Path, new: Path) -> None:
    """Remove the oldest records of jobs that have ended, until there is room for those of a ``new`` one.

    One process at a time: to remove a record changes the time by which a job is the newest.
    """
    with suppress(OSError):
        place = os.open(root, os.O_RDONLY | os.O_CLOEXEC)
        try:
            fcntl.flock(place, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _remove_oldest(root, new)
        finally:
            os.close(place)


def _remove_oldest(root: Path, new: Path) -> None:
    jobs = []
    with suppress(OSError):
        for path in root.iterdir():
            found = path.lstat()
            if stat.S_ISDIR(found.st_mode) and path != new:
                jobs.append((found.st_mtime, path, sum(record.lstat().st_size for record in path.iterdir())))
    jobs.sort(reverse=True)
    total = 0
    for number, (_, path, size) in enumerate(jobs, start=2):
        total += size
        if number > KEPT_JOBS or total > KEPT_BYTES:
            _remove_job(path)


def is_in_use(path: Path) -> bool:
    """Return whether the process that writes this record lives; it may be stopped."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(file)
    return False


def _is_own(path: Path) -> bool:
    """Make a directory that only this user can use; return whether it is one, also when it was there before."""
    try:
        path.mkdir(0o700)
    except FileExistsError:
        pass
    except OSError:
        return False
    try:
        found = path.lstat()
    except OSError:
        return False
    # Others can make directories of any name in /dev/shm, too.
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid()


def _remove_job(job: Path) -> None:
    with suppress(OSError):
        paths = [path for path in job.iterdir() if path.suffix == SUFFIX]
        if any(map(is_in_use, paths)):
            return
        for path in paths:
            _remove(path)
        job.rmdir()


def _remove(path: Path) -> None:
    with suppress(OSError):
        path.unlink()
