"""Playing cases on one rank, and judging what all ranks saw.

`issue` starts one case and returns its work and a function that tells, when the work is over, what is wrong with
the result ("" for nothing) and the result's arrays. Arrays have another shape on each rank: only counts must agree.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from collectives.cases import Array, Case, combined, difference, digest, numpy_dtype, same_bits, values

import procgroup as dist

Judge = Callable[[], tuple[str, list[Array]]]

Report = tuple[str, str]
"""What is wrong with a result, and its hash ("" where the ranks' results differ by right)."""


def play(rank: int, size: int, cases: Sequence[Case], timeout: float = 20.0) -> list[Report]:
    """Play cases one after the other, blocking and async by turns."""
    dist.init_process_group(timeout=timeout)
    reports = [play_one(case, rank, size, async_op=bool(number % 2)) for number, case in enumerate(cases)]
    dist.barrier()
    dist.destroy_process_group()
    return reports


def play_one(case: Case, rank: int, size: int, async_op: bool) -> Report:
    try:
        work, judge = issue(case, rank, size, async_op)
        if async_op:
            work.wait()
        else:
            assert work is None, f"a blocking call returned {work!r}"
        return report(case, judge)
    except Exception as error:
        raise AssertionError(f"rank {rank} of {size}, {case}: {type(error).__name__}: {error}") from error


def report(case: Case, judge: Judge) -> Report:
    wrong, arrays = judge()
    return wrong, digest(*arrays) if case.verb in ("all_reduce", "all_gather", "broadcast") else ""


def all_right(cases: Sequence[Case], results: Sequence[Sequence[Report]]) -> None:
    """Fail, naming cases and ranks, unless every result was right and alike on all ranks."""
    wrong = []
    for number, case in enumerate(cases):
        reports = [result[number] for result in results]
        wrong += [f"{case}, rank {rank}: {text}" for rank, (text, _) in enumerate(reports) if text]
        if len({bits for _, bits in reports}) != 1:
            wrong.append(f"{case}: the ranks have different results: {[bits for _, bits in reports]}")
    assert not wrong, f"{len(wrong)} of {len(cases)} cases are wrong:\n" + "\n".join(wrong[:10])


def issue(case: Case, rank: int, size: int, async_op: bool) -> tuple[Any, Judge]:
    """Start one case; with ``async_op`` the first of the returned pair has ``wait``."""
    return ISSUERS[case.verb](case, rank, size, async_op)


def _all_reduce(case: Case, rank: int, size: int, async_op: bool) -> tuple[Any, Judge]:
    array = reshaped(values(case, rank), rank)
    work = dist.all_reduce(array, case.op, async_op=async_op)
    return work, lambda: (wrong_with(case, array, size), [array])


def _reduce(case: Case, rank: int, size: int, async_op: bool) -> tuple[Any, Judge]:
    array = reshaped(values(case, rank), rank)
    before = array.copy()
    work = dist.reduce(array, case.root, case.op, async_op=async_op)
    if rank == case.root:
        return work, lambda: (wrong_with(case, array, size), [array])
    return work, lambda: ("" if same_bits(array, before) else "a rank that is not the root lost its values", [array])


def _prefix(case: Case, rank: int, size: int, async_op: bool) -> tuple[Any, Judge]:
    array = reshaped(values(case, rank), rank)
    before = array.copy()
    work = getattr(dist, case.verb)(array, case.op, async_op=async_op)
    sources = rank + 1 if case.verb == "scan" else rank
    if sources > 0:
        return work, lambda: (wrong_with(case, array, sources), [array])
    return work, lambda: ("" if same_bits(array, before) else "rank 0 lost its values", [array])


def _broadcast(case: Case, rank: int, size: int, async_op: bool) -> tuple[Any, Judge]:
    array = reshaped(values(case, rank), rank)
    work = dist.broadcast(array, case.root, async_op=async_op)
    return work, lambda: (unlike(array, values(case, case.root)), [array])


def _all_gather(case: Case, rank: int, size: int, async_op: bool) -> tuple[Any, Judge]:
    array = reshaped(values(case, rank), rank)
    outputs = [reshaped(np.zeros_like(array), source) for source in range(size)]
    if case.seed % 2:  # in place: the input is its own output
        outputs[rank] = array
    work = dist.all_gather(outputs, array, async_op=async_op)

    def judge() -> tuple[str, list[Array]]:
        wrong = [
            f"from rank {source}: {text}"
            for source in range(size)
            if (text := unlike(outputs[source], values(case, source)))
        ]
        return "; ".join(wrong), outputs

    return work, judge


def _ring(case: Case, rank: int, size: int, async_op: bool) -> tuple[Any, Judge]:
    array = reshaped(values(case, rank), rank)
    got = np.zeros_like(array)
    after, before = (rank + 1) % size, (rank - 1) % size
    work: Any = None
    if size == 1:
        got = array
        work = _Both() if async_op else None
    elif async_op:
        work = _Both(dist.irecv(got, before, tag=case.seed), dist.isend(array, after, tag=case.seed))
    elif rank == 0:
        dist.send(array, after, tag=case.seed)
        assert dist.recv(got, before, tag=case.seed) == before
    else:
        assert dist.recv(got, tag=case.seed) == before
        dist.send(array, after, tag=case.seed)
    return work, lambda: (unlike(got, values(case, before)), [got])


def _barrier(case: Case, rank: int, size: int, async_op: bool) -> tuple[Any, Judge]:
    return dist.barrier(async_op=async_op), lambda: ("", [])


ISSUERS: dict[str, Callable[[Case, int, int, bool], tuple[Any, Judge]]] = {
    "all_reduce": _all_reduce,
    "reduce": _reduce,
    "scan": _prefix,
    "exscan": _prefix,
    "broadcast": _broadcast,
    "all_gather": _all_gather,
    "ring": _ring,
    "barrier": _barrier,
}


class _Both:
    """Several works, waited for as one."""

    def __init__(self, *works: Any) -> None:
        self._works = works

    def wait(self) -> bool:
        return all(work.wait() for work in self._works)

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)


def reshaped(array: Array, rank: int) -> Array:
    """The same elements in a shape that depends on the rank."""
    shapes: list[tuple[int, ...]] = [(array.size,), (1, array.size), (array.size, 1), (1, array.size, 1)]
    if array.size == 1:
        shapes[0] = ()
    if array.size % 2 == 0:
        shapes[1] = (2, array.size // 2)
    return array.reshape(shapes[rank % len(shapes)])


def wrong_with(case: Case, got: Array, sources: int) -> str:
    """What is wrong with the result of a reduction over the first ``sources`` ranks; "" for nothing."""
    return unlike(got, combined(case, [values(case, rank) for rank in range(sources)]))


def ml_epsilon(dtype: str) -> float:
    return 2.0**-10 if dtype == "float16" else 2.0**-7


def unlike(got: Array, want: Array) -> str:
    assert got.dtype == numpy_dtype(want.dtype.name)
    return "" if same_bits(got.reshape(-1), want.reshape(-1)) else difference(got, want)
