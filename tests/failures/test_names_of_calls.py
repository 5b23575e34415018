"""Errors name the function that the program called, and the types that it gave, whichever calls it is made of."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from failures.waiting_calls import TRANSPORTS, on

import procgroup as dist
from procgroup import functional
from world import run

MAX = dist.ReduceOp.MAX

INTEGERS: dict[str, tuple[Callable[[], Any], Callable[[], Any], str, str]] = {
    "int and float": (
        lambda: functional.all_reduce(3),
        lambda: functional.all_reduce(3.0),
        "all_reduce(SUM) of 1 Python int",
        "all_reduce(SUM) of 1 float64",
    ),
    "int and bool": (
        lambda: functional.all_reduce(3),
        lambda: functional.all_reduce(True),
        "all_reduce(SUM) of 1 Python int",
        "all_reduce(SUM) of 1 Python bool",
    ),
    "SUM and MAX": (
        lambda: functional.all_reduce(3),
        lambda: functional.all_reduce(3, MAX),
        "all_reduce(SUM) of 1 Python int",
        "all_reduce(MAX) of 1 Python int",
    ),
    "combined and gathered": (
        lambda: functional.all_reduce(3),
        lambda: functional.all_gather(3),
        "all_reduce(SUM) of 1 Python int",
        "all_gather of 1 int64",
    ),
}


def differ(rank: int, size: int, case: str) -> str:
    dist.init_process_group(timeout=20)
    with pytest.raises(dist.CollectiveMismatch) as caught:
        INTEGERS[case][rank]()
    return str(caught.value)


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("case", INTEGERS)
def test_integers_that_are_combined_differ_from_all_else(case: str, transport: str) -> None:
    calls = INTEGERS[case][2:]
    for rank, text in enumerate(run(differ, 2, args=(case,), environment=on(transport))):
        assert text.startswith(("functional.all_reduce #1 on group", "functional.all_gather #1 on group")), text
        for call in calls:
            assert f"{call} at test_names_of_calls.py:" in text, text
        assert f"this rank called {calls[rank]}" in text, text
        assert text.count("(functional.all_reduce)") == (1 if "all_gather" in calls[1] else 2), text


DERIVED: dict[str, Callable[[int], Any]] = {
    "functional.all_gather": lambda rank: functional.all_gather(np.zeros(3 + rank)),
    "functional.broadcast": lambda rank: functional.broadcast({"a": np.zeros(3 + rank)}),
    "functional.reduce_scatter": lambda rank: functional.reduce_scatter(np.zeros((2, 3 + rank))),
    "functional.all_to_all": lambda rank: functional.all_to_all(np.zeros((2, 3 + rank))),
    "functional.sendrecv": lambda rank: functional.sendrecv(np.zeros(3 + rank), 1 - rank, 1 - rank),
    "all_gather_object": lambda rank: dist.barrier() if rank else dist.all_gather_object([None] * 2, 1),
    "broadcast_object_list": lambda rank: dist.barrier() if rank else dist.broadcast_object_list([1], 0),
    "gather_object": lambda rank: dist.barrier() if rank else dist.gather_object(1, [None] * 2),
    "scatter_object_list": lambda rank: dist.barrier() if rank else dist.scatter_object_list([None], [1, 2]),
    "monitored_barrier": lambda rank: dist.all_reduce(np.ones(1)) if rank else dist.monitored_barrier(),
}


def call_derived(rank: int, size: int, function: str) -> tuple[str, str]:
    dist.init_process_group(timeout=20)
    with pytest.raises(dist.CollectiveMismatch) as caught:
        DERIVED[function](rank)
        dist.barrier()  # the root of a broadcast learns it here
    return str(caught.value), caught.value.issued_at


@pytest.mark.parametrize("function", DERIVED)
def test_an_error_begins_with_the_function_that_was_called(function: str) -> None:
    (text, issued_at), (other, _) = run(call_derived, 2, args=(function,))
    assert text.startswith(f"{function} #"), text
    assert issued_at.startswith("test_names_of_calls.py:") and "(" not in issued_at
    # No line of another rank is known of messages, and blocks of unequal sizes are shown in place of the calls.
    if function not in ("functional.sendrecv", "functional.all_to_all"):
        assert f"({function})" in other, other


def alternate(rank: int, size: int) -> list[str]:
    """Call two functions in one place of the program, of which the last one is remembered."""
    dist.init_process_group(timeout=20)
    names = []
    for function in [dist.all_reduce, functional.all_reduce, functional.all_reduce, dist.all_reduce]:
        group = dist.new_group([0, 1])
        assert group is not None
        with pytest.raises(dist.CollectiveMismatch) as caught:
            function(np.zeros(3 + rank), dist.ReduceOp.SUM, group)
        names.append(str(caught.value).split(" #")[0])
    return names


def test_two_functions_called_in_one_place_are_told_apart() -> None:
    expected = ["all_reduce", "functional.all_reduce", "functional.all_reduce", "all_reduce"]
    assert run(alternate, 2) == [expected, expected]
