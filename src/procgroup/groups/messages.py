"""The calls between two ranks of a group, as methods of a group."""

from __future__ import annotations

from typing import Literal, overload

from procgroup import types
from procgroup.groups import checks
from procgroup.groups.calls import GroupCalls
from procgroup.groups.work import Work
from procgroup.types import Array, Timeout


class Messages(GroupCalls):
    """Messages between two ranks with one tag arrive in the order in which they were sent."""

    @overload
    def send(
        self,
        array: Array,
        destination: int,
        tag: int = 0,
        async_op: Literal[False] = False,
        timeout: Timeout | None = None,
    ) -> None: ...

    @overload
    def send(
        self,
        array: Array,
        destination: int,
        tag: int = 0,
        async_op: Literal[True] = ...,
        timeout: Timeout | None = None,
    ) -> Work: ...

    @overload
    def send(
        self, array: Array, destination: int, tag: int = 0, async_op: bool = ..., timeout: Timeout | None = None
    ) -> Work | None: ...

    def send(
        self, array: Array, destination: int, tag: int = 0, async_op: bool = False, timeout: Timeout | None = None
    ) -> Work | None:
        """Send an array to group rank ``destination``, which receives it with the same ``tag``."""
        # The checks stand here too, in short: a small message takes less time than a call of a Python function or two.
        if destination.__class__ is not int or not 0 <= destination < self._size:
            destination = checks.group_rank(destination, self._size, self.group_name)
        if tag.__class__ is not int or not 0 <= tag <= checks.MAX_TAG:
            tag = checks.tag(tag)
        if destination == self._rank and not async_op:
            raise ValueError(
                "Invalid destination rank: destination rank should not be the same as the rank of the current process."
            )
        operation = self._backend.send(
            array, destination, tag, async_op, self._seconds if timeout is None else types.seconds(timeout)
        )
        return None if operation is None else Work(operation, "send", [array], self)

    def recv(self, array: Array, source: int | None = None, tag: int = 0, timeout: Timeout | None = None) -> int:
        """Receive an array from group rank ``source``, or from any rank with None; return the sender's group rank."""
        if source.__class__ is not int or not 0 <= source < self._size:
            source = self._source(source)
        if tag.__class__ is not int or not 0 <= tag <= checks.MAX_TAG:
            tag = checks.tag(tag)
        return self._backend.recv(  # type: ignore[return-value]
            array, source, tag, False, self._seconds if timeout is None else types.seconds(timeout)
        )

    def irecv(self, array: Array, source: int | None = None, tag: int = 0, timeout: Timeout | None = None) -> Work:
        """Start to receive an array from group rank ``source``, or from any rank with None."""
        if source.__class__ is not int or not 0 <= source < self._size:
            source = self._source(source)
        if tag.__class__ is not int or not 0 <= tag <= checks.MAX_TAG:
            tag = checks.tag(tag)
        operation = self._backend.recv(
            array, source, tag, True, self._seconds if timeout is None else types.seconds(timeout)
        )
        return Work(operation, "recv", [array], self)  # type: ignore[arg-type]

    def check_message(self, verb: str, array: Array, peer: int, tag: int) -> None:
        """Raise what a ``send`` or a ``recv`` would raise for these arguments; nothing is issued."""
        self._backend.check(verb, array, self._source(peer), checks.tag(tag))

    def _source(self, source: int | None) -> int:
        return -1 if source is None else checks.group_rank(source, self._size, self.group_name)
