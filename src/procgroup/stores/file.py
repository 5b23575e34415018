"""The store that processes share through a file: on one host, or on a file system that they all see.

Each process replays the file's records into a table of its own and appends its changes (log_file.py says
how). Of the records, JOIN and LEAVE tell who uses the file; from them and from the locks of the living
follows what an opener finds: nothing, a job that it belongs to, a job that is over (*stale*: the file is
begun again), or another job that has all its processes (refused).
"""

from __future__ import annotations

import itertools
import os
import threading
import time
import uuid
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from procgroup.errors import DistStoreError, StoreTimeout
from procgroup.stores.log_file import LogFile
from procgroup.stores.table import Table, TableStore

T = TypeVar("T")

_JOIN, _LEAVE = 100, 101
_OTHER_JOB_PATIENCE = 1.0
_OPEN_SECONDS = 5.0
_SHORTEST_PAUSE, _LONGEST_PAUSE = 0.0005, 0.02


class _Members:
    """Who has opened the file since it was begun: by slot, the process ("host:pid") and whether it has left."""

    def __init__(self) -> None:
        self.process: dict[int, str] = {}
        self.left: set[int] = set()

    def apply(self, kind: int, slot: int, data: bytes) -> None:
        if kind == _JOIN:
            self.process[slot] = data.decode()
        else:
            self.left.add(slot)


class _Shared:
    """The open file, the table that it was replayed into, and the lock that threads take around both."""

    def __init__(self, path: str, world_size: int) -> None:
        self.path = path
        self.world_size = world_size
        # Reentrant: a collection of garbage may end a clone, which comes here, while its thread holds it.
        self.lock = threading.RLock()
        self.file = LogFile(path)
        self.table = Table()
        self.members = _Members()
        self.slot = -1
        self.name = uuid.uuid4().hex
        self.callers = itertools.count()
        self.forked = False
        self.users = 0  # the store and its clones
        self._join()
        _open.add(self)

    def _join(self) -> None:
        patience = time.monotonic() + _OTHER_JOB_PATIENCE
        while True:
            with self.file.mutex(_OPEN_SECONDS):
                if self.file.is_replaced():
                    others = None
                else:
                    self._replay()
                    others = self._others_in_the_way()
                    if not others:
                        return self._enter()
            if others is None:
                self._forget()
            elif time.monotonic() >= patience:
                raise DistStoreError(
                    f"FileStore {self.path!r} is in use by another job: {', '.join(others)} are all of its "
                    f"{self.world_size} processes. Wait for its end, or choose another path."
                )
            else:
                time.sleep(0.05)

    def _others_in_the_way(self) -> list[str]:
        """Begin a stale file again; return the processes of another job that has the file."""
        members = self.members
        living = [slot for slot in members.process if self.file.is_held(slot)]
        all_left = len(members.left) == len(members.process)
        if members.process and not living and not (self.world_size <= 0 and all_left):
            self.file.clear()
            self._start_over()
        processes = set(self.members.process.values())
        is_full = 0 < self.world_size <= len(processes)
        return sorted(processes) if living and is_full and _this_process() not in processes else []

    def _enter(self) -> None:
        self.slot = len(self.members.process)
        self.file.hold_slot(self.slot)
        record = (_JOIN, str(self.slot), _this_process().encode())
        self.file.append([record])
        self.members.apply(_JOIN, self.slot, record[2])

    def _start_over(self) -> None:
        self.table = Table()
        self.members = _Members()

    def _forget(self) -> None:
        self.file.open()
        self._start_over()

    def _replay(self) -> None:
        for kind, key, data in self.file.read_new():
            if kind in (_JOIN, _LEAVE):
                self.members.apply(kind, int(key), data)
            else:
                self.table.apply(kind, key, data)

    def run(self, operation: Callable[[Table], T], limit: float) -> T:
        with self.lock:
            if self.forked:
                self._forget()
                self.forked = False
            if self.file.descriptor < 0:
                raise DistStoreError(f"this FileStore ({self.path!r}) was closed")
            with self.file.mutex(max(limit, 1.0)):
                self._replay()
                try:
                    result = operation(self.table)
                    if self.table.journal:
                        self.file.append(self.table.journal)
                except BaseException:
                    if self.table.journal:  # what was not written has not happened
                        self._start_over()
                        self.file.offset = 0
                    raise
                self.table.journal.clear()
                return result

    def has_grown(self, seen: int) -> bool:
        with self.lock:
            return self.file.descriptor < 0 or self.file.size() != seen

    def release(self) -> None:
        """Leave with the last user; the last to leave a job that was complete deletes the file."""
        with self.lock:
            self.users -= 1
            if self.users > 0 or self.forked:
                return
            try:
                with self.file.mutex(1.0):
                    self._replay()
                    self._leave()
            except DistStoreError:
                pass  # a full disk or a stopped process: those who come later see that this one is gone
            finally:
                self.file.close()

    def _leave(self) -> None:
        self.members.apply(_LEAVE, self.slot, b"")
        others = [slot for slot in self.members.process if slot != self.slot and self.file.is_held(slot)]
        if not others and 0 < self.world_size <= len(self.members.process) and not self.file.is_replaced():
            Path(self.path).unlink()
        else:
            self.file.append([(_LEAVE, str(self.slot), b"")])

    def become_child(self) -> None:
        """In a forked child: the open file is the parent's, whose locks it must not share."""
        self.lock = threading.RLock()
        self.file.close()
        self.forked = True


