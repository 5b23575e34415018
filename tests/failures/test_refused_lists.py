"""Lists and split sizes that are wrong on one rank: it raises, no byte moves, and the group goes on."""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np
import pytest
from failures.watched import Array, Arrays

import procgroup as dist
from procgroup.testing import run_ranks
from world import placed

SIZE = 3
ROOT = 1

transports = pytest.mark.parametrize("transport", ["shm", "tcp", "spanning"])


Call = Callable[[Arrays], object]


def beside(arrays: Arrays, first: int, second: int) -> list[Array]:
    """Three outputs of 4 elements in one piece of memory, two of which begin at these elements."""
    memory = arrays.watched(np.zeros(20))
    return [memory[first : first + 4], memory[second : second + 4], memory[16:]]


ON_ROOT: dict[str, tuple[Call, str]] = {
    "gather without a list": (
        lambda a: dist.gather(a(), None, ROOT),
        r"``gather_list`` must be specified on destination rank",
    ),
    "gather into two": (
        lambda a: dist.gather(a(), a.list(4, 4), ROOT),
        "gather on rank 1: .*`gather_list`.* length 3, .* got 2",
    ),
    "gather into four": (lambda a: dist.gather(a(), a.list(4, 4, 4, 4), ROOT), "`gather_list`.* length 3, .* got 4"),
    "gather into a short one": (
        lambda a: dist.gather(a(), a.list(4, 4, 3), ROOT),
        r"gather on rank 1: `gather_list\[2\]` holds 3 float64, expected 4 float64 as in `tensor`",
    ),
    "gather into another dtype": (
        lambda a: dist.gather(a(), [a(), a(4, "int64"), a()], ROOT),
        "gather on rank 1: .*different dtypes: found float64 and int64",
    ),
    "gather into read-only": (
        lambda a: dist.gather(a(), [a(), a(), a(readonly=True)], ROOT),
        r"`gather_list\[2\]` is read-only",
    ),
    "gather into one array twice": (
        lambda a: dist.gather(a(), beside(a, 8, 8), ROOT),
        "gather on rank 1: the outputs overlap",
    ),
    "gather into overlapping arrays": (lambda a: dist.gather(a(), beside(a, 0, 3), ROOT), "the outputs overlap"),
    "gather into its input": (
        lambda a: dist.gather(memory := a(), [memory, a(), a()], ROOT),
        "an output overlaps with an input",
    ),
    "scatter without a list": (
        lambda a: dist.scatter(a(), None, ROOT),
        r"``scatter_list`` must be specified on source rank",
    ),
    "scatter of two": (lambda a: dist.scatter(a(), a.list(4, 4), ROOT), "`scatter_list`.* length 3, .* got 2"),
    "scatter of a long one": (
        lambda a: dist.scatter(a(), a.list(5, 4, 4), ROOT),
        r"scatter on rank 1: `scatter_list\[0\]` holds 5 float64, expected 4 float64 as in `tensor`",
    ),
    "scatter of another dtype": (
        lambda a: dist.scatter(a(), a.list(4, 4, 4, dtype="float32"), ROOT),
        "scatter on rank 1: .*different dtypes: found float64 and float32",
    ),
    "scatter into read-only": (
        lambda a: dist.scatter(a(readonly=True), a.list(4, 4, 4), ROOT),
        "`tensor` is read-only",
    ),
    "scatter into its input": (
        lambda a: dist.scatter(memory := a(), [memory, a(), a()], ROOT),
        "an output overlaps with an input",
    ),
}
"""The root's call, and its error. The errors of arrays name the rank; those of lists need not."""

ON_OTHERS: dict[str, tuple[Call, str]] = {
    "gather with a list": (
        lambda a: dist.gather(a(), a.list(4, 4, 4), ROOT),
        r"``gather_list`` must NOT be specified on non-destination ranks",
    ),
    "scatter with a list": (
        lambda a: dist.scatter(a(), a.list(4, 4, 4), ROOT),
        r"``scatter_list`` must NOT be specified on non-source ranks",
    ),
}

