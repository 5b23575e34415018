"""Masked arrays: their buffer shows the elements without the mask, so they are refused, by every call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import procgroup as dist
from procgroup import functional
from procgroup.testing import run_ranks


def masked(count: int = 3, **how: Any) -> Any:
    return np.ma.masked_array(np.arange(float(count)), **how)


def refuse_masked_arrays() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    peer = (rank + 1) % size
    good = np.ones(3)
    calls: dict[str, Callable[[], Any]] = {
        "all_reduce": lambda: dist.all_reduce(masked(mask=[0, 1, 0])),
        "all_reduce without a mask": lambda: dist.all_reduce(masked()),
        "all_reduce of a column": lambda: dist.all_reduce(np.ma.masked_array(np.ones((3, 2)))[:, 1]),
        "broadcast": lambda: dist.broadcast(masked(), 0),
        "reduce": lambda: dist.reduce(masked(), 0),
        "gather": lambda: dist.gather(masked(), [good] * size if rank == 0 else None, 0),
        "all_gather": lambda: dist.all_gather([np.zeros(3) for _ in range(size)], masked()),
        "all_gather into it": lambda: dist.all_gather([masked() for _ in range(size)], good),
        "all_gather_single": lambda: dist.all_gather_single(np.ones(3 * size), masked()),
        "scatter": lambda: dist.scatter(masked(), [good] * size if rank == 0 else None, 0),
        "reduce_scatter": lambda: dist.reduce_scatter(np.ones(3), [masked() for _ in range(size)]),
        "reduce_scatter_single": lambda: dist.reduce_scatter_single(np.ones(3), masked(3 * size)),
        "all_to_all": lambda: dist.all_to_all([np.ones(3) for _ in range(size)], [masked() for _ in range(size)]),
        "all_to_all_single": lambda: dist.all_to_all_single(np.ones(size), masked(size)),
        "functional": lambda: functional.all_reduce({"a": masked()}),
    }
    if size > 1:
        calls |= {
            "send": lambda: dist.send(masked(), peer),
            "irecv": lambda: dist.irecv(masked(), peer),
        }
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
