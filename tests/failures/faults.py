"""Worlds whose ranks make random calls until a random fault hits one of them: what each rank does, and then reports.

All follows from the seed of a `Plan`, but for the instant of a signal, which comes after a seeded time::

    plan = Plan.of(seed=3, layout="spanning", fault="kill")
    assert not defects(plan, *play(plan))
"""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from failures.operations import on
from groups.toy_backend import StoreBackend
from numpy.random import default_rng

import procgroup as dist
from cases import Case, CasePart
from operations import EVERY_RANK
from procgroup.api.default_group import current
from procgroup.backends import registry
from world import Outcome, start

LAYOUTS = ["shm", "tcp", "spanning", "toy"]
SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "interrupt": signal.SIGINT}
FAULTS = [*SIGNALS, "raise", "exit", "leave", "mismatch", "sleep"]

LIMITED = ("stop", "sleep")
"""Faults that only a deadline ends."""
LIMIT = 3.0
LONG = 60.0
MOST_CALLS = 60
"""A fault of the program comes before this call at the latest; later with signals."""
OUTSTANDING = 4
"""How many asynchronous calls may be outstanding at once."""
DTYPES = ["int32", "float32", "float64"]
"""Of these the toy backend reduces as NumPy does."""
OPS = ["SUM", "MIN", "MAX"]


@dataclass(frozen=True)
class Plan:
    """One world, its groups (the first one is the world itself), and what happens to the victim, and when."""

    seed: int
    layout: str
    fault: str
    size: int
    victim: int
    groups: tuple[tuple[int, ...], ...]
    seconds: float
    """Of a signal: how long after the first call it comes."""
    number: int
    """Of other faults: the call before which the victim goes wrong."""

    @classmethod
    def of(cls, seed: int, layout: str, fault: str) -> Plan:
        random = default_rng([seed, LAYOUTS.index(layout), FAULTS.index(fault)])
        size = int(random.integers(3, 5))
        # Rank 0 hosts the store, by which the toy backend moves everything.
        victim = int(random.integers(1 if layout == "toy" else 0, size))
        some = [tuple(sorted(random.permutation(size)[: random.integers(2, size)].tolist())) for _ in range(2)]
        seconds = float(random.random() * random.choice([0.02, 0.3]))
        return cls(
            seed, layout, fault, size, victim, (tuple(range(size)), *some), seconds, int(random.integers(MOST_CALLS))
        )

    @property
    def timeout(self) -> float:
        return LIMIT if self.fault in LIMITED else LONG

    def calls(self) -> Iterator[tuple[int, Case]]:
        """Make up calls without end: the index of the group, and the case."""
        random = default_rng(self.seed)
        while True:
            index = int(random.integers(len(self.groups)))
            count = int(random.choice([random.integers(40), random.integers(3000), random.integers(60_000)]))
            root = int(random.integers(len(self.groups[index])))
            # Not random.choice: of texts, it loses the exception of a signal's handler that runs inside.
            name, dtype, op = (texts[random.integers(len(texts))] for texts in (EVERY_RANK, DTYPES, OPS))
            yield index, Case(name, dtype, count, op, root, seed=len(name))


@dataclass
class Report:
    """What one rank has seen. Ranks are global."""

    wrong: list[str] = field(default_factory=list)
    met: list[int] = field(default_factory=list)
    """The numbers of the barriers with the victim that went well."""
    failed: str = ""
    """The call that failed first, on which group, and the error."""
    kind: str = ""
    members: tuple[int, ...] = ()
    named: frozenset[int] = frozenset()
    """The ranks that the error names, but for this one."""


class OnGroup:
    """The functions of the library on one group, with group ranks."""

    ReduceOp = dist.ReduceOp

    def __init__(self, group: Any) -> None:
        self.group, self.irecv = group, group.irecv

    def __getattr__(self, name: str) -> Any:
        return getattr(self.group, name)

    def isend(self, array: Any, destination: int, tag: int) -> Any:
        return self.group.send(array, destination, tag, True)


@dataclass
class Issued:
    """A call that has been issued and may not have completed."""

    number: int
    group: Any
    part: CasePart

    def __str__(self) -> str:
        return f"call {self.number} on group {self.group.members}: {self.part.case}"


