"""The log files of the ranks.

::

    <log directory>/<run id>/attempt_<n>/<rank>/stdout.log     and stderr.log, error.json: torchrun's layout
    <log directory>/<run id>/attempt_<n>/filtered_stdout.log   lines of all ranks that contain one of the words

The rank is the global one, so several hosts may share a directory. No file is ever overwritten: where a rank's
directory exists already, the attempt is written to attempt_<n>_1, attempt_<n>_2, ...
"""

from __future__ import annotations

import fcntl
import os
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from procgroup.process.environ import TMPDIR

MAX_LINE_BYTES = 1 << 20
"""A longer line is filtered as several lines."""

_PREFIX = "procgroup_"
_LOCK = "lock"

OnFailure = Callable[[Path, OSError], None]


class LogFile:
    """A file to which raw bytes are appended. The first failing write closes it and calls ``on_failure``."""

    def __init__(self, path: Path, on_failure: OnFailure) -> None:
        self._path = path
        self._on_failure = on_failure
        self._file: BinaryIO | None = None
        try:
            self._file = path.open("ab", buffering=0)
        except OSError as error:
            on_failure(path, error)

    def write(self, data: bytes) -> None:
        """Append all of the bytes; raises nothing."""
        if self._file is None:
            return
        try:
            left = memoryview(data)
            while left:
                left = left[self._file.write(left) :]
        except OSError as error:
            self.close()
            self._on_failure(self._path, error)

    def close(self) -> None:
        """Close the file; later data is dropped. Idempotent."""
        if self._file is not None:
            self._file.close()
            self._file = None


class LineFilter:
    """Copies the lines of one stream that contain one of the words to a file, which several streams may share."""

    def __init__(self, words: Sequence[str], prefix: str, log: LogFile) -> None:
        self._words = [word.encode() for word in words]
        self._prefix = prefix.encode()
        self._log = log
        self._partial = b""

    def feed(self, data: bytes) -> None:
        """Copy the matching lines of the data."""
        *lines, self._partial = (self._partial + data).split(b"\n")
        if len(self._partial) > MAX_LINE_BYTES:
            lines.append(self._partial)
            self._partial = b""
        for line in lines:
            if any(word in line for word in self._words):
                self._log.write(self._prefix + line + b"\n")

    def finish(self) -> None:
        """Copy a matching last line that has no newline."""
        if self._partial:
            self.feed(b"\n")


class JobDirectory:
    """The directory of one job, with a directory for each attempt."""

    def __init__(self, root: Path, run_id: str) -> None:
        name = re.sub(r"[/\0]", "_", run_id)
        self.path: Path = root / (name if name.strip(".") else f"run_{name}")

    def begin_attempt(self, attempt: int, ranks: Sequence[int]) -> Path:
        """Make the directories of an attempt's ranks; return the attempt's directory. Raises OSError."""
        path, number = self.path / f"attempt_{attempt}", 0
        while not _make_directories(path, ranks):
            number += 1
            path = self.path / f"attempt_{attempt}_{number}"
        return path


class TemporaryDirectory:
    """A directory that only this user may read. ``remove`` deletes it with its content.

    A launcher that is killed cannot call ``remove``. So each launcher holds a lock on a file in its directory, and the
    next launcher removes the directories whose locks are free.
    """

    def __init__(self) -> None:
        _remove_abandoned(Path(TMPDIR.get()))
        self.path: Path = make_private_directory()
        # The lock file gets its name when it is locked already, so that no other launcher locks it first.
        self._lock = os.open(self.path / "unlocked", os.O_CREAT | os.O_RDWR, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        (self.path / "unlocked").rename(self.path / _LOCK)

    def remove(self) -> None:
        _remove_with_lock(self.path)
        os.close(self._lock)
        _remove_abandoned(self.path.parent)


def make_private_directory() -> Path:
    """Make a directory in TMPDIR that only this user may read, and that is never removed. Raises OSError."""
    path = Path(TMPDIR.get(), f"{_PREFIX}{os.urandom(8).hex()}")
    path.mkdir(mode=0o700)
    return path


def _remove_abandoned(folder: Path) -> None:
    """Remove the directories of this user's launchers that have been killed."""
    for lock in folder.glob(f"{_PREFIX}*/{_LOCK}"):
        try:
            descriptor = os.open(lock, os.O_RDWR | os.O_NOFOLLOW)
        except OSError:
            continue  # another user's, or one that is being removed
        try:
            if os.fstat(descriptor).st_uid == os.geteuid():
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                _remove_with_lock(lock.parent)
        except OSError:
            pass  # its launcher lives
        finally:
            os.close(descriptor)


def _remove_with_lock(directory: Path) -> None:
    """Remove a directory, its lock last: if this launcher is killed meanwhile, the next one removes the rest."""
    import shutil  # not for every start of a program

    with suppress(OSError):  # another launcher removes it, too
        for entry in directory.iterdir():
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry, ignore_errors=True)
            elif entry.name != _LOCK:
                entry.unlink()
    shutil.rmtree(directory, ignore_errors=True)


def _make_directories(path: Path, ranks: Sequence[int]) -> bool:
    """Make a directory for each rank; return False, with nothing made, where one of them exists already."""
    path.mkdir(parents=True, exist_ok=True)
    made: list[Path] = []
    for rank in ranks:
        try:
            (path / str(rank)).mkdir()
        except FileExistsError:
            for directory in made:
                directory.rmdir()
            return False
        made.append(path / str(rank))
    return True
