"""One operation on the leaves of a tree: fuse by dtype and device, check all, call once per dtype, take apart."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from procgroup.functional import numbers
from procgroup.functional.fusing import FusedArrays, Leaf, Leaves, make_bundle
from procgroup.functional.operations import AllReduce, FunctionalOperation, GatherIntegers
from procgroup.groups.group import ProcessGroup
from procgroup.types import ReduceOp


@dataclass(frozen=True)
class _FunctionalCall:
    """The call for the leaves of one dtype and device. ``result`` may be ``given``; ``finish`` is for each result."""

    operation: FunctionalOperation
    given: FusedArrays
    result: FusedArrays
    leading: tuple[int, ...]
    finish: Callable[[Any], Any] | None = None


def perform(leaves: Leaves, operation: FunctionalOperation, group: ProcessGroup) -> Any:
    """Make the calls once all are found good: where one is bad, no other rank has seen any of them."""
    group.require_results_at_once(f"functional.{operation.name}")
    calls = deque(_prepare(same, operation, group.size()) for same in leaves.by_dtype())
    for call in calls if len(calls) > 1 else ():
        call.operation.check(group, call.given, call.result)
    results: list[Any] = [None] * len(leaves.all)
    while calls:  # what was given is let go before the next dtype's is copied
        call = calls.popleft()
        call.given.fill()
        call.operation.run(group, call.given, call.result)
        for index, array in call.result.take(call.leading):
            results[index] = array if call.finish is None else call.finish(array)
    return leaves.rebuild(iter(results))


def _prepare(leaves: list[Leaf], operation: FunctionalOperation, size: int) -> _FunctionalCall:
    finish = None
    if isinstance(operation, AllReduce) and leaves[0].is_integer:
        finish = numbers.combiner(operation.op)
        assert isinstance(operation.op, ReduceOp)  # the combiner has refused any other
        operation = GatherIntegers(operation.op)
    shapes = [operation.part_shape(leaf, size) for leaf in leaves]
    given = make_bundle(leaves, shapes, size if operation.takes_one_per_rank else 1)
    rows = size if operation.returns_one_per_rank else 1
    result = given if operation.in_place else make_bundle(leaves, shapes, rows)
    return _FunctionalCall(operation, given, result, (size,) if operation.returns_one_per_rank else (), finish)
