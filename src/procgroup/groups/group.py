"""ProcessGroup: the ranks that talk to each other, and one of them: this one."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from procgroup import types
from procgroup.errors import ForkedProcessError, GroupDestroyed
from procgroup.groups import checks
from procgroup.groups.backend import Backend, Operation
from procgroup.groups.ended import EndedBackend
from procgroup.groups.work import Work
from procgroup.stores.store import Store
from procgroup.types import ReduceOp, Timeout


class ProcessGroup:
    """The ranks that talk to each other. Ranks in its methods are group ranks; ``members`` maps them to global ranks.

    Calls are matched across the ranks by their order. Each method returns None when the call is over
    or, with ``async_op=True``, a Work. ``timeout`` is a timedelta or seconds; None: the group's own.
    """

    def __init__(
        self,
        backend: Backend,
        store: Store,
        *,
        rank: int,
        members: Sequence[int],
        group_name: str,
        timeout: timedelta,
        backend_config: str,
        group_desc: str = "",
    ) -> None:
        self._backend = backend
        self._rank = rank
        self._size = len(members)
        self._seconds = timeout.total_seconds()
        self.members = tuple(members)
        self._group_ranks = {member: rank for rank, member in enumerate(members)}
        self.store = store
        self.group_name = group_name
        self.group_desc = group_desc
        self.backend_config = backend_config

    def rank(self) -> int:
        """Return this process's rank in the group."""
        return self._rank

    def size(self) -> int:
        """Return how many ranks the group has."""
        return self._size

    def name(self) -> str:
        """Return the backend's name, as it was asked for."""
        return self._backend.name

    @property
    def transport(self) -> str:
        """What moves the bytes: "shared memory", "tcp" or "loopback"."""
        return self._backend.transport

    @property
    def timeout(self) -> timedelta:
        """How long a call may take when it is not given a timeout of its own."""
        return timedelta(seconds=self._seconds)

    def set_timeout(self, timeout: Timeout) -> None:
        """Set how long a call may take when it is not given a timeout of its own. Counts from the next call."""
        self._seconds = types.seconds(timeout)

    def all_reduce(
        self, array: Any, op: ReduceOp = ReduceOp.SUM, async_op: bool = False, timeout: Timeout | None = None
    ) -> Work | None:
        """Combine the arrays of all ranks, element by element, into every rank's array."""
        if op.__class__ is not ReduceOp:
            op = checks.reduce_op(op)
        operation = self._backend.all_reduce(
            array, op, async_op, self._seconds if timeout is None else types.seconds(timeout)
        )
        return operation if operation is None else self._work(operation, "all_reduce", (array,))

    def reduce(
        self, array: Any, root: int, op: ReduceOp = ReduceOp.SUM, async_op: bool = False, timeout: Timeout | None = None
    ) -> Work | None:
        """Combine the arrays of all ranks into that of ``root``; the others' arrays keep their values."""
        if op.__class__ is not ReduceOp:
            op = checks.reduce_op(op)
        root = checks.group_rank(root, self._size, self.group_name)
        operation = self._backend.reduce(
            array, root, op, async_op, self._seconds if timeout is None else types.seconds(timeout)
        )
        return operation if operation is None else self._work(operation, "reduce", (array,))

    def broadcast(self, array: Any, root: int, async_op: bool = False, timeout: Timeout | None = None) -> Work | None:
        """Copy the array of ``root`` into every rank's array."""
        root = checks.group_rank(root, self._size, self.group_name)
        operation = self._backend.broadcast(
            array, root, async_op, self._seconds if timeout is None else types.seconds(timeout)
        )
        return operation if operation is None else self._work(operation, "broadcast", (array,))

    def all_gather(
        self, outputs: Sequence[Any], array: Any, async_op: bool = False, timeout: Timeout | None = None
    ) -> Work | None:
        """Copy the array of each rank ``r`` into ``outputs[r]`` on every rank."""
        outputs = checks.array_list(outputs, self._size, "tensor_list")
        operation = self._backend.all_gather(
            outputs, array, async_op, self._seconds if timeout is None else types.seconds(timeout)
        )
        return operation if operation is None else self._work(operation, "all_gather", outputs)

    def barrier(self, async_op: bool = False, timeout: Timeout | None = None) -> Work | None:
        """Wait until every rank has come here."""
        operation = self._backend.barrier(async_op, self._seconds if timeout is None else types.seconds(timeout))
        return operation if operation is None else self._work(operation, "barrier", ())

    def send(
        self, array: Any, destination: int, tag: int = 0, async_op: bool = False, timeout: Timeout | None = None
    ) -> Work | None:
        """Send an array to group rank ``destination``, which receives it with the same ``tag``."""
        destination = checks.group_rank(destination, self._size, self.group_name)
        operation = self._backend.send(
            array, destination, checks.tag(tag), async_op, self._seconds if timeout is None else types.seconds(timeout)
        )
        return operation if operation is None else self._work(operation, "send", (array,))

    def recv(self, array: Any, source: int | None = None, tag: int = 0, timeout: Timeout | None = None) -> int:
        """Receive an array from group rank ``source``, or from any rank with None; return the sender's group rank."""
        came_from = self._backend.recv(
            array,
            self._source(source),
            checks.tag(tag),
            False,
            self._seconds if timeout is None else types.seconds(timeout),
        )
        assert isinstance(came_from, int)
        return came_from

    def irecv(self, array: Any, source: int | None = None, tag: int = 0, timeout: Timeout | None = None) -> Work:
        """Start to receive an array from group rank ``source``, or from any rank with None."""
        operation = self._backend.recv(
            array,
            self._source(source),
            checks.tag(tag),
            True,
            self._seconds if timeout is None else types.seconds(timeout),
        )
        assert not isinstance(operation, int)
        return Work(operation, "recv", (array,), where=self._where(), members=self.members)

    def global_rank(self, group_rank: int) -> int:
        """Return the global rank of a member. Raises ValueError when the group has no such rank."""
        return self.members[checks.group_rank(group_rank, self._size, self.group_name)]

    def group_rank(self, global_rank: int) -> int:
        """Return a member's rank in this group. Raises ValueError when that global rank is not a member."""
        rank = checks.as_index(global_rank, "rank")
        if rank not in self._group_ranks:
            raise ValueError(f"Global rank {rank} is not part of group {self.group_name}, which has {self.members}.")
        return self._group_ranks[rank]

    def shutdown(self) -> None:
        """Leave in order and free everything; later calls raise. Idempotent, never raises."""
        self._backend.shutdown()
        if not isinstance(self._backend, EndedBackend):
            self._backend = EndedBackend(self._backend, GroupDestroyed, self.group_name)

    def abort(self) -> None:
        """Make every call in progress fail at once on this rank, and tell the others. Idempotent."""
        self._backend.abort()

    def mark_forked(self) -> None:
        """Turn this copy of the group, in a forked child, into one whose calls raise."""
        what = f"process group {self.group_name}"
        self._backend = EndedBackend(self._backend, ForkedProcessError, what, keep=True)

    def is_usable(self) -> bool:
        """Tell whether the group was neither destroyed nor carried over a fork."""
        return not isinstance(self._backend, EndedBackend)

    def _source(self, source: int | None) -> int:
        return -1 if source is None else checks.group_rank(source, self._size, self.group_name)

    def _where(self) -> str:
        return f"group {self.group_name} (rank {self._rank} of {self._size})"

    def _work(self, operation: Operation, op: str, arrays: Sequence[Any]) -> Work:
        return Work(operation, op, arrays, where=self._where())

    def __repr__(self) -> str:
        return f"<ProcessGroup {self.group_name}: rank {self._rank} of {self._size}, {self.transport}>"
