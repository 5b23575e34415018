"""What draw_operations.py draws: one picture per page of docs/operations, with the numbers of the page's example."""

from __future__ import annotations

from drawing import Movement, Place, Timeline

RANKS = range(3)


def every(source_array: int = 0, target_array: int = 0) -> list[tuple[Place, Place]]:
    """From every rank's array to every rank's array."""
    return [((source, source_array, -1), (target, target_array, -1)) for source in RANKS for target in RANKS]


def own(rank: int, *values: int) -> list[str]:
    """An array of one rank's own elements."""
    return [f"{rank}:{value}" for value in values]


def combined(*values: int) -> list[str]:
    return [f"+:{value}" for value in values]


UNSET2 = ["?", "?"]
PAIRS = [[own(rank, rank + 1, 10 * (rank + 1))] for rank in RANKS]
"""[1 10], [2 20], [3 30]."""
ROWS = [[own(rank, *(10 * rank + column for column in RANKS))] for rank in RANKS]
"""[0 1 2], [10 11 12], [20 21 22]."""
LISTS = [[[cell] for cell in row[0]] for row in ROWS]
GATHERED = [own(rank, 10 * rank, 10 * rank + 1) for rank in RANKS]
TO_EACH = [((source, 0, target), (target, 0, source)) for source in RANKS for target in RANKS]
IN_PAIRS = [
    ((2 * pair + source, 0, -1), (2 * pair + target, 0, -1))
    for pair in (0, 1)
    for source in (0, 1)
    for target in (0, 1)
]
TO_EACH_OF_A_LIST = [((source, target, -1), (target, source, -1)) for source in RANKS for target in RANKS]

