"""Lists and split sizes that do not fit those of the other ranks: every rank raises, and no array changes.

Afterwards the group has ended. Ranks are threads, so that a world for each takes milliseconds.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from failures.watched import Arrays

import procgroup as dist
from procgroup.testing import run_ranks
from world import placed

Call = Callable[[Arrays], object]

SIZE = 3

transports = pytest.mark.parametrize("transport", ["shm", "tcp", "spanning"])


def exchange(a: Arrays, expected: list[int], given: list[int], dtype: str = "float64", single: bool = False) -> object:
    if single:
        return dist.all_to_all_single(a(sum(expected), dtype), a(sum(given), dtype), expected, given)
    return dist.all_to_all(a.list(*expected, dtype=dtype), a.list(*given, dtype=dtype))


def disagree(many: int) -> dict[str, tuple[Call, Call, str]]:
    """What the first two ranks do, what the last one does instead, and a word of the error of all."""
    n = many

    def gather(a: Arrays, count: int = n, dtype: str = "float64", root: int = 0) -> object:
        is_root = dist.get_rank() == root
        return dist.gather(a(count, dtype), [a(count, dtype) for _ in range(SIZE)] if is_root else None, root)

    def scatter(a: Arrays, count: int = n, dtype: str = "float64", root: int = 0) -> object:
        is_root = dist.get_rank() == root
        return dist.scatter(a(count, dtype), [a(count, dtype) for _ in range(SIZE)] if is_root else None, root)

    def reduce_scatter(
        a: Arrays, counts: list[int], dtype: str = "float64", op: dist.ReduceOp = dist.ReduceOp.SUM
    ) -> object:
        return dist.reduce_scatter(a(counts[dist.get_rank()], dtype), a.list(*counts, dtype=dtype), op)

    def equal(a: Arrays, **how: Any) -> object:
        return exchange(a, [n, n, n], [n, n, n], **how)

    def gather_uneven(a: Arrays, counts: list[int]) -> object:
        return dist.all_gather(a.list(*counts), a(counts[dist.get_rank()]))

    def beside(
        a: Arrays,
        given: tuple[int, int] = (n, n),
        taken: tuple[int, int] = (n, n),
        shape: tuple[int, ...] = (SIZE,),
        periodic: bool = True,
        dtype: str = "float64",
    ) -> object:
        outputs, inputs = (a.list(*counts * len(shape), dtype=dtype) for counts in (taken, given))
        return dist.neighbor_all_to_all(outputs, inputs, shape, periodic)

    return {
        "gather: size": (gather, lambda a: gather(a, n + 1), str(n + 1)),
        "gather: dtype": (gather, lambda a: gather(a, dtype="int64"), "int64"),
        "gather: root": (gather, lambda a: gather(a, root=2), "root"),
        "scatter: size": (scatter, lambda a: scatter(a, n - 1), str(n - 1)),
        "scatter: dtype": (scatter, lambda a: scatter(a, dtype="float32"), "float32"),
        "scatter: root": (scatter, lambda a: scatter(a, root=1 + dist.get_rank() % 2), "root"),
        "gather against scatter": (gather, scatter, "scatter"),
        "all_gather: sizes": (
            lambda a: gather_uneven(a, [n, n, n]),
            lambda a: gather_uneven(a, [n, n, n + 2]),
            "all_gather",
        ),
        "all_gather: sizes in another order": (
            lambda a: gather_uneven(a, [n, n + 1, n]),
            lambda a: gather_uneven(a, [n + 1, n, n]),
            "all_gather",
        ),
        "reduce_scatter: sizes in another order": (
            lambda a: reduce_scatter(a, [n, n + 1, n]),
            lambda a: reduce_scatter(a, [n + 1, n, n]),
            "reduce_scatter",
        ),
        "reduce_scatter: op": (
            lambda a: reduce_scatter(a, [n] * SIZE),
            lambda a: reduce_scatter(a, [n] * SIZE, op=dist.ReduceOp.MAX),
            "MAX",
        ),
        "reduce_scatter: dtype": (
            lambda a: reduce_scatter(a, [n] * SIZE),
            lambda a: reduce_scatter(a, [n] * SIZE, dtype="float32"),
            "float32",
        ),
        "all_to_all: a size": (equal, lambda a: exchange(a, [n, n, n], [n, n + 3, n]), str(n + 3)),
        "all_to_all: an expected size": (equal, lambda a: exchange(a, [n - 1, n, n], [n, n, n]), str(n - 1)),
        "all_to_all: dtype": (equal, lambda a: equal(a, dtype="int64"), "int64"),
        "neighbours: a size": (beside, lambda a: beside(a, given=(n, n + 3)), str(n + 3)),
        "neighbours: an expected size": (beside, lambda a: beside(a, taken=(n - 1, n)), str(n - 1)),
        "neighbours: dtype": (beside, lambda a: beside(a, dtype="int64"), "int64"),
        "neighbours: shape": (beside, lambda a: beside(a, shape=(SIZE, 1)), "shape=(3, 1), periodic=(True, True)"),
        "neighbours: order of extents": (
            lambda a: beside(a, shape=(1, SIZE)),
            lambda a: beside(a, shape=(SIZE, 1)),
            "shape=(1, 3)",
        ),
        "neighbours: periodic": (beside, lambda a: beside(a, periodic=False), "periodic=(False,)"),
        "neighbours against all": (beside, equal, "neighbor_all_to_all(shape=(3,), periodic=(True,)) of float64"),
        "splits: a size": (
            lambda a: equal(a, single=True),
            lambda a: exchange(a, [n, n, n], [n + 1, n - 1, n], single=True),
            str(n + 1),
        ),
        "splits: nothing for one": (
            lambda a: equal(a, single=True),
            lambda a: exchange(a, [n, 0, n], [n, n, n], single=True),
            " 0 ",
        ),
    }


def disagree_once(what: str, many: int) -> tuple[str, dict[int, str]]:
    """Make one of the calls; return this rank's error."""
    usual, other, _ = disagree(many)[what]
    arrays = Arrays()
    with pytest.raises(dist.CollectiveMismatch) as caught:
        result = (other if dist.get_rank() == SIZE - 1 else usual)(arrays)
        if what.startswith(("gather", "scatter")):
            dist.barrier()  # a rank that did not wait for all others learns it here
        pytest.fail(f"{what} returned {result}")
    assert caught.value.intact is False or arrays.are_unchanged(), f"{what}: an array has changed"
    with pytest.raises(dist.GroupBroken):
        dist.barrier()
    return str(caught.value), dict(caught.value.calls)


@transports
@pytest.mark.parametrize("many", [4, 30_000])
def test_what_shows_beside_the_others_is_told_to_every_rank(transport: str, many: int) -> None:
    for what, (_, _, word) in disagree(many).items():
        told = run_ranks(disagree_once, SIZE, what, many, **placed(transport, SIZE))
        calls = told[0][1]
        for rank, (text, described) in enumerate(told):
            assert f"rank {rank} of {SIZE}" in text, f"{what}: {text}"
            assert described == calls, f"{what}: the ranks raise different errors"
            assert word in text, f"{what} names no {word!r}: {text}"
        assert SIZE - 1 in calls and len(calls) > 1, f"{what}: {calls}"
