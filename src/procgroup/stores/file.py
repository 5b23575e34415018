"""The store that processes share through a file: on one host, or on a file system that they all see.

The file is a log of the requests that changed the table (log_file.py has its format). Each process runs them on a
native table of its own, in the file's order, and appends the requests of its own that change it. So all processes'
tables are equal once they have read the same records, and a request has the same result everywhere.

A request that has to wait for a key is not in the log: it is run again whenever the file has grown. A call of a barrier
is in the log from its beginning, since its arrival counts for the others; its reply comes from a later record.

Two more kinds of records, JOIN and LEAVE, list the processes that use the file. These records and the locks of the
processes that still run show what the file contains: nothing, the job of this process, a job that has ended (the file
is *stale* and is cleared), or another job that has all its processes (opening the file then fails).
"""

from __future__ import annotations

import contextlib
import itertools
import os
import struct
import threading
import time
import weakref
from collections.abc import Iterator
from pathlib import Path

from procgroup import _native
from procgroup.errors import DistStoreError
from procgroup.stores.log_file import LogRecord, RequestLog
from procgroup.stores.store import Store

Reply = tuple[int, bytes]
"""The status and the body of a reply, as the native table gives them."""

_JOIN, _LEAVE = 100, 101
_OTHER_JOB_SECONDS = 1.0
_OPEN_SECONDS = 5.0
_SHORTEST_PAUSE, _LONGEST_PAUSE = 0.0005, 0.02
_NUMBER = struct.Struct("<I")


class _FileStoreMembers:
    """The processes that have opened the file since it was cleared: by slot, "host:pid", and the slots that left."""

    def __init__(self) -> None:
        self.process: dict[int, str] = {}
        self.left: set[int] = set()

    def apply(self, record: LogRecord) -> None:
        if record.kind == _JOIN:
            self.process[record.caller] = record.data.decode()
        else:
            self.left.add(record.caller)


