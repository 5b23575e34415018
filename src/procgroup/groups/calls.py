"""The further calls of a process group: messages between two ranks, arrays of iovecs, and lists of arrays."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, overload

from procgroup.arrays import making
from procgroup.errors import GroupBroken
from procgroup.groups import checks
from procgroup.groups.issue import Issue, QueuedCall
from procgroup.groups.reductions import RETAINING, Reductions
from procgroup.process import exit_reason
from procgroup.process.timeouts import seconds_in_force
from procgroup.types import AnyReduceOp, Array, Arrays, ReduceOp, Timeout

if TYPE_CHECKING:
    from procgroup._native import Work


class Iovecs(NamedTuple):
    """An array of ``nbytes`` bytes: ``buffers[i]`` at ``offsets[i]``, in order; bytes in between are undefined."""

    buffers: Sequence[memoryview]
    offsets: Sequence[int]
    nbytes: int


def _first_failure(works: Sequence[Work]) -> Exception | None:
    """Return the error of the first of ``works`` that failed. Their group has ended, so all of them complete soon."""
    for work in works:
        try:
            work.wait()
        except Exception as error:
            return error
    return None


class GroupCalls(Reductions):
    """All calls of a group. Messages between two ranks with one tag arrive in the order in which they were sent."""

    _issue: Issue
    takes_iovecs: bool
    """Whether the engine moves the bytes of calls on the CPU; the same on all ranks. Then the group can send small
    objects in their header, and many small buffers from their own memory: only the sender calls the methods of iovecs;
    the other ranks make the ordinary calls."""
    _seconds: float
    members: tuple[int, ...]

    def seconds_of(self, timeout: Timeout | None) -> float:
        """Return how many seconds a call with this timeout may take: see procgroup.timeout."""
        return seconds_in_force(timeout, self._seconds)

    @overload
    def send(
        self,
        array: Array,
        destination: int,
        tag: int = ...,
        async_op: Literal[False] = ...,
        timeout: Timeout | None = ...,
    ) -> None: ...
    @overload
    def send(
        self,
        array: Array,
        destination: int,
        tag: int = ...,
        async_op: Literal[True] = ...,
        timeout: Timeout | None = ...,
    ) -> Work: ...
    @overload
    def send(
        self, array: Array, destination: int, tag: int = ..., async_op: bool = ..., timeout: Timeout | None = ...
    ) -> Work | None: ...
    def send(
        self, array: Array, destination: int, tag: int = 0, async_op: bool = False, timeout: Timeout | None = None
    ) -> Work | None:
        """Send an array to group rank ``destination``, which receives it with the same ``tag``."""
        # The checks are repeated here inline: a small message takes less time than one or two Python function calls.
        if destination.__class__ is not int or not 0 <= destination < self._size:
            destination = checks.group_rank(destination, self._size, self.group_name)
        if tag.__class__ is not int or not 0 <= tag <= checks.MAX_TAG:
            tag = checks.tag(tag)
        return self.calls.send(array, destination, tag, async_op, timeout)

    def recv(self, array: Array, source: int | None = None, tag: int = 0, timeout: Timeout | None = None) -> int:
        """Receive an array from group rank ``source``, or from any rank with None; return the sender's group rank."""
        if source.__class__ is not int or not 0 <= source < self._size:
            source = self._source(source)
        if tag.__class__ is not int or not 0 <= tag <= checks.MAX_TAG:
            tag = checks.tag(tag)
        return self.calls.recv(  # type: ignore[return-value]
            array, source, tag, False, timeout
        )

    def irecv(self, array: Array, source: int | None = None, tag: int = 0, timeout: Timeout | None = None) -> Work:
        """Start to receive an array from group rank ``source``, or from any rank with None."""
        if source.__class__ is not int or not 0 <= source < self._size:
            source = self._source(source)
        if tag.__class__ is not int or not 0 <= tag <= checks.MAX_TAG:
            tag = checks.tag(tag)
        return self.calls.recv(  # type: ignore[return-value]
            array, source, tag, True, timeout
        )

    def allocate_on_gpu(self, nbytes: int, device: int, timeout: Timeout | None = None) -> Any:
        """Return memory with the CUDA array interface for an array of all ranks: see procgroup.empty."""
        return self.calls.empty(nbytes, device, timeout)

    @property
    def mem_allocator(self) -> Any:
        """The allocator of NCCL's memory for ``torch.cuda.MemPool``; see ``register_mem_pool``.

        Raises ArgumentError for a group without the backend "nccl", and where torch is built without CUDA.
        """
        self.calls.lend_memory()
        return making.torch_allocator()

    def register_mem_pool(self, pool: Any, timeout: Timeout | None = None) -> None:
        """Let NCCL read and write the memory of a ``torch.cuda.MemPool`` in place, in the calls of this group.

        The pool is made with ``mem_allocator``. All ranks call it in the same order, when their pools have memory of
        the same sizes; what was allocated later needs another call. The memory is freed after the group, at the
        earliest. Raises CollectiveMismatch for other sizes, and ArgumentError for memory of another allocator, or on
        another GPU than that of the group's other calls.
        """
        self.calls.register_mem_pool([segment["address"] for segment in pool.snapshot()], timeout)

    def rank_first(self, first: int, timeout: Timeout | None = None) -> None:
        """Return when group rank ``first`` and every other rank have called it, too: see procgroup.rank_first."""
        self.calls.rank_first(checks.group_rank(first, self._size, self.group_name), timeout)

    def fail_rank_first(self, error: BaseException) -> None:
        """End the group with the error because of which this rank, the first one, does not call rank_first."""
        if self._issue.closed is None:
            self.calls.fail_rank_first(exit_reason.describe(error))

    def check_message(self, op: str, array: Array, peer: int, tag: int) -> None:
        """Check the arguments of a ``send`` or ``recv`` as the call does; issue nothing."""
        self._check(op, array, self._source(peer), checks.tag(tag))

    def check_collective(self, op: str, *arguments: Any) -> None:
        """Check the arguments of a collective, up to ``async_op``, as the call does; issue nothing."""
        self._check(op, *arguments, *((False,) if op in RETAINING else ()))

    def broadcast_iovecs(self, iovecs: Iovecs, timeout: float) -> None:
        """Copy this rank's array of bytes, given as iovecs, into every other rank's array."""
        self.calls.broadcast_iovecs(*iovecs, timeout)

    def all_gather_iovecs(self, outputs: Sequence[Any], iovecs: Iovecs, timeout: float) -> None:
        """Copy the array of bytes of each rank ``r`` into ``outputs[r]`` on every rank, this rank's from iovecs."""
        self.calls.all_gather_iovecs(outputs, *iovecs, timeout)

    def all_gather_integers(self, output: Any, array: Any, op: int) -> None:
        """Do what all_gather_single does, of Python's integers, which every rank combines by ``op`` then.

        All ranks give the same op: it is part of the call on which they agree, an all_reduce in errors.
        """
        self.calls.all_gather_integers(output, array, op, False, None)

    # --- several arrays: the same number, in the same order, on all ranks ---

    @overload
    def all_reduce_coalesced(
        self, arrays: Arrays, op: AnyReduceOp = ..., async_op: Literal[False] = ..., timeout: Timeout | None = ...
    ) -> None: ...
    @overload
    def all_reduce_coalesced(
        self, arrays: Arrays, op: AnyReduceOp = ..., async_op: Literal[True] = ..., timeout: Timeout | None = ...
    ) -> Work: ...
    @overload
    def all_reduce_coalesced(
        self, arrays: Arrays, op: AnyReduceOp = ..., async_op: bool = ..., timeout: Timeout | None = ...
    ) -> Work | None: ...
    def all_reduce_coalesced(
        self, arrays: Arrays, op: AnyReduceOp = ReduceOp.SUM, async_op: bool = False, timeout: Timeout | None = None
    ) -> Work | None:
        """Combine each of the arrays with those of all ranks at the same place in the list."""
        if op.__class__ is not ReduceOp:
            op = checks.reduce_op(op)
        return self._reduce_all(arrays, [op] * len(arrays), False, timeout, async_op)

    @overload
    def all_gather_coalesced(
        self,
        output_lists: Sequence[Arrays],
        arrays: Arrays,
        async_op: Literal[False] = ...,
        timeout: Timeout | None = ...,
    ) -> None: ...
    @overload
    def all_gather_coalesced(
        self,
        output_lists: Sequence[Arrays],
        arrays: Arrays,
        async_op: Literal[True] = ...,
        timeout: Timeout | None = ...,
    ) -> Work: ...
    @overload
    def all_gather_coalesced(
        self, output_lists: Sequence[Arrays], arrays: Arrays, async_op: bool = ..., timeout: Timeout | None = ...
    ) -> Work | None: ...
    def all_gather_coalesced(
        self, output_lists: Sequence[Arrays], arrays: Arrays, async_op: bool = False, timeout: Timeout | None = None
    ) -> Work | None:
        """Copy array ``i`` of each rank ``r`` into ``output_lists[r][i]`` on every rank."""
        call = "output_tensor_lists", "all_gather_coalesced", self._rank
        output_lists = checks.array_list(output_lists, self._size, *call)
        for outputs in output_lists:
            checks.array_list(outputs, len(arrays), *call, "input")
        seconds = self.seconds_of(timeout)
        calls = [
            ("all_gather", ([outputs[place] for outputs in output_lists], array), seconds)
            for place, array in enumerate(arrays)
        ]
        return self._issue_all(calls, [array for outputs in output_lists for array in outputs], async_op)

    @overload
    def all_gather_single_coalesced(
        self, outputs: Arrays, arrays: Arrays, async_op: Literal[False] = ..., timeout: Timeout | None = ...
    ) -> None: ...
    @overload
    def all_gather_single_coalesced(
        self, outputs: Arrays, arrays: Arrays, async_op: Literal[True] = ..., timeout: Timeout | None = ...
    ) -> Work: ...
    @overload
    def all_gather_single_coalesced(
        self, outputs: Arrays, arrays: Arrays, async_op: bool = ..., timeout: Timeout | None = ...
    ) -> Work | None: ...
    def all_gather_single_coalesced(
        self, outputs: Arrays, arrays: Arrays, async_op: bool = False, timeout: Timeout | None = None
    ) -> Work | None:
        """Copy array ``i`` of all ranks, one after the other, into every rank's ``outputs[i]``."""
        checks.array_list(outputs, len(arrays), "outputs", "all_gather_single_coalesced", self._rank, "input")
        seconds = self.seconds_of(timeout)
        pairs = zip(outputs, arrays, strict=True)
        return self._issue_all([("all_gather_single", pair, seconds) for pair in pairs], outputs, async_op)

    @overload
    def reduce_scatter_single_coalesced(
        self,
        outputs: Arrays,
        arrays: Arrays,
        op: AnyReduceOp = ...,
        async_op: Literal[False] = ...,
        timeout: Timeout | None = ...,
    ) -> None: ...
    @overload
    def reduce_scatter_single_coalesced(
        self,
        outputs: Arrays,
        arrays: Arrays,
        op: AnyReduceOp = ...,
        async_op: Literal[True] = ...,
        timeout: Timeout | None = ...,
    ) -> Work: ...
    @overload
    def reduce_scatter_single_coalesced(
        self,
        outputs: Arrays,
        arrays: Arrays,
        op: AnyReduceOp = ...,
        async_op: bool = ...,
        timeout: Timeout | None = ...,
    ) -> Work | None: ...
    def reduce_scatter_single_coalesced(
        self,
        outputs: Arrays,
        arrays: Arrays,
        op: AnyReduceOp = ReduceOp.SUM,
        async_op: bool = False,
        timeout: Timeout | None = None,
    ) -> Work | None:
        """Combine array ``i`` of all ranks; block ``r`` of the result goes to ``outputs[i]`` of rank ``r``."""
        if op.__class__ is not ReduceOp:
            op = checks.reduce_op(op)
        checks.array_list(outputs, len(arrays), "outputs", "reduce_scatter_single_coalesced", self._rank, "input")
        seconds = self.seconds_of(timeout)
        calls = [
            ("reduce_scatter_single", (output, array, op), seconds)
            for output, array in zip(outputs, arrays, strict=True)
        ]
        return self._issue_all(calls, outputs, async_op)

    @overload
    def issue_queued(self, queue: Sequence[QueuedCall], async_op: Literal[False] = ...) -> None: ...
    @overload
    def issue_queued(self, queue: Sequence[QueuedCall], async_op: Literal[True] = ...) -> Work: ...
    @overload
    def issue_queued(self, queue: Sequence[QueuedCall], async_op: bool = ...) -> Work | None: ...
    def issue_queued(self, queue: Sequence[QueuedCall], async_op: bool = False) -> Work | None:
        """Issue queued calls. Raises RuntimeError when they are of different operations."""
        if not queue:
            return None
        names, arguments, timeouts = zip(*queue, strict=True)
        kinds = set(names)
        if len(kinds) > 1:
            raise RuntimeError(
                "Coalescing manager requires all collectives to be the same type, "
                f"but got mixed types: {', '.join(sorted(kinds))}"
            )
        if kinds == {"all_reduce"}:
            arrays, ops, retain = zip(*arguments, strict=True)
            return self._reduce_all(arrays, ops, any(retain), max(timeouts), async_op)
        return self._issue_all(queue, [given[0] for given in arguments], async_op)

    def _reduce_all(
        self, arrays: Arrays, ops: Sequence[AnyReduceOp], retain: bool, timeout: Timeout | None, async_op: bool
    ) -> Work | None:
        if not ops:
            return None
        return self.calls.all_reduce_coalesced(arrays, ops, retain, async_op, timeout)

    def _issue_all(self, calls: Sequence[QueuedCall], results: Sequence[Any], async_op: bool) -> Work | None:
        """Check all calls, then issue them: if one is invalid, no other rank sees any of them."""
        for op, arguments, _ in calls if len(calls) > 1 else ():
            self._check(op, *arguments)
        works: list[Work] = []
        for op, arguments, seconds in calls:
            try:
                works.append(getattr(self.calls, op)(*arguments, async_op, seconds))
            except GroupBroken:
                first = _first_failure(works) if async_op else None
                if first is None:
                    raise
                raise first from None
        return self.calls.join(works, calls[0][0], results) if async_op and works else None

    def _check(self, op: str, *arguments: Any) -> None:
        """Check the arguments of an operation, up to ``async_op``, without issuing it."""
        self._issue.require_open()
        getattr(self.calls.checks(), op)(*arguments, False, 0.0)

    def _source(self, source: int | None) -> int:
        return -1 if source is None else checks.group_rank(source, self._size, self.group_name)