PICTURES: dict[str, Movement | Timeline] = {
    "broadcast": Movement(
        "broadcast from rank 1: its array is copied into the array of every other rank",
        [[UNSET2], [own(1, 7, 8)], [UNSET2]],
        [[own(1, 7, 8)]] * 3,
        [((1, 0, -1), (target, 0, -1)) for target in RANKS],
    ),
    "reduce": Movement(
        "reduce to rank 0: only its array gets the sum, the others keep theirs",
        PAIRS,
        [[combined(6, 60)], PAIRS[1], PAIRS[2]],
        [((source, 0, -1), (0, 0, -1)) for source in RANKS],
    ),
    "all_reduce": Movement(
        "all_reduce: every rank's array becomes the sum of all arrays, element by element",
        PAIRS,
        [[combined(6, 60)]] * 3,
        every(),
    ),
    "scan": Movement(
        "scan: every rank's array becomes the sum of the arrays of the ranks up to it",
        PAIRS,
        [PAIRS[0], [combined(3, 30)], [combined(6, 60)]],
        [((source, 0, -1), (target, 0, -1)) for target in RANKS for source in range(target + 1)],
    ),
    "gather": Movement(
        "gather to rank 0: its list gets the array of each rank",
        [[own(rank, 10 * rank, 10 * rank + 1)] for rank in RANKS],
        [GATHERED, [], []],
        [((source, 0, -1), (0, source, -1)) for source in RANKS],
    ),
    "all_gather": Movement(
        "all_gather: the list of every rank gets the array of each rank",
        [[array] for array in GATHERED],
        [GATHERED] * 3,
        [((source, 0, -1), (target, source, -1)) for source in RANKS for target in RANKS],
    ),
    "all_gather_single": Movement(
        "all_gather_single: one array on every rank gets the arrays of all ranks, one after the other",
        [[array] for array in GATHERED],
        [[[cell for array in GATHERED for cell in array]]] * 3,
        [((source, 0, -1), (target, 0, 2 * source)) for source in RANKS for target in RANKS],
    ),
    "scatter": Movement(
        "scatter from rank 0: each rank gets one array of its list",
        [[own(0, 0, 1), own(0, 10, 11), own(0, 20, 21)], [], []],
        [[own(0, 10 * rank, 10 * rank + 1)] for rank in RANKS],
        [((0, target, -1), (target, 0, -1)) for target in RANKS],
    ),
    "reduce_scatter": Movement(
        "reduce_scatter: rank r gets the sum of the r-th arrays of all lists",
        LISTS,
        [[combined(30 + 3 * rank)] for rank in RANKS],
        [((source, target, -1), (target, 0, -1)) for source in RANKS for target in RANKS],
    ),
    "reduce_scatter_single": Movement(
        "reduce_scatter_single: rank r gets the sum of the r-th parts of all arrays",
        ROWS,
        [[combined(30 + 3 * rank)] for rank in RANKS],
        [((source, 0, target), (target, 0, 0)) for source in RANKS for target in RANKS],
    ),
    "all_to_all": Movement(
        "all_to_all: the s-th array of rank r's list goes to rank s, where it becomes the r-th",
        LISTS,
        [[[f"{source}:{10 * source + rank}"] for source in RANKS] for rank in RANKS],
        TO_EACH_OF_A_LIST,
    ),
    "all_to_all_single": Movement(
        "all_to_all_single: the s-th part of rank r's array goes to rank s, where it becomes the r-th part",
        ROWS,
        [[[f"{source}:{10 * source + rank}" for source in RANKS]] for rank in RANKS],
        TO_EACH,
    ),
    "neighbor_all_to_all": Movement(
        "neighbor_all_to_all in a ring: each rank sends one array to the rank before it and one to the rank behind it",
        [[own(rank, 10 * rank), own(rank, 10 * rank + 1)] for rank in RANKS],
        [
            [own((rank - 1) % 3, 10 * ((rank - 1) % 3) + 1), own((rank + 1) % 3, 10 * ((rank + 1) % 3))]
            for rank in RANKS
        ],
        [((rank, side, -1), ((rank + 2 * side - 1) % 3, 1 - side, -1)) for rank in RANKS for side in (0, 1)],
    ),
    "barrier": Timeline(
        "barrier: no rank goes on before the last one has come",
        [
            [(0, 90, "0", "work"), (90, 260, "?", "waits"), (260, 360, "0", "goes on")],
            [(0, 260, "1", "work"), (260, 360, "1", "goes on")],
            [(0, 160, "2", "work"), (160, 260, "?", "waits"), (260, 360, "2", "goes on")],
        ],
        together=260,
    ),
    "monitored_barrier": Timeline(
        "monitored_barrier: every rank waits for all others, or learns which ranks are missing",
        [
            [(0, 120, "1", "work"), (120, 290, "?", "waits"), (290, 380, "1", "goes on")],
            [(0, 60, "0", "work"), (60, 270, "?", "who is here?"), (270, 380, "0", "goes on")],
            [(0, 220, "2", "work"), (220, 290, "?", "waits"), (290, 380, "2", "goes on")],
        ],
        messages=[(0, 130, 1, 140), (2, 230, 1, 240), (1, 275, 0, 285), (1, 275, 2, 285)],
        names=["rank 1", "rank 0", "rank 2"],
    ),
    "send_recv": Movement(
        "send and recv: one array goes from one rank to another",
        [[own(0, 1, 2, 3)], [["?", "?", "?"]]],
        [[own(0, 1, 2, 3)], [own(0, 1, 2, 3)]],
        [((0, 0, -1), (1, 0, -1))],
    ),
    "isend_irecv": Timeline(
        "isend and irecv return at once; wait returns when the array may be used again",
        [
            [(0, 70, "0", "isend"), (70, 230, "0", "other work"), (230, 300, "0", "wait")],
            [(0, 70, "1", "irecv"), (70, 230, "1", "other work"), (230, 300, "1", "wait"), (300, 400, "0", "has it")],
        ],
        messages=[(0, 215, 1, 226)],
    ),
    "batch_isend_irecv": Movement(
        "batch_isend_irecv in a ring: each rank sends to the next and receives from the one before",
        [[own(rank, rank, rank), UNSET2] for rank in RANKS],
        [[own(rank, rank, rank), own((rank - 1) % 3, *[(rank - 1) % 3] * 2)] for rank in RANKS],
        [((rank, 0, -1), ((rank + 1) % 3, 1, -1)) for rank in RANKS],
    ),
    "objects": Movement(
        "all_gather_object: the list of every rank gets the object of each rank",
        [[["0:{'a': 1}"]], [["1:'text'"]], [["2:None"]]],
        [[["0:{'a': 1}"], ["1:'text'"], ["2:None"]]] * 3,
        [((source, 0, -1), (target, source, -1)) for source in RANKS for target in RANKS],
    ),
    "new_group": Movement(
        "all_reduce in new_group([0, 2]): rank 1 takes no part",
        [[own(0, 1)], [own(1, 10)], [own(2, 100)]],
        [[combined(101)], [own(1, 10)], [combined(101)]],
        [((source, 0, -1), (target, 0, -1)) for source in (0, 2) for target in (0, 2)],
    ),
    "new_subgroups": Movement(
        "all_reduce in two subgroups of two ranks each",
        [[own(rank, 10**rank)] for rank in range(4)],
        [[combined(11)], [combined(11)], [combined(1100)], [combined(1100)]],
        IN_PAIRS,
    ),
    "split_group": Movement(
        "all_reduce in the two parts of a group of the ranks 1, 2 and 3",
        [[own(rank, 10**rank)] for rank in range(4)],
        [[own(0, 1)], [combined(1010)], [own(2, 100)], [combined(1010)]],
        [*(((source, 0, -1), (target, 0, -1)) for source in (1, 3) for target in (1, 3)), ((2, 0, -1), (2, 0, -1))],
    ),
    "device_mesh": Movement(
        "all_reduce along the dimension tp of a mesh of 2 x 2 ranks",
        [[own(rank, 10**rank)] for rank in range(4)],
        [[combined(11)], [combined(11)], [combined(1100)], [combined(1100)]],
        IN_PAIRS,
        names=[f"rank {rank}: dp {rank // 2}, tp {rank % 2}" for rank in range(4)],
    ),
    "functional": Movement(
        "functional.all_reduce: the arrays of a tree go through one call, and come back as new arrays",
        [[own(rank, rank + 1, 10 * (rank + 1)), own(rank, rank)] for rank in RANKS],
        [[combined(6, 60), combined(3)]] * 3,
        [*every(0, 0), *every(1, 1)],
    ),
    "symmetric_arrays": Timeline(
        "an ordinary array is brought into shared memory first; a symmetric array is there already",
        [[(0, 120, "1", "copied"), (120, 280, "+", "read and added")], [(0, 160, "+", "read and added")]],
        names=["ordinary", "symmetric"],
    ),
    "coalescing": Timeline(
        "calls that are queued in the coalescing manager go out as one when it is left",
        [
            [(0, 120, "0", "all_reduce(a)"), (120, 240, "1", "all_reduce(b)"), (240, 360, "2", "all_reduce(c)")],
            [
                (0, 60, "?", "queue a"),
                (60, 120, "?", "queue b"),
                (120, 180, "?", "queue c"),
                (180, 310, "+", "one call: a, b, c"),
            ],
        ],
        names=["one by one", "coalesced"],
    ),
    "ranks_as_threads": Timeline(
        "run_ranks: the ranks of a test are threads of one process, and the data really moves",
        [
            [
                (0, 60, "?", "start"),
                (60, 190, "0", "test body"),
                (190, 290, "+", "all_reduce"),
                (290, 380, "0", "assert"),
            ],
            [
                (0, 60, "?", "start"),
                (60, 150, "1", "test body"),
                (150, 290, "+", "all_reduce"),
                (290, 380, "1", "assert"),
            ],
        ],
        names=["thread 0", "thread 1"],
    ),
}