ON_ANY: dict[str, tuple[Call, str]] = {
    "all_gather of another size": (
        lambda a: dist.all_gather([a(count) for count in others(4, own=5)], a(4)),
        r"`tensor_list\[{rank}\]`, which is this rank's, holds 5 float64, expected 4 float64 as in `tensor`",
    ),
    "all_gather_single into too little": (
        lambda a: dist.all_gather_single(a(11), a(4)),
        "all_gather_single on rank {rank}: `output_tensor` holds 11 float64, expected 12: 4, .* each of 3 ranks",
    ),
    "all_gather_single into its input": (
        lambda a: dist.all_gather_single(memory := a(12), memory[other_part()]),
        "an output overlaps with an input",
    ),
    "reduce_scatter of two": (lambda a: dist.reduce_scatter(a(), a.list(4, 4)), "`input_list`.* length 3, .* got 2"),
    "reduce_scatter of another size": (
        lambda a: dist.reduce_scatter(a(4), [a(count) for count in others(4, own=3)]),
        r"reduce_scatter on rank {rank}: `input_list\[{rank}\]`, which is this rank's, holds 3 float64, expected 4",
    ),
    "reduce_scatter of another dtype": (
        lambda a: dist.reduce_scatter(a(), a.list(4, 4, 4, dtype="int32")),
        "reduce_scatter on rank {rank}: .*different dtypes: found float64 and int32",
    ),
    "reduce_scatter into read-only": (
        lambda a: dist.reduce_scatter(a(readonly=True), a.list(4, 4, 4)),
        "`output` is read-only",
    ),
    "reduce_scatter into another's input": (
        lambda a: dist.reduce_scatter(memory := a(), [memory if other else a() for other in others(1, own=0)]),
        "an output overlaps with an input",
    ),
    "reduce_scatter with an op that is not there": (
        lambda a: dist.reduce_scatter(a(), a.list(4, 4, 4), dist.ReduceOp.BAND),
        "reduce_scatter on rank {rank}: ReduceOp.BAND is not defined for float64",
    ),
    "reduce_scatter_single of too much": (
        lambda a: dist.reduce_scatter_single(a(4), a(13)),
        "reduce_scatter_single on rank {rank}: `input` holds 13 float64, expected 12: 4, .* each of 3 ranks",
    ),
    "all_to_all of four": (
        lambda a: dist.all_to_all(a.list(4, 4, 4), a.list(4, 4, 4, 4)),
        "all_to_all on rank {rank}: .*`input_tensor_list`.* length 3, .* got 4",
    ),
    "all_to_all into two": (
        lambda a: dist.all_to_all(a.list(4, 4), a.list(4, 4, 4)),
        "all_to_all on rank {rank}: .*`output_tensor_list`.* length 3, .* got 2",
    ),
    "all_to_all to itself": (
        lambda a: dist.all_to_all(a.list(4, 4, 4), [a(count) for count in others(4, own=2)]),
        r"`input_tensor_list\[{rank}\]`, which this rank gives to itself, has 2 elements, "
        r"but `output_tensor_list\[{rank}\]` has 4",
    ),
    "all_to_all of two dtypes": (
        lambda a: dist.all_to_all(a.list(4, 4, 4), [a(), a(4, "float32"), a()]),
        "all_to_all on rank {rank}: .*different dtypes: found float64 and float32",
    ),
    "all_to_all into read-only": (
        lambda a: dist.all_to_all([a(), a(readonly=True), a()], a.list(4, 4, 4)),
        r"`output_tensor_list\[1\]` is read-only",
    ),
    "all_to_all into overlapping arrays": (
        lambda a: dist.all_to_all(beside(a, 9, 12), a.list(4, 4, 4)),
        "all_to_all on rank {rank}: the outputs overlap",
    ),
    "all_to_all into its inputs, exchanged": (
        lambda a: dist.all_to_all((given := a.list(4, 4, 4))[1:] + given[:1], given),
        "an output overlaps with an input",
    ),
    "neighbours of another mesh": (
        lambda a: dist.neighbor_all_to_all(a.list(4, 4, 4, 4), a.list(4, 4, 4, 4), (2, 2)),
        r"neighbor_all_to_all on rank {rank}: `shape` \(2, 2\) is a mesh of 4 ranks, but the group has 3",
    ),
    "neighbours of no mesh": (
        lambda a: dist.neighbor_all_to_all([], [], ()),
        r"neighbor_all_to_all on rank {rank}: `shape` must have one or more extents of at least 1, got \(\)",
    ),
    "neighbours along nothing": (
        lambda a: dist.neighbor_all_to_all(a.list(4, 4), a.list(4, 4), (-3,)),
        r"neighbor_all_to_all on rank {rank}: `shape` must have .* at least 1, got \(-3,\)",
    ),
    "neighbours along fractions": (
        lambda a: dist.neighbor_all_to_all(a.list(4, 4), a.list(4, 4), (3.0,)),  # type: ignore[arg-type]
        "neighbor_all_to_all on rank {rank}: Expected the extent in `shape` to be an int, got 3.0",
    ),
    "neighbours along an int": (
        lambda a: dist.neighbor_all_to_all(a.list(4, 4), a.list(4, 4), 3),  # type: ignore[call-overload]
        "neighbor_all_to_all on rank {rank}: Expected parameter `shape` to be a tuple of int, got 3",
    ),
    "neighbours along too many dimensions": (
        lambda a: dist.neighbor_all_to_all(a.list(*[4] * 34), a.list(*[4] * 34), (3, *[1] * 16)),
        "neighbor_all_to_all on rank {rank}: `shape` has too many dimensions",
    ),
    "neighbours with periods of other dimensions": (
        lambda a: dist.neighbor_all_to_all(a.list(4, 4), a.list(4, 4), (3,), (True, False)),
        "neighbor_all_to_all on rank {rank}: `periodic` has 2 entries, expected 1",
    ),
    "neighbours with a period of two": (
        lambda a: dist.neighbor_all_to_all(a.list(4, 4), a.list(4, 4), (3,), [2]),  # type: ignore[list-item]
        "neighbor_all_to_all on rank {rank}: Expected the entries of `periodic` to be bools, got 2",
    ),
    "neighbours with a period in words": (
        lambda a: dist.neighbor_all_to_all(a.list(4, 4), a.list(4, 4), (3,), "yes"),  # type: ignore[call-overload]
        "neighbor_all_to_all on rank {rank}: Expected parameter `periodic` to be a bool or a tuple of bool, got 'yes'",
    ),
    "neighbours of three sides": (
        lambda a: dist.neighbor_all_to_all(a.list(4, 4), a.list(4, 4, 4), (3,), True),
        "neighbor_all_to_all on rank {rank}: .*`input_tensor_list`.* length 2, one per neighbour, got 3",
    ),
    "neighbours without an array": (
        lambda a: dist.neighbor_all_to_all([None, a()], a.list(4, 4), (3,), True),
        r"`output_tensor_list\[0\]`",
    ),
    "neighbours of two dtypes": (
        lambda a: dist.neighbor_all_to_all(a.list(4, 4), [a(), a(4, "float32")], (3,), True),
        "neighbor_all_to_all on rank {rank}: .*different dtypes: found float64 and float32",
    ),
    "neighbours into one array": (
        lambda a: dist.neighbor_all_to_all([memory := a(), memory], a.list(4, 4), (3,), True),
        "neighbor_all_to_all on rank {rank}: the outputs overlap",
    ),
    "neighbours into an input": (
        lambda a: dist.neighbor_all_to_all([memory := a(), a()], [memory, a()], (3,), True),
        "an output overlaps with an input",
    ),
    "a neighbour that is the rank itself": (
        lambda a: dist.neighbor_all_to_all(a.list(4, 4, 4, 4), a.list(4, 4, 4, 5), (3, 1), True),
        r"`input_tensor_list\[3\]`, which this rank gives to itself, has 5 elements, "
        r"but `output_tensor_list\[2\]` has 4",
    ),
    "too few splits": (
        lambda a: dist.all_to_all_single(a(6), a(6), [2, 4], [2, 2, 2]),
        "Number of tensor splits not equal to group size: `output_split_sizes` has 2 entries, expected 3",
    ),
    "too many splits": (
        lambda a: dist.all_to_all_single(a(6), a(6), None, [2, 2, 2, 0]),
        "all_to_all_single on rank {rank}: .*`input_split_sizes` has 4 entries, expected 3",
    ),
    "splits of too much": (
        lambda a: dist.all_to_all_single(a(6), a(6), [2, 2, 2], [2, 2, 3]),
        "all_to_all_single on rank {rank}: Split sizes doesn't match total dim 0 size: "
        "`input_split_sizes` sum to 7, but `input` has 6 rows",
    ),
    "splits of too little": (
        lambda a: dist.all_to_all_single(a(6), a(6), [2, 2, 1], None),
        "`output_split_sizes` sum to 5, but `output` has 6 rows",
    ),
    "splits whose sum wraps around": (
        lambda a: dist.all_to_all_single(a(6), a(6), [2, 2, 2], [(1 << 63) - 1, (1 << 63) - 1, 8]),
        "`input_split_sizes` sum to .*, but `input` has 6 rows",
    ),
    "negative splits": (
        lambda a: dist.all_to_all_single(a(6), a(6), [2, 2, 2], [4, -1, 3]),
        r"`input_split_sizes` must not have negative entries, got \[4, -1, 3\]",
    ),
    "splits that are fractions": (
        lambda a: dist.all_to_all_single(a(6), a(6), [2, 2, 2], [2.0, 2.0, 2.0]),
        "all_to_all_single on rank {rank}: .*`input_split_sizes` to be an int, got 2.0 of type float",
    ),
    "splits to itself": (
        lambda a: dist.all_to_all_single(a(6), a(6), [2, 2, 2], others(1, own=4)),
        "this rank gives itself 4 float64, but expects 2 from itself",
    ),
    "rows that three cannot share": (
        lambda a: dist.all_to_all_single(a(6), a(7), None, None),
        "`input` has 7 rows, which 3 ranks cannot share equally; pass `input_split_sizes`",
    ),
    "splits into another dtype": (
        lambda a: dist.all_to_all_single(a(6), a(6, "int16")),
        "all_to_all_single on rank {rank}: .*different dtypes: found float64 and int16",
    ),
    "splits into read-only": (lambda a: dist.all_to_all_single(a(6, readonly=True), a(6)), "`output` is read-only"),
}


