"""A log file to which many processes append batches of records, with locks that show which processes still run.

::

    | magic line | batch | batch | ...            everything is appended under the *mutex*
    batch:   | u32 length | u32 CRC-32 | records: `length` bytes |
    record:  | u8 kind | u64 caller | u32 number | u32 length | data: `length` bytes |

A *member* is one open file of this kind; it has a *slot*, a number. While the file is open, the member holds a lock
on one byte far behind the end of the file, at an offset given by the slot. The kernel releases that lock when the
process ends, however it ends and on whichever host: so a file without locked slots is *stale*, and need not be deleted
by hand. The mutex is another such byte. These are open-file-description locks: they belong to the open file, so they
also exclude threads of one process from each other.

A batch whose writer was killed has a wrong length or checksum and is the last batch; the next process that holds the
mutex truncates it. A batch that does not fit on the disk is truncated by its writer.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import struct
import time
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from procgroup.errors import DistStoreError

MAGIC = b"procgroup FileStore 3\n"
_FRAME = struct.Struct("<II")
_RECORD = struct.Struct("<BQII")
_LOCK = struct.Struct("hhqqi4x")  # struct flock: type, whence, start, length, pid
_MUTEX = 1 << 62
_FIRST_SLOT = _MUTEX + 1
_LONGEST_PAUSE = 0.01


class LogRecord(NamedTuple):
    """One record: its kind, the number of its writer, the writer's number for it, and its data."""

    kind: int
    caller: int
    number: int
    data: bytes


class RequestLog:
    """One open log file. Not thread-safe."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.descriptor: int = -1
        self.offset: int = 0
        self.open()

    def open(self) -> None:
        """Open the file, or open it again, at its beginning."""
        self.close()
        try:
            self.descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise DistStoreError(f"FileStore cannot open {self.path!r}: {error.strerror}") from error
        self.offset = 0

    def close(self) -> None:
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1

    @contextlib.contextmanager
    def mutex(self, limit: float) -> Iterator[None]:
        """Hold the file's mutex. Raises DistStoreError when it is not free within ``limit`` seconds."""
        deadline = time.monotonic() + limit
        pause = 0.0002
        while not self._lock(fcntl.F_WRLCK, _MUTEX):
            if time.monotonic() >= deadline:
                raise DistStoreError(
                    f"FileStore could not lock {self.path!r} within {limit:g} s: another process holds it. "
                    "Look for one that is stopped."
                )
            time.sleep(pause)
            pause = min(pause * 2, _LONGEST_PAUSE)
        try:
            yield
        finally:
            self._lock(fcntl.F_UNLCK, _MUTEX)

    def hold_slot(self, slot: int) -> None:
        """Lock the slot until this file is closed, which shows that its member still runs."""
        self._lock(fcntl.F_WRLCK, _FIRST_SLOT + slot)

    def is_held(self, slot: int) -> bool:
        """Return whether another open file holds the slot's lock: whether that member still runs."""
        answer = self._control(fcntl.F_OFD_GETLK, fcntl.F_WRLCK, _FIRST_SLOT + slot)
        return bool(_LOCK.unpack(answer)[0] != fcntl.F_UNLCK)

    def _lock(self, kind: int, place: int) -> bool:
        try:
            self._control(fcntl.F_OFD_SETLK, kind, place)
        except OSError as error:
            if error.errno in (errno.EAGAIN, errno.EACCES):
                return False
            raise DistStoreError(
                f"FileStore cannot lock {self.path!r}: {errno.errorcode.get(error.errno or 0)} ({error.strerror}). "
                "Use a path on a file system with locks, such as a local disk, or a TCPStore."
            ) from error
        return True

    def _control(self, command: int, kind: int, place: int) -> bytes:
        return fcntl.fcntl(self.descriptor, command, _LOCK.pack(kind, os.SEEK_SET, place, 1, 0))

    def is_replaced(self) -> bool:
        """Return whether the path no longer refers to this file."""
        try:
            there = Path(self.path).stat()
        except FileNotFoundError:
            return True
        mine = os.fstat(self.descriptor)
        return (there.st_dev, there.st_ino) != (mine.st_dev, mine.st_ino)

    def size(self) -> int:
        return os.fstat(self.descriptor).st_size

    def read_new(self) -> list[LogRecord]:
        """Return the records appended since the last call, and truncate an unfinished batch. Requires the mutex."""
        data = self._read_from(self.offset)
        records: list[LogRecord] = []
        at = 0
        if self.offset == 0 and data:
            at = self._skip_magic(data)
        while (end := _batch_end(data, at)) is not None:
            records.extend(_unpack(data[at + _FRAME.size : end]))
            at = end
        if at < len(data):
            os.ftruncate(self.descriptor, self.offset + at)
        self.offset += at
        return records

    def _read_from(self, offset: int) -> bytes:
        left = self.size() - offset
        parts = []
        while left > 0 and (part := os.pread(self.descriptor, left, offset)):
            parts.append(part)
            offset += len(part)
            left -= len(part)
        return b"".join(parts)

    def _skip_magic(self, data: bytes) -> int:
        if data.startswith(MAGIC):
            return len(MAGIC)
        if MAGIC.startswith(data):
            return 0  # the writer of the first line was killed
        raise DistStoreError(f"{self.path!r} is not a procgroup FileStore. Delete it, or choose another path.")

    def append(self, records: Iterable[LogRecord]) -> None:
        """Write a batch, completely or not at all. Requires the mutex, and that all records were read."""
        body = b"".join(map(_pack, records))
        batch = _FRAME.pack(len(body), zlib.crc32(body)) + body
        if self.offset == 0:
            batch = MAGIC + batch
        try:
            self._write_at(self.offset, batch)
        except OSError as error:
            with contextlib.suppress(OSError):
                os.ftruncate(self.descriptor, self.offset)
            raise DistStoreError(
                f"FileStore cannot write {len(batch)} bytes to {self.path!r}: {error.strerror}. "
                "Nothing was stored. Free some space, or choose another path."
            ) from error
        self.offset += len(batch)

    def _write_at(self, offset: int, data: bytes) -> None:
        view = memoryview(data)
        while view:
            written = os.pwrite(self.descriptor, view, offset)
            offset += written
            view = view[written:]

    def clear(self) -> None:
        """Delete all records. Requires the mutex."""
        os.ftruncate(self.descriptor, 0)
        self.offset = 0


def _pack(record: LogRecord) -> bytes:
    return _RECORD.pack(record.kind, record.caller, record.number, len(record.data)) + record.data


def _unpack(body: bytes) -> Iterator[LogRecord]:
    at = 0
    while at < len(body):
        kind, caller, number, length = _RECORD.unpack_from(body, at)
        at += _RECORD.size
        yield LogRecord(kind, caller, number, body[at : at + length])
        at += length


def _batch_end(data: bytes, at: int) -> int | None:
    """Return the end of the batch at ``at``; None when the batch is incomplete."""
    if len(data) < at + _FRAME.size:
        return None
    length, checksum = _FRAME.unpack_from(data, at)
    end = at + _FRAME.size + length
    if len(data) < end or zlib.crc32(data[at + _FRAME.size : end]) != checksum:
        return None
    return int(end)