class SharedFile:
    """An open log file, the table that its records were run on, and the lock that threads take around both."""

    def __init__(self, path: str, world_size: int) -> None:
        self.path = path
        self.world_size = world_size
        self.users: int = 0  # the store and its clones
        # Reentrant: a collection of garbage may release a clone, which comes here, while its thread holds the lock.
        self.lock: threading.RLock = threading.RLock()
        self.file: RequestLog = RequestLog(path)
        self.slot: int = -1
        self.forked: bool = False
        self.caller: int = _random_caller()
        self.numbers: Iterator[int] = itertools.count()
        # The replies to this process's barrier calls that are in the log, by the calls' numbers; None: not yet.
        self.logged: dict[int, Reply | None] = {}
        self.table: _native.StoreTable = _native.StoreTable()
        self.members: _FileStoreMembers = _FileStoreMembers()
        self._join()
        _open.add(self)

    def _start_over(self) -> None:
        """Begin with an empty table, as before the first record of the file."""
        self.table = _native.StoreTable()
        self.members = _FileStoreMembers()
        self.file.offset = 0

    def _reopen(self) -> None:
        self.file.open()
        self._start_over()

    # --- requests ---

    def request(self, op: int, body: bytes, limit: float) -> Reply:
        """Run a request and return its reply; STORE_CANCELLED when it still waits after ``limit`` seconds."""
        deadline = time.monotonic() + limit
        number = self._next_number()
        pause = _SHORTEST_PAUSE
        try:
            while True:
                reply, seen = self._attempt(number, op, body, limit)
                if reply is not None:
                    return reply
                if time.monotonic() >= deadline:
                    return self._cancel(number, limit)
                while time.monotonic() < deadline and not self._has_grown(seen):
                    time.sleep(min(pause, max(0.0, deadline - time.monotonic())))
                    pause = min(pause * 1.5, _LONGEST_PAUSE)
        except BaseException:
            if number in self.logged:
                self._cancel(number, limit)
            raise
        finally:
            self.logged.pop(number, None)

    def _attempt(self, number: int, op: int, body: bytes, limit: float) -> tuple[Reply | None, int]:
        """Run the request unless it is in the log; return its reply if it has one, and how far the file was read."""
        with self._exclusive(limit):
            reply = self.logged[number] if number in self.logged else self._run(number, op, body)
            return reply, self.file.offset

    def _cancel(self, number: int, limit: float) -> Reply:
        """Cancel a request that waits; return its reply, which may have come meanwhile."""
        if number in self.logged:
            with self._exclusive(limit):
                if self.logged[number] is None:
                    self._apply(self._next_number(), _native.STORE_CANCEL, _NUMBER.pack(number))
        return self.logged.get(number) or (_native.STORE_CANCELLED, b"")

    def _run(self, number: int, op: int, body: bytes) -> Reply | None:
        """Run a request; return its reply, or None when it waits. Only a barrier call still waits on the table then."""
        changes = self.table.changes
        replies = self._apply(number, op, body)
        for caller, replied, status, data in replies:
            if (caller, replied) == (self.caller, number):
                return status, data
        if self.table.changes != changes:
            self.logged[number] = None
        else:
            self._apply(self._next_number(), _native.STORE_CANCEL, _NUMBER.pack(number))
        return None

    def _apply(self, number: int, op: int, body: bytes) -> list[tuple[int, int, int, bytes]]:
        """Run a request on the table, append it to the file if it changes the table, and return all replies."""
        changes = self.table.changes
        replies = self.table.run(self.caller, number, op, body)
        if self.table.changes != changes:
            try:
                self.file.append([LogRecord(op, self.caller, number, body)])
            except BaseException:
                self._start_over()  # a change that was not written has not happened
                raise
        self._keep(replies)
        return replies

    def _keep(self, replies: list[tuple[int, int, int, bytes]]) -> None:
        for caller, number, status, data in replies:
            if caller == self.caller and number in self.logged:
                self.logged[number] = status, data

    def _next_number(self) -> int:
        return next(self.numbers) & 0xFFFFFFFF

    def _replay(self) -> None:
        """Run the records that were appended since the last call."""
        for record in self.file.read_new():
            if record.kind in (_JOIN, _LEAVE):
                self.members.apply(record)
            else:
                self._keep(self.table.run(record.caller, record.number, record.kind, record.data))

    @contextlib.contextmanager
    def _exclusive(self, limit: float) -> Iterator[None]:
        """Hold the file for this thread alone, with all of its records read."""
        with self.lock:
            if self.forked:
                self._reopen()
                self.forked = False
            if self.file.descriptor < 0:
                raise DistStoreError(f"this FileStore ({self.path!r}) was closed")
            with self.file.mutex(max(limit, 1.0)):
                self._replay()
                yield

    def _has_grown(self, seen: int) -> bool:
        with self.lock:
            return self.file.descriptor < 0 or self.file.size() != seen

    # --- members ---

    def _join(self) -> None:
        deadline = time.monotonic() + _OTHER_JOB_SECONDS
        while True:
            with self.file.mutex(_OPEN_SECONDS):
                if self.file.is_replaced():
                    others = None
                else:
                    self._replay()
                    others = self._members_of_another_job()
                    if not others:
                        return self._enter()
            if others is None:
                self._reopen()
            elif time.monotonic() >= deadline:
                raise DistStoreError(
                    f"FileStore {self.path!r} is in use by another job: {', '.join(others)} are all of its "
                    f"{self.world_size} processes. Wait for its end, or choose another path."
                )
            else:
                time.sleep(0.05)

    def _members_of_another_job(self) -> list[str]:
        """Clear a stale file; return the processes of another job that has the file."""
        members = self.members
        running = [slot for slot in members.process if self.file.is_held(slot)]
        all_left = len(members.left) == len(members.process)
        if members.process and not running and not (self.world_size <= 0 and all_left):
            self.file.clear()
            self._start_over()
        processes = set(self.members.process.values())
        is_full = 0 < self.world_size <= len(processes)
        return sorted(processes) if running and is_full and _this_process() not in processes else []

    def _enter(self) -> None:
        self.slot = len(self.members.process)
        self.file.hold_slot(self.slot)
        record = LogRecord(_JOIN, self.slot, 0, _this_process().encode())
        self.file.append([record])
        self.members.apply(record)

    def release(self) -> None:
        """End one use of the file. The last user leaves; the last to leave a job that was complete deletes the file."""
        with self.lock:
            self.users -= 1
            if self.users > 0 or self.forked:
                return
            try:
                with self.file.mutex(1.0):
                    self._replay()
                    self._leave()
            except DistStoreError:
                pass  # a full disk or a stopped process: later openers find that this process has ended
            finally:
                self.file.close()

    def _leave(self) -> None:
        record = LogRecord(_LEAVE, self.slot, 0, b"")
        self.members.apply(record)
        others = [slot for slot in self.members.process if slot != self.slot and self.file.is_held(slot)]
        if not others and 0 < self.world_size <= len(self.members.process) and not self.file.is_replaced():
            Path(self.path).unlink(missing_ok=True)  # a program that deletes its folder may come between
        else:
            self.file.append([record])

    def become_child(self) -> None:
        """In a forked child: close the file, whose locks are the parent's; the next request opens it again."""
        self.lock = threading.RLock()
        self.file.close()
        self.caller = _random_caller()
        self.logged = {}
        self.forked = True


