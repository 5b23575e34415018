"""Names that torch.distributed 2.13 still has and warns of."""

from __future__ import annotations

import warnings
from typing import Any, Literal, overload

from procgroup.api.gathering import all_gather_single
from procgroup.api.scattering import reduce_scatter_single
from procgroup.groups.group import ProcessGroup
from procgroup.groups.work import Work
from procgroup.types import AnyReduceOp, Array, ReduceOp, Timeout


@overload
def all_gather_into_tensor(
    output_tensor: Array,
    input_tensor: Array,
    group: ProcessGroup | None = None,
    async_op: Literal[False] = False,
    timeout: Timeout | None = None,
) -> None: ...


@overload
def all_gather_into_tensor(
    output_tensor: Array,
    input_tensor: Array,
    group: ProcessGroup | None = None,
    async_op: Literal[True] = ...,
    timeout: Timeout | None = None,
) -> Work: ...


@overload
def all_gather_into_tensor(
    output_tensor: Array,
    input_tensor: Array,
    group: ProcessGroup | None = None,
    async_op: bool = ...,
    timeout: Timeout | None = None,
) -> Work | None: ...


def all_gather_into_tensor(
    output_tensor: Array,
    input_tensor: Array,
    group: ProcessGroup | None = None,
    async_op: bool = False,
    timeout: Timeout | None = None,
) -> Work | None:
    """Do what ``all_gather_single`` does, after a FutureWarning."""
    _warn("all_gather_into_tensor", "is deprecated. Please", "all_gather_single")
    return all_gather_single(output_tensor, input_tensor, group, async_op, timeout)


@overload
def _all_gather_base(
    output_tensor: Array,
    input_tensor: Array,
    group: ProcessGroup | None = None,
    async_op: Literal[False] = False,
    timeout: Timeout | None = None,
) -> None: ...


@overload
def _all_gather_base(
    output_tensor: Array,
    input_tensor: Array,
    group: ProcessGroup | None = None,
    async_op: Literal[True] = ...,
    timeout: Timeout | None = None,
) -> Work: ...


@overload
def _all_gather_base(
    output_tensor: Array,
    input_tensor: Array,
    group: ProcessGroup | None = None,
    async_op: bool = ...,
    timeout: Timeout | None = None,
) -> Work | None: ...


def _all_gather_base(
    output_tensor: Array,
    input_tensor: Array,
    group: ProcessGroup | None = None,
    async_op: bool = False,
    timeout: Timeout | None = None,
) -> Work | None:
    """Do what ``all_gather_single`` does, after a FutureWarning."""
    _warn("_all_gather_base", "is a private function and will be deprecated. Please", "all_gather_single")
    return all_gather_single(output_tensor, input_tensor, group, async_op, timeout)


@overload
def reduce_scatter_tensor(
    output: Array,
    input: Array,
    op: AnyReduceOp = ReduceOp.SUM,
    group: ProcessGroup | None = None,
    async_op: Literal[False] = False,
    timeout: Timeout | None = None,
) -> None: ...


@overload
def reduce_scatter_tensor(
    output: Array,
    input: Array,
    op: AnyReduceOp = ReduceOp.SUM,
    group: ProcessGroup | None = None,
    async_op: Literal[True] = ...,
    timeout: Timeout | None = None,
) -> Work: ...


@overload
def reduce_scatter_tensor(
    output: Array,
    input: Array,
    op: AnyReduceOp = ReduceOp.SUM,
    group: ProcessGroup | None = None,
    async_op: bool = ...,
    timeout: Timeout | None = None,
) -> Work | None: ...


def reduce_scatter_tensor(
    output: Array,
    input: Array,  # noqa: A002 - torch.distributed's name
    op: AnyReduceOp = ReduceOp.SUM,
    group: ProcessGroup | None = None,
    async_op: bool = False,
    timeout: Timeout | None = None,
) -> Work | None:
    """Do what ``reduce_scatter_single`` does, after a FutureWarning."""
    _warn("reduce_scatter_tensor", "is deprecated. Please", "reduce_scatter_single")
    return reduce_scatter_single(output, input, op, group, async_op, timeout)


@overload
def _reduce_scatter_base(
    output: Array,
    input: Array,
    op: AnyReduceOp = ReduceOp.SUM,
    group: ProcessGroup | None = None,
    async_op: Literal[False] = False,
    timeout: Timeout | None = None,
) -> None: ...


@overload
def _reduce_scatter_base(
    output: Array,
    input: Array,
    op: AnyReduceOp = ReduceOp.SUM,
    group: ProcessGroup | None = None,
    async_op: Literal[True] = ...,
    timeout: Timeout | None = None,
) -> Work: ...


@overload
def _reduce_scatter_base(
    output: Array,
    input: Array,
    op: AnyReduceOp = ReduceOp.SUM,
    group: ProcessGroup | None = None,
    async_op: bool = ...,
    timeout: Timeout | None = None,
) -> Work | None: ...


def _reduce_scatter_base(
    output: Array,
    input: Array,  # noqa: A002 - torch.distributed's name
    op: AnyReduceOp = ReduceOp.SUM,
    group: ProcessGroup | None = None,
    async_op: bool = False,
    timeout: Timeout | None = None,
) -> Work | None:
    """Do what ``reduce_scatter_single`` does, after a FutureWarning."""
    _warn("_reduce_scatter_base", "is a private function and will be deprecated. Please", "reduce_scatter_single")
    return reduce_scatter_single(output, input, op, group, async_op, timeout)


class _ReduceOpNames:
    """The old way to name a ReduceOp: each of its names, after a FutureWarning."""

    def __getattr__(self, name: str) -> Any:
        if name == "__members__":
            value: Any = dict(ReduceOp.__members__)
        elif name in ReduceOp.__members__:
            value = ReduceOp[name]
        else:
            raise AttributeError(f"`reduce_op` has no attribute {name!r}; it has {', '.join(ReduceOp.__members__)}.")
        warnings.warn(
            "`torch.distributed.reduce_op` is deprecated, please use `torch.distributed.ReduceOp` instead",
            FutureWarning,
            stacklevel=2,
        )
        return value


reduce_op: _ReduceOpNames = _ReduceOpNames()
"""``reduce_op.SUM`` is ``ReduceOp.SUM``."""


def _warn(name: str, how: str, instead: str) -> None:
    warnings.warn(
        f"`torch.distributed.{name}` {how} use `torch.distributed.{instead}` instead.", FutureWarning, stacklevel=3
    )
