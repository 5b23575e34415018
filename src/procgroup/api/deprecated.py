"""Deprecated names of torch.distributed 2.13. Their warnings recommend procgroup's names."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar, cast

from procgroup.api.collectives import all_gather_single
from procgroup.api.reductions import reduce_scatter_single
from procgroup.types import ReduceOp

F = TypeVar("F", bound=Callable[..., Any])


def _old_name_of(function: F, status: str = "is deprecated.") -> Callable[[Callable[[], None]], F]:
    """Make the decorated function do what ``function`` does, with its types, after a FutureWarning."""

    def rename(stub: Callable[[], None]) -> F:
        @wraps(function)
        def call(*arguments: Any, **keywords: Any) -> Any:
            old, new = (f"`procgroup.{named.__name__}`" for named in (stub, function))
            warnings.warn(f"{old} {status} Please use {new} instead.", FutureWarning, stacklevel=2)
            return function(*arguments, **keywords)

        call.__name__, call.__doc__ = stub.__name__, stub.__doc__
        return cast(F, call)

    return rename


@_old_name_of(all_gather_single)
def all_gather_into_tensor() -> None:
    """Do what ``all_gather_single`` does, after a FutureWarning."""


@_old_name_of(all_gather_single, "is a private function and will be deprecated.")
def _all_gather_base() -> None:
    """Do what ``all_gather_single`` does, after a FutureWarning."""


@_old_name_of(reduce_scatter_single)
def reduce_scatter_tensor() -> None:
    """Do what ``reduce_scatter_single`` does, after a FutureWarning."""


@_old_name_of(reduce_scatter_single, "is a private function and will be deprecated.")
def _reduce_scatter_base() -> None:
    """Do what ``reduce_scatter_single`` does, after a FutureWarning."""


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
            "`procgroup.reduce_op` is deprecated, please use `procgroup.ReduceOp` instead", FutureWarning, stacklevel=2
        )
        return value


reduce_op: _ReduceOpNames = _ReduceOpNames()
"""``reduce_op.SUM`` is ``ReduceOp.SUM``."""
