"""Training programs on GPU arrays with one bug each: the others name the guilty rank and line in time, and live on.

The programs follow from seeds (gpu_bugs.py); a failure shows its program. Those after which all processes live on are
played in turn by one world for each kind of GPUs. The GPUs and NCCL are stand-ins.
"""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from bugs.surroundings import Seen
from bugs.verdict import judge
from collectives.playing import once
from failures.waiting_calls import allowance
from nccl import gpu_arrays
from nccl.gpu_arrays import GpuArray, new_stream
from nccl.gpu_bugs import KINDS, LONG, WITHOUT_GATES, WORLDS, GpuBug, Plan, Player, Report, bug_of, plan_of

import procgroup as dist
from tiers import SAMPLED
from world import Outcome, attempt, run, start, without_reports

if gpu_arrays.MISSING:
    pytest.skip(gpu_arrays.MISSING, allow_module_level=True)

PLANS = [plan_of(seed) for seed in range(40 if SAMPLED else 120)]
TOGETHER = [plan for plan in PLANS if not KINDS[plan.kind].has_own_world]
ALONE = [plan for plan in PLANS if KINDS[plan.kind].has_own_world]
GPUS = {"PROCGROUP_STAND_IN_GPUS": "4"}
JOIN_SECONDS = 60.0
END = 5.0
"""Seconds within which the GPU's work and the groups end after a failure."""


def join(rank: int, size: int, place: str) -> Player:
    gpu_arrays.start()
    dist.init_process_group("nccl", timeout=LONG)
    return Player(rank, size, Path(place))


def play_in_turn(rank: int, size: int, plans: Sequence[Plan], place: str) -> dict[int, Report]:
    player = join(rank, size, place)
    reports = {}
    for plan in plans:
        print(f"plays {plan.name}", flush=True)
        groups: list[Any] = [dist.new_group(list(range(size)), timeout=LONG) for _ in range(2)]
        reports[plan.seed] = player.play(plan, *groups)
        for group in groups:
            with suppress(dist.DistError):  # of a call that returned before it failed
                dist.destroy_process_group(group)
        reports[plan.seed].ended = time.monotonic()
        dist.barrier()
    dist.destroy_process_group()
    return reports


def play_alone(rank: int, size: int, plan: Plan, place: str) -> Report:
    player = join(rank, size, place)
    other: Any = dist.new_group(list(range(size)), timeout=LONG)
    try:
        report = player.play(plan, dist.group.WORLD, other)
    finally:
        with suppress(dist.DistError):
            dist.destroy_process_group()
    report.ended = time.monotonic()
    return report


def expect_right(bug: GpuBug, reports: Sequence[Report | None], statuses: Sequence[int | None], place: Path) -> None:
    """Require what has to come of a program of what its ranks have seen."""
    fault = float((place / f"{bug.plan.seed}.fault").read_text())
    seen = [Seen(rank, started=fault, status=status) for rank, status in enumerate(statuses)]
    for one, report in zip(seen, reports, strict=True):
        if report is not None:
            one.kind, one.text, one.attributes = report.kind, report.text, report.attributes
            one.moment, one.ended = report.moment, report.ended
            one.changed, one.watched = report.changed, 1
    seen[bug.plan.guilty].fault = fault
    verdict = judge(bug, seen)
    assert verdict.is_ok, f"{verdict}: {verdict.reason}\nranks {bug.size}, {bug.plan}\n{bug.text}"
    for one, report in zip(seen, reports, strict=True):
        if one.rank in bug.must_raise() and report is not None and report.later is not None:
            assert report.later == "GroupBroken", f"rank {one.rank} could go on: {report}\n{bug.text}"
        # The barrier behind the calls may be the first to learn that another rank has failed, and has no such line.
        is_of_barrier = one.kind == "PeerFailed" and one.attributes.get("op") == "barrier"
        is_of_call = one.kind not in ("", "GroupBroken") and not is_of_barrier
        if one.rank in bug.must_raise() and is_of_call and bug.issued_at:
            assert one.attributes.get("issued_at") == bug.issued_at, f"rank {one.rank}: {one}\n{bug.text}"
            if is_behind_gate(bug.plan):
                # None: of an array that the call does not write, as the root's of a broadcast.
                assert one.attributes["intact"] is not True, f"the GPU of rank {one.rank} may have begun: {one}"


