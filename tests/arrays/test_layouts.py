"""Arrays that do not lie whole in memory, with another layout on each rank: the right numbers, and nothing beside them.

One world plays every verb with every layout. A *laid* array is a view with the wanted values inside of a larger
array, whose other elements must keep theirs.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest

import procgroup as dist
from procgroup.testing import run_ranks
from world import run

GUARD = 77
Array = np.ndarray[Any, np.dtype[Any]]


def _column(values: Array) -> tuple[Array, Array]:
    whole = np.full((values.size, 3), GUARD, values.dtype)
    return whole, whole[:, 1]


def _backwards(values: Array) -> tuple[Array, Array]:
    whole = np.full(2 * values.size + 1, GUARD, values.dtype)
    return whole, whole[::-1][1::2]


def _turned(values: Array) -> tuple[Array, Array]:
    rows = 2 if values.size % 2 == 0 else 1
    whole = np.full((values.size // rows, rows + 1), GUARD, values.dtype)
    return whole, whole[:, :rows].T


def _plain(values: Array) -> tuple[Array, Array]:
    whole = np.full(values.size + 2, GUARD, values.dtype)
    return whole, whole[1:-1]


LAYOUTS: list[Callable[[Array], tuple[Array, Array]]] = [_column, _backwards, _turned, _plain]


class Laid:
    """An array in one of the layouts, given to the call as a NumPy array or as a torch tensor over it."""

    def __init__(self, values: Array, layout: int, library: str = "numpy") -> None:
        self.whole, self.view = LAYOUTS[layout % len(LAYOUTS)](values)
        self.view[...] = values.reshape(self.view.shape)
        self.original, self.before = self.view.copy(), self.whole.copy()
        self.array: Any = self.view
        if library == "torch" and min(self.view.strides, default=0) >= 0:
            self.array = (
                sys.modules["torch"]
                .from_numpy(self.whole)
                .as_strided(
                    self.view.shape,
                    [stride // self.view.itemsize for stride in self.view.strides],
                    (self.view.ctypes.data - self.whole.ctypes.data) // self.view.itemsize,
                )
            )

    def check(self, wanted: Array, what: str) -> None:
        np.testing.assert_array_equal(self.view.reshape(-1), wanted, what)
        self.view[...] = self.original
        np.testing.assert_array_equal(self.whole, self.before, f"{what}: elements beside the array were written")


def of_rank(rank: int, count: int, dtype: str) -> Array:
    return (np.arange(count) % 11 + 3 * rank + 1).astype(dtype)


def joined(arrays: Iterable[Array]) -> Array:
    return np.concatenate(list(arrays))


def play_in_processes(rank: int, size: int) -> None:
    dist.init_process_group(timeout=30)
    play_layouts("numpy")
    dist.destroy_process_group()


def play_layouts(library: str) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    for number, player in enumerate(_PLAYERS.values()):
        for layout in range(len(LAYOUTS)):
            for count in (0, 1, 5, 4096, 70_000 if layout == number % 2 else 2):
                dtype = ("float32", "int16", "complex64", "int64")[(layout + count) % 4]
                player(rank, size, count, dtype, layout, library)


def _all_reduce(rank: int, size: int, count: int, dtype: str, layout: int, library: str) -> None:
    laid = Laid(of_rank(rank, count, dtype), layout + rank, library)
    work = dist.all_reduce(laid.array, async_op=bool(layout % 2))
    if work is not None:
        work.wait()
    laid.check(sum(of_rank(other, count, dtype) for other in range(size)), "all_reduce")  # type: ignore[arg-type]


def _reduce(rank: int, size: int, count: int, dtype: str, layout: int, library: str) -> None:
    laid = Laid(of_rank(rank, count, dtype), layout + rank, library)
    dist.reduce(laid.array, size - 1)
    total = sum(of_rank(other, count, dtype) for other in range(size))
    laid.check(total if rank == size - 1 else of_rank(rank, count, dtype), "reduce")  # type: ignore[arg-type]


def _broadcast(rank: int, size: int, count: int, dtype: str, layout: int, library: str) -> None:
    laid = Laid(of_rank(rank, count, dtype), layout + rank, library)
    dist.broadcast(laid.array, 0)
    laid.check(of_rank(0, count, dtype), "broadcast")


def _all_gather(rank: int, size: int, count: int, dtype: str, layout: int, library: str) -> None:
    laid = Laid(of_rank(rank, count, dtype), layout + rank, library)
    outputs = [Laid(np.zeros(count, dtype), layout + 2 * rank + other, library) for other in range(size)]
    dist.all_gather([output.array for output in outputs], laid.array)
    for other, output in enumerate(outputs):
        output.check(of_rank(other, count, dtype), f"all_gather from {other}")


def _gather(rank: int, size: int, count: int, dtype: str, layout: int, library: str) -> None:
    laid = Laid(of_rank(rank, count, dtype), layout + rank, library)
    outputs = [Laid(np.zeros(count, dtype), layout + other, library) for other in range(size)] if rank == 0 else []
    dist.gather(laid.array, [output.array for output in outputs], 0)
    laid.check(of_rank(rank, count, dtype), "gather's input")
    for other, output in enumerate(outputs):
        output.check(of_rank(other, count, dtype), f"gather from {other}")


def _scatter(rank: int, size: int, count: int, dtype: str, layout: int, library: str) -> None:
    inputs = [Laid(of_rank(other, count, dtype), layout + other, library) for other in range(size)] if rank == 0 else []
    laid = Laid(np.zeros(count, dtype), layout + rank, library)
    dist.scatter(laid.array, [given.array for given in inputs], 0)
    laid.check(of_rank(rank, count, dtype), "scatter")


def _all_gather_single(rank: int, size: int, count: int, dtype: str, layout: int, library: str) -> None:
    laid = Laid(of_rank(rank, count, dtype), layout, library)
    output = Laid(np.zeros(size * count, dtype), layout + rank + 1, library)
    dist.all_gather_single(output.array, laid.array)
    output.check(joined(of_rank(other, count, dtype) for other in range(size)), "all_gather_single")


def _reduce_scatter_single(rank: int, size: int, count: int, dtype: str, layout: int, library: str) -> None:
    laid = Laid(joined(of_rank(rank + other, count, dtype) for other in range(size)), layout + rank, library)
    output = Laid(np.zeros(count, dtype), layout + 1, library)
    dist.reduce_scatter_single(output.array, laid.array)
    output.check(sum(of_rank(other + rank, count, dtype) for other in range(size)), "single")  # type: ignore[arg-type]


def _all_to_all_single(rank: int, size: int, count: int, dtype: str, layout: int, library: str) -> None:
    one_row_each = (0, 1, 3)  # the layouts whose first dimension counts elements, as the splits do
    given = joined(of_rank(10 * rank + other, count, dtype) for other in range(size))
    laid = Laid(given, one_row_each[(layout + rank) % 3], library)
    output = Laid(np.zeros(size * count, dtype), one_row_each[layout % 3], library)
    dist.all_to_all_single(output.array, laid.array)
    output.check(joined(of_rank(10 * other + rank, count, dtype) for other in range(size)), "all_to_all_single")


def _reduce_scatter(rank: int, size: int, count: int, dtype: str, layout: int, library: str) -> None:
    inputs = [Laid(of_rank(rank + other, count, dtype), layout + rank + other, library) for other in range(size)]
    output = Laid(np.zeros(count, dtype), layout + 3 * rank, library)
    dist.reduce_scatter(output.array, [laid.array for laid in inputs])
    output.check(sum(of_rank(other + rank, count, dtype) for other in range(size)), "scatter")  # type: ignore[arg-type]


def _all_to_all(rank: int, size: int, count: int, dtype: str, layout: int, library: str) -> None:
    inputs = [Laid(of_rank(10 * rank + other, count, dtype), layout + other, library) for other in range(size)]
    outputs = [Laid(np.zeros(count, dtype), layout + rank + other, library) for other in range(size)]
    dist.all_to_all([laid.array for laid in outputs], [laid.array for laid in inputs])
    for other, output in enumerate(outputs):
        output.check(of_rank(10 * other + rank, count, dtype), f"all_to_all from {other}")


def _ring(rank: int, size: int, count: int, dtype: str, layout: int, library: str) -> None:
    laid = Laid(of_rank(rank, count, dtype), layout, library)
    got = Laid(np.zeros(count, dtype), layout + 1, library)
    works = [dist.isend(laid.array, (rank + 1) % size), dist.irecv(got.array, (rank - 1) % size)]
    for work in works:
        work.wait()
    got.check(of_rank((rank - 1) % size, count, dtype), "irecv")


_PLAYERS: dict[str, Callable[..., None]] = {
    "all_reduce": _all_reduce,
    "reduce": _reduce,
    "broadcast": _broadcast,
    "gather": _gather,
    "all_gather": _all_gather,
    "all_gather_single": _all_gather_single,
    "scatter": _scatter,
    "reduce_scatter": _reduce_scatter,
    "reduce_scatter_single": _reduce_scatter_single,
    "all_to_all": _all_to_all,
    "all_to_all_single": _all_to_all_single,
    "ring": _ring,
}


@pytest.mark.parametrize(("transport", "size"), [("shm", 3), ("tcp", 2)])
def test_any_layout_gives_the_right_numbers_and_changes_nothing_else(transport: str, size: int) -> None:
    run(play_in_processes, size, environment={"PROCGROUP_TRANSPORT": transport}, timeout=60)


@pytest.mark.torch
def test_torch_tensors_of_any_layout_give_the_right_numbers() -> None:
    pytest.importorskip("torch")
    run_ranks(play_layouts, 2, "torch", timeout=55)


def fail_with_strided_arrays(rank: int, size: int) -> None:
    dist.init_process_group(timeout=30)
    laid = Laid(of_rank(rank, 50_000 + rank, "float32"), rank)
    with pytest.raises(dist.CollectiveMismatch):
        dist.all_reduce(laid.array)
    laid.check(of_rank(rank, 50_000 + rank, "float32"), "a failed call")
    dist.destroy_process_group()


def test_a_failed_call_leaves_strided_arrays_as_they_were() -> None:
    run(fail_with_strided_arrays, 2)


def keep_what_async_calls_use() -> None:
    """Drop the last names of arrays, and give a tensor other memory, while rank 1 keeps the calls waiting."""
    torch = sys.modules["torch"]
    rank, size = dist.get_rank(), dist.get_world_size()
    if rank == 1:
        assert dist.recv(np.zeros(1), 0) == 0
    kept = torch.ones(100_000)
    works = [dist.all_reduce(np.ones(100_000), async_op=True), dist.all_reduce(kept, async_op=True)]
    results = [work.result for work in works]
    if rank == 0:
        memory = kept.untyped_storage()
        kept.set_(torch.zeros(100_000))
        dist.send(np.zeros(1), 1)
        for work in works:
            work.wait()
        assert (torch.tensor([], dtype=torch.float32).set_(memory) == size).all()
        assert (kept == 0).all()
        assert (results[0]()[0] == size).all()
    for work in works:
        work.wait()


@pytest.mark.torch
def test_async_calls_keep_their_arrays_and_the_memory_of_tensors() -> None:
    pytest.importorskip("torch")
    run_ranks(keep_what_async_calls_use, 2)
