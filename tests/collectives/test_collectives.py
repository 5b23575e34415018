"""The contract of the collectives: every operation, dtype, op and length gives what NumPy gives, on every rank."""

from __future__ import annotations

import pytest
from collectives.contract_cases import SIZES, TRANSPORTS, case_of, choose
from collectives.playing import all_right, play
from collectives.table import SIZES as TABLE_SIZES
from collectives.table import play_table, table
from operation_table import EVERY_RANK, OPERATIONS, REDUCING
from seeded_cases import Case

import two_hosts
from oracle import INTEGERS
from tiers import AT_LENGTH, SAMPLED
from world import run

pytestmark = pytest.mark.timeout(120 if SAMPLED else 7200)

transports = pytest.mark.parametrize("transport", TRANSPORTS)
sizes = pytest.mark.parametrize("size", SIZES)

BATCH = 300
"""Cases per world, so that the whole product stays within each world's time."""


def play_all(cases: list[Case], size: int, transport: str) -> None:
    for start in range(0, len(cases), BATCH):
        batch = cases[start : start + BATCH]
        all_right(batch, run(play, size, args=(batch,), timeout=250, environment={"PROCGROUP_TRANSPORT": transport}))


@transports
@pytest.mark.parametrize("size", TABLE_SIZES)
def test_each_operation_is_right_by_each_of_its_schedules(transport: str, size: int) -> None:
    cells = table({"shm": [0] * size, "tcp": range(size), "spanning": [rank % 2 for rank in range(size)]}[transport])
    environment = {"PROCGROUP_TRANSPORT": transport}
    results = run(play_table, size, args=(cells,), timeout=250, environment=environment)
    all_right(cells, results, f"{transport}, {size} ranks: ")


@transports
@pytest.mark.parametrize("size", [pytest.param(size, marks=[pytest.mark.slow] if size > 4 else []) for size in SIZES])
@pytest.mark.parametrize("operation", REDUCING)
def test_reductions_equal_numpys_to_the_bit(transport: str, size: int, operation: str, sampled: bool) -> None:
    play_all(choose([operation], size, sampled), size, transport)


@transports
@sizes
def test_what_is_moved_arrives_unchanged(transport: str, size: int, sampled: bool) -> None:
    play_all(choose([name for name in EVERY_RANK if name not in REDUCING], size, sampled, budget=200), size, transport)


@pytest.mark.skipif(bool(two_hosts.lacks()), reason=two_hosts.lacks())
@pytest.mark.parametrize("layout", [(0, 0, 1, 1), (0, 0, 0, 1), (0, 1, 1, 1)])
def test_every_collective_is_right_between_two_hosts(layout: tuple[int, ...], sampled: bool) -> None:
    size, cells = len(layout), table(layout)
    with two_hosts.joined() as hosts:
        environments = two_hosts.environments(hosts, layout)
        all_right(cells, run(play_table, size, args=(cells,), timeout=250, environments=environments), f"{layout}: ")
        if AT_LENGTH:
            cases = choose(EVERY_RANK, size, sampled, budget=200)[:BATCH]
            all_right(cases, run(play, size, args=(cases,), timeout=250, environments=environments))


@transports
def test_each_rank_can_be_the_root_in_turn_without_anything_between(transport: str) -> None:
    rooted = [name for name in EVERY_RANK if OPERATIONS[name].root]
    turns = range(200)
    cases = [case_of(rooted[turn % 4], "float32", 50 * turn, root=turn // 3 % 4, seed=turn) for turn in turns]
    play_all(cases, 4, transport)


@transports
@pytest.mark.parametrize("size", [2, 3, 7])
def test_halves_are_accumulated_in_float32_and_rounded_once(transport: str, size: int) -> None:
    cases = [
        case_of("all_reduce", dtype, count, op, seed=count)
        for dtype in ("float16", "bfloat16")
        for op in ("SUM", "AVG")
        for count in (5, 1000, 40_000)
    ]
    play_all(cases, size, transport)


@transports
def test_integers_wrap_around(transport: str) -> None:
    cases = [
        case_of("all_reduce", dtype, count, op, seed=count)
        for dtype in INTEGERS
        for op in ("SUM", "PRODUCT")
        for count in (3, 9000)
    ]
    play_all(cases, 3, transport)


@transports
@pytest.mark.parametrize("size", [2, 3, 5, 7])
def test_means_of_integers_do_not_overflow_and_are_truncated_toward_zero(transport: str, size: int) -> None:
    cases = [
        case_of(operation, dtype, count, "AVG", root=size - 1, seed=count)
        for dtype in INTEGERS
        for count in (3, 9000, 70_000)
        for operation in ("all_reduce", "reduce")
    ]
    play_all(cases, size, transport)