_open: weakref.WeakSet[SharedFile] = weakref.WeakSet()


def _in_forked_child() -> None:
    for shared in list(_open):
        shared.become_child()


os.register_at_fork(after_in_child=_in_forked_child)


def _random_caller() -> int:
    """Return a number that no other process uses for its requests."""
    return int.from_bytes(os.urandom(8), "little")


def _this_process() -> str:
    return f"{os.uname().nodename}:{os.getpid()}"


class FileStore(Store):
    """A store in a file that processes share, which is made with mode 0600 if it is missing.

    ``world_size`` is the number of processes that will open it, -1 when that is not known. A file that an
    earlier job left behind, however it ended, is begun again; one that another running job uses is refused.
    The last of ``world_size`` processes to close it deletes it. Works where the file system has byte-range
    locks, NFS included. A forked child opens the file anew by itself.

    Raises DistStoreError when the file cannot be opened, locked or written (then nothing of the change is
    stored), is of another kind, or belongs to another job.
    """

    def __init__(self, path: str, world_size: int = -1) -> None:
        self._use(SharedFile(os.fspath(path), world_size))

    def _use(self, shared: SharedFile) -> None:
        user = _User(shared)
        self._shared = shared
        self._requests = _native.ForwardedRequests(user.request)
        self._release = weakref.finalize(self, user.release)

    @property
    def path(self) -> str:
        """The path of the file."""
        return self._shared.path

    def clone(self) -> FileStore:
        if not self._release.alive:
            raise _closed(self.path)
        clone = FileStore.__new__(FileStore)
        clone._use(self._shared)
        clone._seconds = self._seconds
        return clone

    def close(self) -> None:
        self._release()


class _User:
    """One FileStore's use of the file that it shares with its clones."""

    def __init__(self, shared: SharedFile) -> None:
        self._shared = shared
        self._is_released = False
        shared.users += 1

    def request(self, op: int, body: bytes, limit: float) -> tuple[int, bytes]:
        if self._is_released:
            raise _closed(self._shared.path)
        return self._shared.request(op, body, limit)

    def release(self) -> None:
        self._is_released = True
        self._shared.release()


def _closed(path: str) -> DistStoreError:
    return DistStoreError(f"this FileStore ({path!r}) was closed")
