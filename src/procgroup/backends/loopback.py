"""The backend of a world of 1: every collective is over at once, and there is nobody to exchange messages with.

It checks what the native backend checks, so that a program that works alone works on many ranks. Messages to and from
oneself are refused as they are there: a blocking receive would wait for itself.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from procgroup.arrays.array_view import ArrayView
from procgroup.arrays.view import view
from procgroup.errors import ArgumentError
from procgroup.groups.backend import Operation
from procgroup.types import AnyReduceOp, PremulSum, ReduceOp

_NOT_FOR_FLOATS = frozenset(("BAND", "BOR", "BXOR"))
_NOT_FOR_INTEGERS = frozenset(("PREMUL_SUM",))
_NOT_FOR_BOOL = _NOT_FOR_INTEGERS | {"AVG"}
_FOR_COMPLEX = frozenset(("SUM", "AVG", "PRODUCT", "PREMUL_SUM"))


class LoopbackBackend:
    """The verbs for a group of one rank. What a collective reads is copied to where it writes."""

    transport = "loopback"

    def __init__(self, *, name: str, group_name: str, identity: int = 0) -> None:
        self.name = name
        self.identity = identity
        self._subgroups = itertools.count(1)
        self._group_name = group_name

    def reduce_in_rank_order(self) -> None:
        """Do nothing: there is one rank."""

    def make_subgroup(
        self, ranks: Sequence[int], *, op: str, name: str, group_name: str, timeout: float
    ) -> LoopbackBackend:
        identity = self.identity << 20 | next(self._subgroups)
        return LoopbackBackend(name=name, group_name=group_name, identity=identity)

    def broadcast(
        self, array: Any, root: int, async_op: bool = False, timeout: float | None = None
    ) -> Operation | None:
        view(array)  # a root's array is only read
        return self._over(async_op)

    def reduce(
        self, array: Any, root: int, op: AnyReduceOp, async_op: bool = False, timeout: float | None = None
    ) -> Operation | None:
        return self._reduce_into("reduce", array, "tensor", array, "tensor", op, async_op)

    def all_reduce(
        self, array: Any, op: AnyReduceOp, async_op: bool = False, timeout: float | None = None
    ) -> Operation | None:
        return self._reduce_into("all_reduce", array, "tensor", array, "tensor", op, async_op)

    def all_reduce_coalesced(
        self,
        arrays: Sequence[Any],
        ops: Sequence[AnyReduceOp],
        async_op: bool = False,
        timeout: float | None = None,
    ) -> list[Any] | None:
        for array, op in zip(arrays, ops, strict=True):
            self.check("all_reduce", array, op)
        operations = [self.all_reduce(array, op, async_op) for array, op in zip(arrays, ops, strict=True)]
        return operations if async_op else None

    def gather(
        self,
        array: Any,
        outputs: Sequence[Any] | None,
        root: int,
        async_op: bool = False,
        timeout: float | None = None,
    ) -> Operation | None:
        assert outputs is not None
        return self._copy(array, "tensor", outputs[0], "gather_list[0]", async_op)

    def all_gather(
        self, outputs: Sequence[Any], array: Any, async_op: bool = False, timeout: float | None = None
    ) -> Operation | None:
        return self._copy(array, "tensor", outputs[0], "tensor_list[0]", async_op)

    def all_gather_single(
        self, output: Any, array: Any, async_op: bool = False, timeout: float | None = None
    ) -> Operation | None:
        return self._copy(array, "input_tensor", output, "output_tensor", async_op)

    def scatter(
        self,
        array: Any,
        inputs: Sequence[Any] | None,
        root: int,
        async_op: bool = False,
        timeout: float | None = None,
    ) -> Operation | None:
        assert inputs is not None
        return self._copy(inputs[0], "scatter_list[0]", array, "tensor", async_op)

    def reduce_scatter(
        self,
        output: Any,
        inputs: Sequence[Any],
        op: AnyReduceOp,
        async_op: bool = False,
        timeout: float | None = None,
    ) -> Operation | None:
        return self._reduce_into("reduce_scatter", inputs[0], "input_list[0]", output, "output", op, async_op)

    def reduce_scatter_single(
        self, output: Any, array: Any, op: AnyReduceOp, async_op: bool = False, timeout: float | None = None
    ) -> Operation | None:
        return self._reduce_into("reduce_scatter_single", array, "input", output, "output", op, async_op)

    def all_to_all(
        self, outputs: Sequence[Any], inputs: Sequence[Any], async_op: bool = False, timeout: float | None = None
    ) -> Operation | None:
        return self._copy(inputs[0], "input_tensor_list[0]", outputs[0], "output_tensor_list[0]", async_op)

    def all_to_all_single(
        self,
        output: Any,
        array: Any,
        output_splits: Sequence[int] | None,
        input_splits: Sequence[int] | None,
        async_op: bool = False,
        timeout: float | None = None,
    ) -> Operation | None:
        _check_rows(output, output_splits, "output")
        _check_rows(array, input_splits, "input")
        return self._copy(array, "input", output, "output", async_op)

    def barrier(self, async_op: bool = False, timeout: float | None = None) -> Operation | None:
        return self._over(async_op)

    def send(
        self, array: Any, destination: int, tag: int, async_op: bool = False, timeout: float | None = None
    ) -> NoReturn:
        view(array)
        _refuse_oneself("destination")

    def recv(self, array: Any, source: int, tag: int, async_op: bool = False, timeout: float | None = None) -> NoReturn:
        view(array, writable=True)
        if source < 0:
            raise ValueError(
                f"Invalid source rank: group {self._group_name} has one rank, so no other rank could send what `recv` "
                "from any rank waits for. Receive in a group of two ranks or more."
            )
        _refuse_oneself("source")

    def check(self, verb: str, *arguments: Any) -> None:
        checks = _Checks(name=self.name, group_name=self._group_name)
        getattr(checks, verb)(*arguments)

    def shutdown(self, reason: str = "", flush: float = 0.0) -> None:
        """Do nothing: nothing is ever pending."""

    def fail(self, reason: str, at_once: bool) -> None:
        """Do nothing: there is no other rank."""

    def abort(self) -> None:
        """Do nothing: nothing is ever pending."""

    def _copy(self, array: Any, array_name: str, output: Any, output_name: str, async_op: bool) -> Operation | None:
        source = view(array, name=array_name)
        target = view(output, writable=True, name=output_name)
        _check_same(source, array_name, target, output_name)
        return self._over(async_op, lambda: target.copy_from(source))

    def _reduce_into(
        self, verb: str, array: Any, array_name: str, output: Any, output_name: str, op: AnyReduceOp, async_op: bool
    ) -> Operation | None:
        source = view(array, writable=array is output, name=array_name)
        target = source if array is output else view(output, writable=True, name=output_name)
        _check_same(source, array_name, target, output_name)
        _check_reduction(verb, source.dtype, op)
        return self._over(async_op, lambda: _reduce(source, target, op))

    def _over(self, async_op: bool, move: Callable[[], None] = lambda: None) -> Operation | None:
        """Move what a call moves, now that its arguments are checked."""
        move()
        return Done() if async_op else None


class _Checks(LoopbackBackend):
    """The same verbs, which check their arguments and do nothing else."""

    def _over(self, async_op: bool, move: Callable[[], None] = lambda: None) -> None: ...


class Done:
    """An operation that was over before it was returned."""

    source = -1

    def wait(self, timeout: float | None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True

    def exception(self) -> BaseException | None:
        return None

    def on_completion(self, callback: Callable[[], None]) -> None:
        callback()


def _refuse_oneself(side: str) -> NoReturn:
    """Raise what the native backend raises."""
    raise ValueError(f"Invalid {side} rank: {side} rank should not be the same as the rank of the current process.")


def _reduce(source: ArrayView, target: ArrayView, op: AnyReduceOp) -> None:
    """Write the reduction over one rank: the elements themselves, or multiplied by their factor."""
    if isinstance(op, PremulSum):
        target.numbers()[...] = _scaled(source.numbers(), op.factor).reshape(target.shape)
    else:
        target.copy_from(source)


def _scaled(numbers: Any, factor: float) -> Any:
    """Multiply as the native backend does: 16-bit floats in float32, complex numbers part by part."""
    import numpy

    with numpy.errstate(all="ignore"):
        wide = numbers.astype("float32" if numbers.itemsize == 2 else numbers.dtype, order="C", copy=True)
        parts = wide.reshape(-1).view(wide.real.dtype)
        parts *= parts.dtype.type(factor)
        return wide.astype(numbers.dtype)


def _check_reduction(verb: str, dtype: str, op: AnyReduceOp) -> None:
    """Refuse what the native backend refuses, in its words."""
    where = f"{verb} on rank 0:"
    if op == ReduceOp.PREMUL_SUM:
        raise TypeError(f"{where} ReduceOp.PREMUL_SUM needs a factor; pass ReduceOp.PREMUL_SUM(factor) as `op`")
    if "float8" in dtype:
        raise TypeError(f"{where} {dtype} arrays can be moved, not reduced; convert them to float16 or wider")
    name = op.op.name if isinstance(op, PremulSum) else ReduceOp(op).name
    if "complex" in dtype and name not in _FOR_COMPLEX:
        raise ValueError(f"{where} {verb} does not support ReduceOp.{name} on complex tensors")
    floating = "float" in dtype or "complex" in dtype
    refused = _NOT_FOR_FLOATS if floating else _NOT_FOR_BOOL if dtype == "bool" else _NOT_FOR_INTEGERS
    if name in refused:
        raise ArgumentError(
            f"{where} ReduceOp.{name} is not defined for {dtype} arrays; use another op or convert the array"
        )


def _check_same(source: ArrayView, source_name: str, target: ArrayView, target_name: str) -> None:
    if source.dtype != target.dtype:
        raise ValueError(
            f"Invalid usage of tensors with different dtypes: found {source.dtype} in `{source_name}` "
            f"and {target.dtype} in `{target_name}`."
        )
    if source.count != target.count:
        raise ArgumentError(
            f"`{target_name}` has {target.count} elements; expected {source.count}, as `{source_name}` has."
        )


def _check_rows(array: Any, splits: Sequence[int] | None, name: str) -> None:
    if splits is None:
        return
    rows = view(array, name=name).rows
    if sum(splits) != rows:
        raise ArgumentError(
            f"Split sizes doesn't match total dim 0 size: `{name}` has {rows} rows, its splits {list(splits)} "
            f"add up to {sum(splits)}."
        )
