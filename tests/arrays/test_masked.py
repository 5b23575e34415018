"""Masked arrays: their buffer shows the elements without the mask, so they are refused, by every call."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
from operation_table import COLLECTIVES, Part

import procgroup as dist
from oracle import Array
from procgroup import functional
from procgroup.testing import run_ranks


def masked(count: int = 3, **how: Any) -> Any:
    return np.ma.masked_array(np.arange(float(count)), **how)


class MaskedPart(Part):
    """A part whose arrays of one role are masked."""

    role = ""

    def wrap(self, array: Array) -> Any:
        is_masked = self.held[-1].name.startswith((self.role, "array"))
        return np.ma.masked_array(array) if is_masked else array


def part_of(name: str, role: str = "") -> MaskedPart:
    """Return a part with masked inputs or outputs; with both where only the root has a list."""
    part = MaskedPart(name, dist.get_rank(), dist.get_world_size())
    part.role = "" if part.row.root else role
    return part


def refuse_masked_arrays() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    peer = (rank + 1) % size
    good = np.ones(3)
    calls: dict[str, Callable[[], Any]] = {
        f"{name} with masked {role}s": partial(part_of(name, role).start, dist)
        for name in COLLECTIVES
        for role in ("input", "output")
        if name != "barrier" and (size > 1 or name != "neighbor_all_to_all")  # one rank has no neighbour
    }
    calls |= {
        "all_reduce with a mask": lambda: dist.all_reduce(masked(mask=[0, 1, 0])),
        "all_reduce of a column": lambda: dist.all_reduce(np.ma.masked_array(np.ones((3, 2)))[:, 1]),
        "functional": lambda: functional.all_reduce({"a": masked()}),
    }
    if size > 1:
        calls |= {"send": lambda: dist.send(masked(), peer), "irecv": lambda: dist.irecv(masked(), peer)}
    for name, call in calls.items():
        with pytest.raises(TypeError, match=r"is a masked array, and a mask is not sent\. Pass .*\.filled\("):
            pytest.fail(f"{name} returned {call()}")
    dist.all_reduce(good)
    assert (good == size).all()


@pytest.mark.parametrize("size", [1, 2])
def test_a_masked_array_is_refused_and_the_group_goes_on(size: int) -> None:
    run_ranks(refuse_masked_arrays, size)


def test_what_only_looks_masked_is_an_array() -> None:
    class WithMask(np.ndarray):
        mask = 0xFF

    def add() -> list[float]:
        array = np.ones(2).view(WithMask)
        dist.all_reduce(array)
        return array.tolist()  # type: ignore[no-any-return]

    assert run_ranks(add, 2) == [[2.0, 2.0]] * 2
