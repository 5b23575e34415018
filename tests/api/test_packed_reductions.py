"""Coalesced all_reduces give what so many single ones give; small arrays go out together, in fewer calls."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from seeded_cases import Case, values

import procgroup as dist
from layouts import LAYOUTS, arranged
from oracle import DTYPES, OPS, Array, combined, is_defined
from procgroup.testing import run_ranks
from procgroup.types import AnyReduceOp
from world import placed

transports = pytest.mark.parametrize("transport", ["shm", "tcp", "spanning"])
SUM = dist.ReduceOp.SUM


@dataclass(frozen=True)
class Reduced:
    """One array of a list: what each rank gives, in which layout, and with which op."""

    case: Case
    layouts: tuple[str, ...]
    place: int

    def given(self, rank: int) -> Array:
        return values(self.case, rank, self.place, self.case.count)

    def laid_out(self, rank: int) -> Array:
        return arranged(self.given(rank), self.layouts[rank])

    def total(self, size: int) -> Array:
        return combined(self.case.op, [self.given(rank) for rank in range(size)])


def any_list(random: np.random.Generator, size: int, dtypes: list[str]) -> list[Reduced]:
    """Return arrays of few dtypes and ops, so that many go together; some are empty, 0-d or too large for it."""
    cases = []
    for dtype in dtypes:
        ops = [op for op in OPS if is_defined(op, dtype)]
        for op in random.choice(ops, 2):
            counts = [*random.integers(0, 70, 6), 0, 1, 3000, 20_011]
            cases += [Case("all_reduce", dtype, int(count), str(op)) for count in counts]
    random.shuffle(cases)  # type: ignore[arg-type]
    return [Reduced(case, tuple(random.choice(list(LAYOUTS), size)), place) for place, case in enumerate(cases)]


def reduce_in_manager(arrays: list[Any], ops: list[AnyReduceOp], async_op: bool = False) -> None:
    with dist._coalescing_manager(async_ops=async_op) as manager:
        for array, op in zip(arrays, ops, strict=True):
            dist.all_reduce(array, op)
    manager.wait()


def calls_made() -> int:
    return int(dist.group.WORLD.records()[-1]["sequence"])  # type: ignore[union-attr]


@pytest.mark.parametrize(("size", "transport"), [(1, "shm"), (2, "shm"), (3, "tcp"), (4, "shm")])
@pytest.mark.parametrize("seed", range(5))
def test_any_list_of_arrays_of_any_layout_is_reduced_as_numpy_does_with_the_same_bits_on_every_rank(
    size: int, transport: str, seed: int
) -> None:
    random = np.random.default_rng([seed, size])
    dtypes = [dtype for dtype in DTYPES if is_defined("SUM", dtype)]
    chosen = any_list(random, size, list(random.choice(dtypes, 3, replace=False)))

    def reduce() -> None:
        rank = dist.get_rank()
        arrays = [one.laid_out(rank) for one in chosen]
        reduce_in_manager(arrays, [dist.ReduceOp[one.case.op] for one in chosen], async_op=seed % 2 == 1)
        for one, array in zip(chosen, arrays, strict=True):
            result, total = np.ascontiguousarray(array).reshape(-1), one.total(size)
            assert result.tobytes() == total.tobytes(), f"{one}: {result} instead of {total}"

    run_ranks(reduce, size, **placed(transport, size), timeout=60)


@transports
@pytest.mark.parametrize("dtype", DTYPES)
def test_lists_of_every_dtype_and_op_are_reduced(dtype: str, transport: str) -> None:
    def reduce() -> None:
        for op in (op for op in OPS if is_defined(op, dtype)):
            chosen = [Reduced(Case("all_reduce", dtype, count, op), ("flat",) * 3, count) for count in (7, 0, 1, 64)]
            arrays = [one.laid_out(dist.get_rank()) for one in chosen]
            dist.all_reduce_coalesced(arrays, dist.ReduceOp[op])
            for one, array in zip(chosen, arrays, strict=True):
                assert array.tobytes() == one.total(3).tobytes(), (op, one.case.count)

    run_ranks(reduce, 3, **placed(transport, 3))


@transports
def test_every_call_in_the_manager_has_a_factor_of_its_own_on_every_rank(transport: str) -> None:
    def reduce() -> None:
        rank = dist.get_rank()
        arrays = [np.full((2, 3), 4.0)[:, ::2] for _ in range(5)]
        reduce_in_manager(arrays, [dist.ReduceOp.PREMUL_SUM(place + rank * 0.5) for place in range(5)])
        assert [array.tolist() for array in arrays] == [[[8.0 * place + 2.0] * 2] * 2 for place in range(5)]
        dist.all_reduce_coalesced(arrays, dist.ReduceOp.PREMUL_SUM(0.5))
        assert arrays[3].tolist() == [[26.0] * 2] * 2

    run_ranks(reduce, 2, **placed(transport, 2))


def test_small_arrays_go_out_in_one_call_and_large_ones_in_calls_of_their_own() -> None:
    def reduce() -> None:
        dist.barrier()
        reduce_in_manager([np.ones(16) for _ in range(200)], [SUM] * 200)
        assert calls_made() == 2
        mixed = [np.ones(count, np.float32) for count in (10, 9000, 10, 9000, 10)]
        dist.all_reduce_coalesced(mixed)
        assert calls_made() == 5
        assert all((array == 2).all() for array in mixed)

    run_ranks(reduce, 2)


def test_the_manager_matches_the_call_that_takes_a_list_and_one_array_matches_a_plain_call() -> None:
    def reduce() -> None:
        rank = dist.get_rank()
        arrays = [np.full(count, rank + 1.0) for count in (3, 5)]
        if rank == 0:
            reduce_in_manager(arrays, [SUM] * 2)
            reduce_in_manager(arrays[:1], [SUM])
        else:
            dist.all_reduce_coalesced(arrays)
            dist.all_reduce(arrays[0])
        assert (arrays[0] == 6).all()
        assert (arrays[1] == 3).all()

    run_ranks(reduce, 2)


def test_limits_that_differ_between_calls_and_ranks_change_nothing() -> None:
    def reduce() -> None:
        arrays = [np.ones(2) for _ in range(4)]
        with dist._coalescing_manager():
            for place, array in enumerate(arrays):
                dist.group.WORLD.all_reduce(array, timeout=5.0 + place * dist.get_rank())  # type: ignore[union-attr]
        assert all((array == 2).all() for array in arrays)

    run_ranks(reduce, 2)


@transports
@pytest.mark.parametrize("async_op", [False, True])
@pytest.mark.parametrize(
    ("mine", "others"), [([3, 5], [3, 6]), ([3, 5], [5, 3]), ([3, 5], [3, 5, 0]), ([3, 5], [8]), ([4, 4], [4, 4, 4])]
)
def test_lists_that_differ_between_ranks_are_a_mismatch_that_names_both_calls_and_changes_no_array(
    mine: list[int], others: list[int], async_op: bool, transport: str
) -> None:
    def reduce() -> None:
        counts = mine if dist.get_rank() == 0 else others
        arrays = [np.full((count, 2), 3.0, np.float32)[:, 0] for count in counts]
        with pytest.raises(dist.CollectiveMismatch, match=r"all_reduce\(SUM\) of .* float32") as raised:
            reduce_in_manager(arrays, [SUM] * len(arrays), async_op)
        first, second = set(raised.value.calls.values())  # they tell the calls apart
        assert first != second
        assert all((array == 3).all() for array in arrays)

    run_ranks(reduce, 2, **placed(transport, 2))


def test_an_array_that_is_small_on_one_rank_only_is_a_mismatch() -> None:
    def reduce() -> None:
        arrays = [np.ones(3), np.ones(9000 if dist.get_rank() == 0 else 5)]
        with pytest.raises(dist.CollectiveMismatch):
            dist.all_reduce_coalesced(arrays)
        assert all((array == 1).all() for array in arrays)

    run_ranks(reduce, 2)


def test_another_op_or_dtype_among_many_is_a_mismatch() -> None:
    def reduce(given: Any, op: Any) -> None:
        odd = dist.get_rank() == 1
        arrays = [np.ones(2), given if odd else np.ones(2), np.ones(2)]
        with pytest.raises(dist.CollectiveMismatch):
            reduce_in_manager(arrays, [SUM, op if odd else SUM, SUM])
        assert all((array == 1).all() for array in arrays)

    run_ranks(reduce, 2, np.ones(2, np.float32), SUM)
    run_ranks(reduce, 2, np.ones(2), dist.ReduceOp.MAX)


@transports
def test_arrays_that_share_memory_are_reduced_one_after_the_other(transport: str) -> None:
    def reduce() -> None:
        array = np.ones(6)
        dist.all_reduce_coalesced([array, array[2:], array[::5]])
        assert array.tolist() == [9, 3, 9, 9, 9, 27]

    run_ranks(reduce, 3, **placed(transport, 3))


def test_columns_of_one_matrix_go_out_together_with_whole_arrays_of_other_ranks() -> None:
    def reduce() -> None:
        matrix = np.arange(200.0).reshape(10, 20)
        columns = list(matrix.T) if dist.get_rank() == 0 else [column.copy() for column in matrix.T]
        dist.all_reduce_coalesced(columns)
        assert calls_made() == 1
        assert (np.stack(columns) == 2 * np.arange(200.0).reshape(10, 20).T).all()

    run_ranks(reduce, 2)


@transports
def test_packed_calls_overlap_with_calls_before_and_after_them(transport: str) -> None:
    def reduce() -> None:
        before, after = np.ones(50_000), np.ones(3)
        first = dist.all_reduce(before, async_op=True)
        arrays = [np.ones(40) for _ in range(100)]
        future = dist.all_reduce_coalesced(arrays, async_op=True)
        dist.all_reduce(after)
        assert future is not None
        assert first is not None
        assert all(result is array for result, array in zip(future.wait(), arrays, strict=True))
        first.wait()
        assert all((array == 3).all() for array in (before, after, *arrays))

    run_ranks(reduce, 3, **placed(transport, 3))


@pytest.mark.parametrize("async_op", [False, True])
def test_packed_arrays_keep_their_values_when_a_rank_leaves_instead(async_op: bool) -> None:
    def reduce() -> None:
        arrays = [np.full(4, 5.0) for _ in range(3)]
        if dist.get_rank() == 0:
            with pytest.raises(dist.PeerLost):
                wait_for_all(arrays)
        assert all((array == 5).all() for array in arrays)

    def wait_for_all(arrays: list[Array]) -> None:
        work = dist.group.WORLD.all_reduce_coalesced(arrays, async_op=async_op)  # type: ignore[union-attr]
        if work is not None:
            work.wait()

    run_ranks(reduce, 2)
