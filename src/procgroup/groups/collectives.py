"""The collectives of a process group, as methods.

Ranks in their arguments are group ranks. ``timeout`` is a timedelta or seconds; None means that of ``with
timeout(...)`` or else the group's, as procgroup.timeouts says. Each method returns None when the call has completed or,
with ``async_op=True``, a Work. ``retain`` keeps an array that is read and written: a call that fails leaves it as it
was, for the price of a copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, TypeAlias, overload

from procgroup.groups import checks
from procgroup.types import AnyReduceOp, Array, Arrays, ReduceOp, Timeout

if TYPE_CHECKING:
    from procgroup import _native
    from procgroup._native import Work

Limit: TypeAlias = Timeout | None
"""How long a call may take; None: see procgroup.timeouts."""
Issued: TypeAlias = "Work | None"
No: TypeAlias = Literal[False]
"""``async_op=False``: the call returns None when it has completed."""
Yes: TypeAlias = Literal[True]
"""``async_op=True``: the call returns a Work."""


class Collectives:
    """Collective calls: the ranks match them by the order in which each rank issues them.

    Each method enters the native group once, which checks, numbers and runs the call: see groups/engine.py.
    """

    calls: _native.Group
    _rank: int
    _size: int
    members: tuple[int, ...]
    group_name: str

    def _where(self) -> str:
        return f"group {self.group_name} (rank {self._rank} of {self._size})"

    @overload
    def all_reduce(
        self, array: Array, op: AnyReduceOp = ..., async_op: No = ..., timeout: Limit = ..., retain: bool = ...
    ) -> None: ...
    @overload
    def all_reduce(
        self, array: Array, op: AnyReduceOp = ..., async_op: Yes = ..., timeout: Limit = ..., retain: bool = ...
    ) -> Work: ...
    @overload
    def all_reduce(
        self, array: Array, op: AnyReduceOp = ..., async_op: bool = ..., timeout: Limit = ..., retain: bool = ...
    ) -> Issued: ...
    def all_reduce(
        self,
        array: Array,
        op: AnyReduceOp = ReduceOp.SUM,
        async_op: bool = False,
        timeout: Limit = None,
        retain: bool = False,
    ) -> Issued:
        """Combine the arrays of all ranks, element by element, into every rank's array."""
        if op.__class__ is not ReduceOp:
            op = checks.reduce_op(op)
        return self.calls.all_reduce(array, op, retain, async_op, timeout)

    @overload
    def scan(
        self, array: Array, op: AnyReduceOp = ..., async_op: No = ..., timeout: Limit = ..., retain: bool = ...
    ) -> None: ...
    @overload
    def scan(
        self, array: Array, op: AnyReduceOp = ..., async_op: Yes = ..., timeout: Limit = ..., retain: bool = ...
    ) -> Work: ...
    @overload
    def scan(
        self, array: Array, op: AnyReduceOp = ..., async_op: bool = ..., timeout: Limit = ..., retain: bool = ...
    ) -> Issued: ...
    def scan(
        self,
        array: Array,
        op: AnyReduceOp = ReduceOp.SUM,
        async_op: bool = False,
        timeout: Limit = None,
        retain: bool = False,
    ) -> Issued:
        """Combine the arrays of all lower ranks and this one, element by element, into this rank's array."""
        if op.__class__ is not ReduceOp:
            op = checks.reduce_op(op)
        return self.calls.scan(array, op, retain, async_op, timeout)

    @overload
    def exscan(
        self, array: Array, op: AnyReduceOp = ..., async_op: No = ..., timeout: Limit = ..., retain: bool = ...
    ) -> None: ...
    @overload
    def exscan(
        self, array: Array, op: AnyReduceOp = ..., async_op: Yes = ..., timeout: Limit = ..., retain: bool = ...
    ) -> Work: ...
    @overload
    def exscan(
        self, array: Array, op: AnyReduceOp = ..., async_op: bool = ..., timeout: Limit = ..., retain: bool = ...
    ) -> Issued: ...
    def exscan(
        self,
        array: Array,
        op: AnyReduceOp = ReduceOp.SUM,
        async_op: bool = False,
        timeout: Limit = None,
        retain: bool = False,
    ) -> Issued:
        """Combine the arrays of all lower ranks into this rank's array, which is the input, too; rank 0's is kept."""
        if op.__class__ is not ReduceOp:
            op = checks.reduce_op(op)
        return self.calls.exscan(array, op, retain, async_op, timeout)

    @overload
    def reduce(
        self,
        array: Array,
        root: int,
        op: AnyReduceOp = ...,
        async_op: No = ...,
        timeout: Limit = ...,
        retain: bool = ...,
    ) -> None: ...
    @overload
    def reduce(
        self,
        array: Array,
        root: int,
        op: AnyReduceOp = ...,
        async_op: Yes = ...,
        timeout: Limit = ...,
        retain: bool = ...,
    ) -> Work: ...
    @overload
    def reduce(
        self,
        array: Array,
        root: int,
        op: AnyReduceOp = ...,
        async_op: bool = ...,
        timeout: Limit = ...,
        retain: bool = ...,
    ) -> Issued: ...
    def reduce(
        self,
        array: Array,
        root: int,
        op: AnyReduceOp = ReduceOp.SUM,
        async_op: bool = False,
        timeout: Limit = None,
        retain: bool = False,
    ) -> Issued:
        """Combine the arrays of all ranks into that of ``root``; the others' arrays keep their values."""
        if op.__class__ is not ReduceOp:
            op = checks.reduce_op(op)
        root = checks.group_rank(root, self._size, self.group_name)
        return self.calls.reduce(array, root, op, retain, async_op, timeout)

    @overload
    def broadcast(self, array: Array, root: int, async_op: No = ..., timeout: Limit = ...) -> None: ...
    @overload
    def broadcast(self, array: Array, root: int, async_op: Yes = ..., timeout: Limit = ...) -> Work: ...
    @overload
    def broadcast(self, array: Array, root: int, async_op: bool = ..., timeout: Limit = ...) -> Issued: ...
    def broadcast(self, array: Array, root: int, async_op: bool = False, timeout: Limit = None) -> Issued:
        """Copy the array of ``root`` into every rank's array."""
        root = checks.group_rank(root, self._size, self.group_name)
        return self.calls.broadcast(array, root, async_op, timeout)

    @overload
    def gather(
        self, array: Array, outputs: Arrays | None, root: int, async_op: No = ..., timeout: Limit = ...
    ) -> None: ...
    @overload
    def gather(
        self, array: Array, outputs: Arrays | None, root: int, async_op: Yes = ..., timeout: Limit = ...
    ) -> Work: ...
    @overload
    def gather(
        self, array: Array, outputs: Arrays | None, root: int, async_op: bool = ..., timeout: Limit = ...
    ) -> Issued: ...
    def gather(
        self, array: Array, outputs: Arrays | None, root: int, async_op: bool = False, timeout: Limit = None
    ) -> Issued:
        """Copy the array of each rank ``r`` into ``outputs[r]`` on ``root``; the others give no outputs."""
        root = checks.group_rank(root, self._size, self.group_name)
        outputs = checks.gather_list(outputs, self._size, root, self._rank)
        return self.calls.gather(array, outputs, root, async_op, timeout)

    @overload
    def all_gather(self, outputs: Arrays, array: Array, async_op: No = ..., timeout: Limit = ...) -> None: ...
    @overload
    def all_gather(self, outputs: Arrays, array: Array, async_op: Yes = ..., timeout: Limit = ...) -> Work: ...
    @overload
    def all_gather(self, outputs: Arrays, array: Array, async_op: bool = ..., timeout: Limit = ...) -> Issued: ...
    def all_gather(self, outputs: Arrays, array: Array, async_op: bool = False, timeout: Limit = None) -> Issued:
        """Copy the array of each rank ``r`` into ``outputs[r]`` on every rank."""
        outputs = checks.array_list(outputs, self._size, "tensor_list", "all_gather", self._rank)
        return self.calls.all_gather(outputs, array, async_op, timeout)

    @overload
    def all_gather_single(self, output: Array, array: Array, async_op: No = ..., timeout: Limit = ...) -> None: ...
    @overload
    def all_gather_single(self, output: Array, array: Array, async_op: Yes = ..., timeout: Limit = ...) -> Work: ...
    @overload
    def all_gather_single(self, output: Array, array: Array, async_op: bool = ..., timeout: Limit = ...) -> Issued: ...
    def all_gather_single(self, output: Array, array: Array, async_op: bool = False, timeout: Limit = None) -> Issued:
        """Copy the arrays of all ranks, one after the other, into every rank's ``output``."""
        return self.calls.all_gather_single(output, array, async_op, timeout)

    @overload
    def scatter(
        self, array: Array, inputs: Arrays | None, root: int, async_op: No = ..., timeout: Limit = ...
    ) -> None: ...
    @overload
    def scatter(
        self, array: Array, inputs: Arrays | None, root: int, async_op: Yes = ..., timeout: Limit = ...
    ) -> Work: ...
    @overload
    def scatter(
        self, array: Array, inputs: Arrays | None, root: int, async_op: bool = ..., timeout: Limit = ...
    ) -> Issued: ...
    def scatter(
        self, array: Array, inputs: Arrays | None, root: int, async_op: bool = False, timeout: Limit = None
    ) -> Issued:
        """Copy ``inputs[r]`` of ``root`` into the array of each rank ``r``; the others give no inputs."""
        root = checks.group_rank(root, self._size, self.group_name)
        inputs = checks.scatter_list(inputs, self._size, root, self._rank)
        return self.calls.scatter(array, inputs, root, async_op, timeout)

    @overload
    def reduce_scatter(
        self, output: Array, inputs: Arrays, op: AnyReduceOp = ..., async_op: No = ..., timeout: Limit = ...
    ) -> None: ...
    @overload
    def reduce_scatter(
        self, output: Array, inputs: Arrays, op: AnyReduceOp = ..., async_op: Yes = ..., timeout: Limit = ...
    ) -> Work: ...
    @overload
    def reduce_scatter(
        self, output: Array, inputs: Arrays, op: AnyReduceOp = ..., async_op: bool = ..., timeout: Limit = ...
    ) -> Issued: ...
    def reduce_scatter(
        self,
        output: Array,
        inputs: Arrays,
        op: AnyReduceOp = ReduceOp.SUM,
        async_op: bool = False,
        timeout: Limit = None,
    ) -> Issued:
        """Combine ``inputs[r]`` of all ranks into the output of each rank ``r``."""
        if op.__class__ is not ReduceOp:
            op = checks.reduce_op(op)
        inputs = checks.array_list(inputs, self._size, "input_list", "reduce_scatter", self._rank)
        return self.calls.reduce_scatter(output, inputs, op, async_op, timeout)

    @overload
    def reduce_scatter_single(
        self, output: Array, array: Array, op: AnyReduceOp = ..., async_op: No = ..., timeout: Limit = ...
    ) -> None: ...
    @overload
    def reduce_scatter_single(
        self, output: Array, array: Array, op: AnyReduceOp = ..., async_op: Yes = ..., timeout: Limit = ...
    ) -> Work: ...
    @overload
    def reduce_scatter_single(
        self, output: Array, array: Array, op: AnyReduceOp = ..., async_op: bool = ..., timeout: Limit = ...
    ) -> Issued: ...
    def reduce_scatter_single(
        self, output: Array, array: Array, op: AnyReduceOp = ReduceOp.SUM, async_op: bool = False, timeout: Limit = None
    ) -> Issued:
        """Combine the arrays of all ranks; block ``r`` of the result goes to the output of rank ``r``."""
        if op.__class__ is not ReduceOp:
            op = checks.reduce_op(op)
        return self.calls.reduce_scatter_single(output, array, op, async_op, timeout)

    @overload
    def all_to_all(self, outputs: Arrays, inputs: Arrays, async_op: No = ..., timeout: Limit = ...) -> None: ...
    @overload
    def all_to_all(self, outputs: Arrays, inputs: Arrays, async_op: Yes = ..., timeout: Limit = ...) -> Work: ...
    @overload
    def all_to_all(self, outputs: Arrays, inputs: Arrays, async_op: bool = ..., timeout: Limit = ...) -> Issued: ...
    def all_to_all(self, outputs: Arrays, inputs: Arrays, async_op: bool = False, timeout: Limit = None) -> Issued:
        """Send ``inputs[r]`` to each rank ``r``, and receive from rank ``r`` into ``outputs[r]``."""
        outputs = checks.array_list(outputs, self._size, "output_tensor_list", "all_to_all", self._rank)
        inputs = checks.array_list(inputs, self._size, "input_tensor_list", "all_to_all", self._rank)
        return self.calls.all_to_all(outputs, inputs, async_op, timeout)

    @overload
    def all_to_all_single(
        self,
        output: Array,
        array: Array,
        output_splits: Sequence[int] | None = ...,
        input_splits: Sequence[int] | None = ...,
        async_op: No = ...,
        timeout: Limit = ...,
    ) -> None: ...
    @overload
    def all_to_all_single(
        self,
        output: Array,
        array: Array,
        output_splits: Sequence[int] | None = ...,
        input_splits: Sequence[int] | None = ...,
        async_op: Yes = ...,
        timeout: Limit = ...,
    ) -> Work: ...
    @overload
    def all_to_all_single(
        self,
        output: Array,
        array: Array,
        output_splits: Sequence[int] | None = ...,
        input_splits: Sequence[int] | None = ...,
        async_op: bool = ...,
        timeout: Limit = ...,
    ) -> Issued: ...
    def all_to_all_single(
        self,
        output: Array,
        array: Array,
        output_splits: Sequence[int] | None = None,
        input_splits: Sequence[int] | None = None,
        async_op: bool = False,
        timeout: Limit = None,
    ) -> Issued:
        """Send block ``r`` of the array to each rank ``r``, and receive block ``r`` of ``output`` from it.

        Splits are numbers of rows along the first dimension; None means equal blocks.
        """
        sends = checks.splits(input_splits, self._size, "input_split_sizes", "all_to_all_single", self._rank)
        receives = checks.splits(output_splits, self._size, "output_split_sizes", "all_to_all_single", self._rank)
        return self.calls.all_to_all_single(output, array, receives, sends, async_op, timeout)

    @overload
    def barrier(self, async_op: No = ..., timeout: Limit = ...) -> None: ...
    @overload
    def barrier(self, async_op: Yes = ..., timeout: Limit = ...) -> Work: ...
    @overload
    def barrier(self, async_op: bool = ..., timeout: Limit = ...) -> Issued: ...
    def barrier(self, async_op: bool = False, timeout: Limit = None) -> Issued:
        """Wait until every rank has called barrier."""
        return self.calls.barrier(async_op, timeout)