def others(count: int, own: int) -> list[int]:
    """One number per rank: another for this one."""
    return [own if rank == dist.get_rank() else count for rank in range(SIZE)]


def other_part() -> slice:
    first = 4 * ((dist.get_rank() + 1) % SIZE)
    return slice(first, first + 4)


def refuse_then_work() -> list[str]:
    """One rank after the other makes each mistake that it can make, while the others wait in a right call already."""
    wrong = []
    for culprit in range(SIZE):
        mistakes = ON_ANY | (ON_ROOT if culprit == ROOT else ON_OTHERS)
        for number, (what, (call, pattern)) in enumerate(mistakes.items()):
            if dist.get_rank() == culprit:
                wrong += [f"{what} on rank {culprit}: {text}" for text in judge(call, pattern.format(rank=culprit))]
            total = np.array([number, 1])
            dist.all_reduce(total)
            assert total.tolist() == [SIZE * number, SIZE], what
    return wrong


def judge(call: Call, pattern: str) -> list[str]:
    arrays = Arrays()
    try:
        call(arrays)
        return ["not refused"]
    except (ValueError, TypeError) as error:
        wrong = [] if re.search(pattern, str(error)) else [f"{error}, expected {pattern}"]
    return wrong if arrays.are_unchanged() else [*wrong, "an array has changed"]


@transports
def test_what_one_rank_can_see_is_refused_there_and_the_group_goes_on(transport: str) -> None:
    wrong = [text for texts in run_ranks(refuse_then_work, SIZE, **placed(transport, SIZE)) for text in texts]
    assert not wrong, "\n".join(wrong)