_open: weakref.WeakSet[_Shared] = weakref.WeakSet()


def _in_forked_child() -> None:
    for shared in list(_open):
        shared.become_child()


os.register_at_fork(after_in_child=_in_forked_child)


def _this_process() -> str:
    return f"{os.uname().nodename}:{os.getpid()}"


class FileStore(TableStore):
    """A store in a file that processes share, which is made with mode 0600 if it is missing.

    ``world_size`` is the number of processes that will open it, -1 when that is not known. A file that an
    earlier job left behind, however it ended, is begun again; one that another running job uses is refused.
    The last of ``world_size`` processes to close it deletes it. Works where the file system has byte-range
    locks, NFS included. A forked child opens the file anew by itself.

    Raises DistStoreError when the file cannot be opened, locked or written (then nothing of the change is
    stored), is of another kind, or belongs to another job.
    """

    def __init__(self, path: str, world_size: int = -1) -> None:
        self._use(_Shared(os.fspath(path), world_size))

    def _use(self, shared: _Shared) -> None:
        shared.users += 1
        self._shared = shared
        self._release = weakref.finalize(self, shared.release)

    @property
    def path(self) -> str:
        """The path of the file."""
        return self._shared.path

    def _run(self, operation: Callable[[Table], T]) -> T:
        return self._usable().run(operation, self._seconds)

    def _usable(self) -> _Shared:
        if not self._release.alive:
            raise DistStoreError(f"this FileStore ({self.path!r}) was closed")
        return self._shared

    def _await(
        self, operation: Callable[[Table], T | None], limit: float, keys: Sequence[str], what: str = "wait"
    ) -> T:
        deadline = time.monotonic() + limit
        pause = _SHORTEST_PAUSE
        shared = self._usable()
        seen = 0

        def look(table: Table) -> T | None:
            nonlocal seen
            seen = shared.file.offset
            return operation(table)

        while (result := shared.run(look, limit)) is None:
            if time.monotonic() >= deadline:
                raise StoreTimeout(keys=keys, seconds=limit, what=what)
            while time.monotonic() < deadline and not shared.has_grown(seen):
                time.sleep(min(pause, max(0.0, deadline - time.monotonic())))
                pause = min(pause * 1.5, _LONGEST_PAUSE)
        return result

    def _caller(self) -> str:
        return f"{self._shared.name}-{os.getpid()}-{next(self._shared.callers)}"

    def clone(self) -> FileStore:
        clone = FileStore.__new__(FileStore)
        clone._use(self._usable())
        clone._seconds = self._seconds
        return clone

    def close(self) -> None:
        self._release()