def is_behind_gate(plan: Plan) -> bool:
    """Return whether the call that fails is queued on the GPU's stream before the ranks agree on it."""
    has_gates = not set(plan.environment) & set(WITHOUT_GATES)
    return has_gates and plan.step > 0 and plan.mode == "blocking"


def expect_quiet(outcome: Outcome) -> None:
    """Require that a rank has ended with status 0, and has printed nothing of its own accord."""
    printed = re.sub(r"^plays .*\n", "", without_reports(outcome.output), flags=re.MULTILINE)
    assert outcome.exit_code == 0 and not printed, f"rank {outcome.rank}: {outcome.output}{outcome.traceback}"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("programs")


@once
def played_together(world: int, place: Path) -> list[dict[int, Report]]:
    plans = [plan for plan in TOGETHER if plan.world == world]
    limit = allowance(5.0 * len(plans) + 5.0)
    size, _ = WORLDS[world]
    return run(play_in_turn, size, args=(plans, str(place)), environment=plans[0].environment, timeout=limit)


@pytest.mark.parametrize("plan", [pytest.param(plan, id=plan.name) for plan in TOGETHER])
def test_the_guilty_rank_is_named_in_time_and_all_processes_live_on(plan: Plan, place: Path) -> None:
    results = played_together(plan.world, place)
    expect_right(bug_of(plan), [reports[plan.seed] for reports in results], [0] * plan.size, place)


@pytest.mark.parametrize("plan", [pytest.param(plan, id=plan.name) for plan in ALONE])
def test_a_rank_that_ends_is_named_and_the_others_live_on(plan: Plan, tmp_path: Path) -> None:
    bug = KINDS[plan.kind]
    with start(play_alone, plan.size, args=(plan, str(tmp_path)), environment=plan.environment) as world:
        world.wait_for_end(plan.others, allowance(JOIN_SECONDS / 4))
        if bug_of(plan).is_stuck:
            world.kill(plan.guilty)
        outcomes = world.wait(allowance(END))
    for rank, outcome in enumerate(outcomes):
        if rank != plan.guilty or not bug.guilty_ends:
            expect_quiet(outcome)
    expect_right(bug_of(plan), [outcome.value for outcome in outcomes], [one.exit_code for one in outcomes], tmp_path)


def make_no_further_call(rank: int, size: int, way: str) -> bool:
    """Make a last call that fails on all ranks; return whether it has raised that itself. The GPU's work ends."""
    gpu_arrays.start()
    dist.init_process_group("nccl", timeout=LONG)
    array = GpuArray.of(np.ones(8), stream=new_stream())
    dist.all_reduce(array)
    dist.barrier()
    has_raised = False
    try:
        dist.all_reduce(array if rank == 0 else GpuArray.of(np.ones(9)))
    except dist.CollectiveMismatch:  # the other rank was earlier
        has_raised = True
    array.get()
    if way == "destroyed":
        try:
            dist.destroy_process_group()
        except dist.CollectiveMismatch as error:
            print(f"raised: {error}".replace("\n", " "))
        assert not dist.is_initialized()
    return has_raised


@pytest.mark.parametrize(("way", "told"), [("destroyed", "raised: "), ("left at the end of the program", "ERROR: ")])
def test_an_error_that_no_call_has_raised_is_told_when_its_group_is_left(way: str, told: str) -> None:
    for outcome in attempt(make_no_further_call, 2, args=(way,), environment=GPUS):
        assert outcome.ok, outcome
        lines = without_reports(outcome.output).splitlines()
        assert bool(lines) != outcome.value, outcome.output
        if lines:
            text = " ".join(lines)
            assert told in text and re.search(r"all_reduce #\d+ .*all_reduce\S* of [89] float64", text), text
            assert "the ranks made different calls" in text, text


def test_there_are_many_bugs_and_each_has_a_sentence() -> None:
    assert len(PLANS) >= 40 and {plan.kind for plan in PLANS} == set(KINDS)
    for plan in PLANS:
        bug = bug_of(plan)
        assert bug.sentence.endswith("."), plan
        assert bug.line > 0
