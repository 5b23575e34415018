"""A file that many processes append to: locks, batches of records, and who is still there.

::

    | magic line | batch | batch | ...            everything is appended under the *mutex*
    batch:   | u32 length | u32 CRC-32 | records: `length` bytes |
    record:  | u8 kind | u64 caller | u32 number | u32 length | data: `length` bytes |

A *member* is one store object that has the file open; it has a *slot*, a number. While it lives it holds a
lock on one byte, far behind the end of the file, at its slot's place. The kernel drops that lock
when the process ends, however it ends and on whichever host it ran: so a file whose members are all
gone is known to be *stale*, and nobody has to remember to delete it. The mutex is another such byte.
These are open-file-description locks: they belong to the open file, so threads exclude each other too.

A batch that its writer did not finish, killed in the middle, has a wrong length or sum and is the last:
the next to hold the mutex cuts it off. A batch that does not fit on the disk is cut off by its writer.
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

MAGIC = b"procgroup FileStore 2\n"
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


class LogFile:
    """One open file of the kind that is drawn above. Not thread-safe."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.descriptor: int = -1
        self.offset: int = 0
        self.open()

    def open(self) -> None:
        """Open the file, or open it again; nothing of it has then been read."""
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
        """Hold the file for this process and thread alone. Raises DistStoreError when it is not to be had in time."""
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
        """Show that this slot's member lives, until this file is closed."""
        self._lock(fcntl.F_WRLCK, _FIRST_SLOT + slot)

    def is_held(self, slot: int) -> bool:
        """Tell whether the member of a slot, other than this file's own, lives."""
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
        """Tell whether the path no longer leads to this file."""
        try:
            there = Path(self.path).stat()
        except FileNotFoundError:
            return True
        mine = os.fstat(self.descriptor)
        return (there.st_dev, there.st_ino) != (mine.st_dev, mine.st_ino)

    def size(self) -> int:
        return os.fstat(self.descriptor).st_size

    def read_new(self) -> list[LogRecord]:
        """Return what was appended since the last call, and cut off what was not finished. Needs the mutex."""
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
            return 0  # its writer was killed in the first line
        raise DistStoreError(f"{self.path!r} is not a procgroup FileStore. Delete it, or choose another path.")

    def append(self, records: Iterable[LogRecord]) -> None:
        """Write a batch, whole or not at all. Needs the mutex, and that everything was read."""
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
        """Forget everything in the file. Needs the mutex."""
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
    """Return where the batch at ``at`` ends; None when it is not whole."""
    if len(data) < at + _FRAME.size:
        return None
    length, checksum = _FRAME.unpack_from(data, at)
    end = at + _FRAME.size + length
    if len(data) < end or zlib.crc32(data[at + _FRAME.size : end]) != checksum:
        return None
    return int(end)