def be_rank(rank: int, size: int, plan: Plan) -> dict[str, Any]:
    """Make calls until one fails; the victim goes wrong before a certain call. End in one of two ways."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if plan.layout == "toy" and not registry.is_backend_available("toy"):
        dist.Backend.register_backend("toy", StoreBackend)
    dist.init_process_group("toy" if plan.layout == "toy" else None, timeout=plan.timeout)
    subgroups = [dist.new_group(list(members)) for members in plan.groups[1:]]
    dist.barrier()
    print("calling", flush=True)
    report = Report()
    try:
        make_calls(plan, rank, [current(), *subgroups], report)
    except dist.DistError as error:
        if rank == plan.victim:
            raise
        if default_rng([plan.seed, rank]).random() < 0.5:
            dist.destroy_process_group()  # while the exception is handled, which the others are notified of
        report.failed += f": {type(error).__name__}: {error}"
        print("failed", report.failed, flush=True)
    finally:
        if rank == plan.victim and plan.fault == "raise":
            dist.destroy_process_group()
    return vars(report)


def make_calls(plan: Plan, rank: int, groups: list[Any], report: Report) -> None:
    random = default_rng([plan.seed, rank])
    outstanding: list[Issued] = []
    for number, (index, case) in enumerate(plan.calls()):
        if rank == plan.victim:
            print("call", number, flush=True)
            if number == plan.number and plan.fault not in SIGNALS:
                go_wrong(plan)
        if rank not in plan.groups[index]:
            continue
        if plan.fault == "mismatch" and rank == plan.victim and number >= plan.number:
            case = Case(case.operation, case.dtype, case.count + 1, case.op, case.root, seed=case.seed)
        members = plan.groups[index]
        issued = Issued(number, groups[index], CasePart(case, members.index(rank), len(members)))
        async_op = bool(random.random() < 0.4) or case.operation == "ring"
        with_errors(report, issued, partial(issued.part.start, OnGroup(issued.group), async_op))
        outstanding.append(issued)
        while len(outstanding) > OUTSTANDING or (outstanding and random.random() < 0.5):
            due = outstanding.pop(int(random.integers(len(outstanding))))
            with_errors(report, due, due.part.wait)
            if text := due.part.wrong():
                report.wrong.append(f"{due}: {text}")
            if due.part.name == "barrier" and plan.victim in due.group.members:
                report.met.append(due.number)


def with_errors(report: Report, issued: Issued, function: Any) -> None:
    """Call the function; keep of its error which ranks it names."""
    try:
        function()
    except dist.OperationError as error:
        report.failed, report.kind, report.members = str(issued), type(error).__name__, error.members
        report.named = frozenset(named_by(error) - {error.global_rank})
        raise


def named_by(error: dist.OperationError) -> set[int]:
    """Return the global ranks that an error names."""
    if isinstance(error, dist.PeerLost):
        return {error.global_peer}
    if isinstance(error, dist.PeerFailed):
        return {error.global_peer, *(error.members[rank] for rank in error.missing), *ranks_in(error.reason)}
    if isinstance(error, dist.CollectiveTimeout):
        return {error.members[rank] for rank in (*error.missing, *error.calls)}
    if isinstance(error, dist.CollectiveMismatch):
        mine = error.calls[error.rank]
        return {error.members[rank] for rank, call in error.calls.items() if call != mine}
    if isinstance(error, dist.GroupBroken):
        return ranks_in(error.reason)
    return set()


def ranks_in(text: str) -> set[int]:
    """Return the global ranks in a text: "lost rank 3 (rank 1 of group 2) (pid 4)"."""
    lists = re.findall(r"(?<!\()ranks? ([\d, ]+)", text)
    return {int(number) for ranks in lists for number in re.findall(r"\d+", ranks)}


def go_wrong(plan: Plan) -> None:
    if plan.fault == "raise":
        raise ValueError("made by the test")
    if plan.fault == "exit":
        sys.exit(3)
    if plan.fault == "leave":
        dist.destroy_process_group()
        os._exit(0)
    if plan.fault == "sleep":
        time.sleep(LIMIT + 2)


def play(plan: Plan) -> tuple[list[Outcome], int]:
    """Run the world and hit the victim; return the outcomes, and the number of the victim's last call."""
    transport = on("auto" if plan.layout == "toy" else plan.layout)
    with start(be_rank, plan.size, args=(plan,), environment=transport) as world:
        if plan.fault in SIGNALS:
            world.wait_for_output(plan.victim, "calling")
            time.sleep(plan.seconds)
            world.kill(plan.victim, SIGNALS[plan.fault])
        if plan.fault == "stop":
            for rank in range(plan.size):
                if rank != plan.victim:
                    world.wait_for_output(rank, "failed")
            world.kill(plan.victim, signal.SIGKILL)  # rank 0 keeps its store up for it
        outcomes = world.wait(30)
        calls = re.findall(r"^call (\d+)$", world.output(plan.victim), re.MULTILINE)
    return outcomes, int(calls[-1]) if calls else 0


def defects(plan: Plan, outcomes: list[Outcome], last: int) -> list[str]:
    """Return what is wrong with what the survivors saw."""
    survivors = {outcome.rank: outcome for outcome in outcomes if outcome.rank != plan.victim}
    found = [f"rank {rank}: {one.traceback}{one.output}" for rank, one in survivors.items() if one.value is None]
    reports = {rank: Report(**one.value) for rank, one in survivors.items() if one.value is not None}
    for rank, report in reports.items():
        found += [f"rank {rank}: {text}" for text in report.wrong]
        found += [f"rank {rank}: barrier {number} without rank {plan.victim}" for number in report.met if number > last]
        if not blames_the_victim(plan, reports, rank):
            found.append(f"rank {rank} names {set(report.named) or 'nobody'}: {report.failed}")
    return found


def blames_the_victim(plan: Plan, reports: dict[int, Report], rank: int) -> bool:
    """Return whether an error names the victim, or else ranks that have failed, and so on, down to the victim."""
    seen: set[int] = set()
    blamed = {rank}
    while blamed - seen and plan.victim not in blamed:
        seen |= blamed
        blamed = {named for one in seen if one in reports for named in reports[one].named}
    return plan.victim in blamed
