"""The store that processes share through a file: on one host, or on a file system that they all see."""

from __future__ import annotations

import os
import weakref

from procgroup import _native
from procgroup.errors import DistStoreError
from procgroup.stores.shared_file import SharedFile
from procgroup.stores.store import Store


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
