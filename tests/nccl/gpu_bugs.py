"""Training programs on GPU arrays with one bug each: a seed chooses the bug, its rank and step, sizes and GPUs.

A *plan* is what follows from a seed. Its program is a text, of a file train_SEED.py, that every rank runs::

    def train(rank, size, group, other, works):
        stream = new_stream()
        for step in range(4):
            gradients = full(1000 + step, rank + step, "float32", stream)
            if step == 2 and rank == 1:
                fault()
                dist.all_reduce(full(1, 1, "float32", stream), group=group)  # BUG
            else:
                dist.all_reduce(gradients, group=group)  # MET
        ...

What has to come of it is said as of the programs in tests/bugs, and judged by the same judge: see bugs/bug.py. `# BUG`
marks the line of the guilty rank, which errors name; `# MET` that of the other ranks' call that fails, which errors
have as `issued_at`, also where a later call raises them.

Here are bugs that hang on the order of the calls, on bursts, streams and groups. One call that differs, a rank that
does not come, NCCL's own errors and graphs are in test_nccl_failures.py and test_cuda_graphs.py.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from bugs.bug import PROMPTLY, Bug
from bugs.library import WrongResult
from nccl import gpu_arrays
from nccl.gpu_arrays import GpuArray, held, new_stream

import procgroup as dist

STEPS = 4
LIMIT = 0.7
"""Seconds of the calls that are to time out."""
LONG = 30.0
"""Seconds of those that are to fail for another reason long before."""
AT_THE_LIMIT = LIMIT + PROMPTLY
QUEUED = 100
"""Calls that a rank queues behind gates."""

MODES = ("blocking", "async", "async, waited for at the end")
WORLDS: tuple[tuple[int, dict[str, str]], ...] = (
    (3, {}),
    (2, {"PROCGROUP_STAND_IN_CHANNELS": "1"}),
    (4, {"PROCGROUP_STAND_IN_BURST_US": "2000", "PROCGROUP_STAND_IN_STRICT_EVENTS": "1"}),
    (3, {"PROCGROUP_STAND_IN_NO_STREAM_MEMORY_OPERATIONS": "1"}),
    (4, {"PROCGROUP_STAND_IN_NCCL_LATE_ABORT": "1", "PROCGROUP_STAND_IN_DELAY_US": "200"}),
    (2, {"PROCGROUP_NCCL_GATE": "0"}),
)
"""Numbers of ranks, and what their GPUs are like."""
ONE_QUEUE = "PROCGROUP_STAND_IN_CHANNELS"
WITHOUT_GATES = ("PROCGROUP_STAND_IN_NO_STREAM_MEMORY_OPERATIONS", "PROCGROUP_NCCL_GATE")


@dataclass(frozen=True)
class Plan:
    """What a seed chooses."""

    seed: int
    kind: str
    world: int
    """The place in `WORLDS`."""
    guilty: int
    step: int
    count: int
    dtype: str
    mode: str

    @property
    def size(self) -> int:
        return WORLDS[self.world][0]

    @property
    def environment(self) -> dict[str, str]:
        return {"PROCGROUP_STAND_IN_GPUS": "4", **WORLDS[self.world][1]}

    @property
    def others(self) -> tuple[int, ...]:
        return tuple(rank for rank in range(self.size) if rank != self.guilty)

    @property
    def name(self) -> str:
        return f"{self.seed} {self.kind}"

    @property
    def file(self) -> str:
        return f"train_{self.seed}.py"

    def call(self, name: str, arguments: str, group: str = "group", **how: Any) -> str:
        """Return the text of a call."""
        named = "".join(f", {key}={value}" for key, value in how.items())
        if self.mode == "blocking":
            return f"dist.{name}({arguments}, group={group}{named})"
        return f"works.append(dist.{name}({arguments}, group={group}, async_op=True{named}))"


@dataclass(frozen=True)
class Step:
    """What the ranks do in the step of the bug, as lines of the program."""

    guilty: Sequence[str]
    others: Sequence[str]
    is_every: bool = False
    """Whether that of the others is what all ranks do in every other step."""
    reuses_arrays: bool = False
    """Whether calls before the one that fails change its array."""


@dataclass(frozen=True)
class Kind:
    """A bug: what the ranks do, and what has to come of it."""

    step: Callable[[Plan], Step]
    expectation: dict[str, Any]
    has_own_world: bool = False
    """Whether a process ends in it."""
    needs_gates: bool = False
    needs_queues: bool = False
    """Whether a stream must not hold up the others."""
    may_name_nobody: bool = False
    """Whether only the GPUs know which rank they wait for: errors name none, or one at which the time limit passed."""
    modes: Sequence[str] = MODES
    guilty_ends: bool = False
    """Whether the guilty rank's process does not live on."""

    @property
    def sentence(self) -> str:
        return (self.step.__doc__ or "").partition("\n")[0]


KINDS: dict[str, Kind] = {}


def kind(expectation: dict[str, Any], **how: Any) -> Callable[[Callable[[Plan], Step]], Callable[[Plan], Step]]:
    def register(step: Callable[[Plan], Step]) -> Callable[[Plan], Step]:
        KINDS[step.__name__.replace("_", " ")] = Kind(step, expectation, **how)
        return step

    return register


def mismatch(*errors: str, **how: Any) -> dict[str, Any]:
    kinds = errors or ("CollectiveMismatch",)
    return {"errors": kinds, "within": PROMPTLY, "guilty_errors": kinds} | how


def death(*errors: str, **how: Any) -> dict[str, Any]:
    return {"errors": errors or ("PeerLost",), "within": PROMPTLY, "has_line": False} | how


def absence(*errors: str, **how: Any) -> dict[str, Any]:
    return {"errors": errors or ("CollectiveTimeout", "PeerFailed"), "within": AT_THE_LIMIT} | how


def harmless() -> dict[str, Any]:
    return {"errors": (), "within": LONG, "guilty_errors": (), "has_line": False}


def can_be_played(bug: Kind, gpus: Mapping[str, str]) -> bool:
    has_gates, has_queues = not set(gpus) & set(WITHOUT_GATES), ONE_QUEUE not in gpus
    return (has_gates or not bug.needs_gates) and (has_queues or not bug.needs_queues)


def plan_of(seed: int) -> Plan:
    """Return the plan of a seed: kinds come in turn."""
    random = np.random.default_rng([seed, 2024])
    name = list(KINDS)[seed % len(KINDS)]
    bug = KINDS[name]
    world = int(random.choice([place for place, (_, gpus) in enumerate(WORLDS) if can_be_played(bug, gpus)]))
    return Plan(
        seed,
        name,
        world,
        guilty=int(random.integers(WORLDS[world][0])),
        step=int(random.integers(1 if bug.needs_gates else 0, STEPS - 1)),
        count=int(random.choice([2, 100, 5000])),
        dtype=str(random.choice(["float32", "float64", "int32"])),
        mode=str(random.choice(list(bug.modes))),
    )


def text_of(plan: Plan) -> str:
    """Return the program."""
    bug = KINDS[plan.kind]
    step = bug.step(plan)
    reduce = plan.call("all_reduce", "gradients")
    lines = [
        f'"""{bug.sentence}"""',
        "",
        "def train(rank, size, group, other, works):",
        "    stream, second = new_stream(), new_stream()",
        "    steps = []",
        f"    for step in range({STEPS}):",
        f'        gradients = full({plan.count} + step, rank + step, "{plan.dtype}", stream)',
        f"        if step == {plan.step} and rank == {plan.guilty}:",
        *(f"            {line}" for line in ["fault()", *step.guilty]),
        "        else:" if step.is_every else f"        elif step == {plan.step}:",
        *(f"            {line}" for line in step.others),
        *([] if step.is_every else ["        else:", f"            {reduce}"]),
        *(["        for work in works:", "            work.wait()"] if plan.mode == "async" else []),
        "        steps.append(gradients)",
        *(["    for work in works:", "        work.wait()"] if plan.mode == MODES[2] else []),
        "    dist.barrier(group)",
        "    for step, gradients in enumerate(steps):",
        "        expect(gradients, size * step + sum(range(size)))",
    ]
    return "\n".join(lines) + "\n"


def line_of(text: str, mark: str) -> int | None:
    marked = [number for number, line in enumerate(text.splitlines(), 1) if line.endswith(f"# {mark}")]
    assert len(marked) <= 1, text
    return marked[0] if marked else None


@dataclass(frozen=True)
class GpuBug(Bug):
    """The expectation of a program whose text is not that of a function in this repository."""

    plan: Plan = field(kw_only=True)
    text: str = field(kw_only=True)

    @property
    def name(self) -> str:
        return self.plan.name

    @property
    def sentence(self) -> str:
        return KINDS[self.plan.kind].sentence

    @property
    def file(self) -> Path:
        return Path(self.plan.file)

    @property
    def line(self) -> int:
        return line_of(self.text, "BUG") or 0

    def names_the_right_ones(self, named: set[int], reader: int) -> bool:
        return super().names_the_right_ones(named, reader) or KINDS[self.plan.kind].may_name_nobody

    @property
    def issued_at(self) -> str:
        """Return the line of the others' call that fails; "" where it is not always the same."""
        met = line_of(self.text, "MET")
        return f"{self.plan.file}:{met}" if met else ""


def bug_of(plan: Plan) -> GpuBug:
    """Return what has to come of a plan."""
    bug = KINDS[plan.kind]
    return GpuBug(
        lambda: None, **{"guilty": (plan.guilty,), "size": plan.size} | bug.expectation, plan=plan, text=text_of(plan)
    )


# --- ranks make different calls ---


MEET = "dist.barrier(group)"
"""In a program: what all ranks do before one of them goes, so that no earlier call can be the first to fail."""


def usual(plan: Plan, mark: str = "  # MET") -> list[str]:
    return [plan.call("all_reduce", "gradients") + mark]


@kind(mismatch())
def one_rank_skips_a_call(plan: Plan) -> Step:
    """One rank finds no data for a step and leaves its call out."""
    return Step(["continue"], usual(plan, "  # BUG"), is_every=True)


@kind(mismatch())
def one_rank_makes_an_extra_call(plan: Plan) -> Step:
    """One rank adds a number that the others have forgotten."""
    extra = plan.call("all_reduce", 'full(1, 1, "float32", stream)')
    return Step([f"{extra}  # BUG", plan.call("all_reduce", "gradients")], usual(plan))


@kind(mismatch())
def one_rank_swaps_two_calls(plan: Plan) -> Step:
    """One rank adds the loss before the gradients."""
    loss = plan.call("all_reduce", 'full(1, 1, "float32", stream)')
    gradients = plan.call("all_reduce", "gradients")
    return Step([f"{loss}  # BUG", gradients], [f"{gradients}  # MET", loss])


@kind(mismatch())
def one_rank_gathers_an_object(plan: Plan) -> Step:
    """One rank gathers an object where the others add arrays."""
    return Step(["dist.all_gather_object([None] * size, rank, group=group)  # BUG"], usual(plan))


@kind(mismatch())
def one_rank_is_at_a_barrier(plan: Plan) -> Step:
    """One rank is at the end of its epoch where the others add their gradients."""
    return Step(["dist.barrier(group)  # BUG"], usual(plan))


@kind(absence("CollectiveTimeout", "CollectiveMismatch", "PeerFailed", "PeerLost", has_line=False))
def one_rank_uses_another_group(plan: Plan) -> Step:
    """One rank makes a call in another group of the same ranks, where nobody else comes."""
    return Step(
        [f"{plan.call('all_reduce', 'gradients', group='other', timeout=LIMIT)}  # BUG"],
        [f"{plan.call('all_reduce', 'gradients', timeout=LIMIT)}  # MET"],
    )


# --- ranks that do not come ---


@kind(absence(has_line=False, is_stuck=True), has_own_world=True, guilty_ends=True)
def one_rank_is_stopped(plan: Plan) -> Step:
    """Somebody has stopped one rank."""
    return Step(
        [MEET, "os.kill(os.getpid(), signal.SIGSTOP)  # BUG"],
        [MEET, f"{plan.call('all_reduce', 'gradients', timeout=LIMIT)}  # MET"],
    )


# --- ranks that end, and groups that are aborted ---

KILL = "os.kill(os.getpid(), signal.SIGKILL)  # BUG"


@kind(death(), has_own_world=True, guilty_ends=True, needs_gates=True, modes=(MODES[0], MODES[2]))
def one_rank_is_killed_when_the_others_have_many_calls_behind_gates(plan: Plan) -> Step:
    """One rank is killed when the others have queued many calls that wait for it."""
    return Step(
        [MEET, f"wait_for_words({list(plan.others)})", KILL],
        [
            MEET,
            *usual(plan),
            f"for _ in range({QUEUED}):",
            f"    {plan.call('all_reduce', 'gradients')}",
            "say_a_word()",
        ],
        reuses_arrays=True,
    )


@kind(
    death("PeerLost", "GroupBroken"), has_own_world=True, guilty_ends=True, needs_gates=True, modes=(MODES[0], MODES[2])
)
def one_rank_is_killed_amid_a_burst(plan: Plan) -> Step:
    """One rank is killed when it has issued a burst, of which some calls have been made."""
    burst = ["for _ in range(30):", f"    {plan.call('all_reduce', 'gradients')}"]
    return Step([*burst, KILL], [*burst, *burst], reuses_arrays=True)


@kind(
    {"errors": ("PeerFailed",), "within": PROMPTLY, "has_line": False, "guilty_errors": ("GroupBroken",)},
    modes=(MODES[0], MODES[2]),
)
def one_rank_aborts_amid_a_burst(plan: Plan) -> Step:
    """One rank aborts the group when it has issued a burst, of which some calls have been made."""
    burst = ["for _ in range(30):", f"    {plan.call('all_reduce', 'gradients')}"]
    return Step([*burst, "group.abort()  # BUG"], [*burst, *burst], reuses_arrays=True)


# --- streams and groups ---


@kind(
    absence(has_line=False, guilty_errors=("CollectiveTimeout", "PeerFailed")),
    needs_gates=True,
    may_name_nobody=True,
    modes=("blocking",),
)
def one_rank_uses_two_groups_in_another_order_on_one_stream(plan: Plan) -> Step:
    """One rank uses two groups in the other order on one stream, so that the GPUs wait for each other."""
    first = plan.call("all_reduce", "gradients", timeout=LIMIT)
    second = plan.call("all_reduce", 'full(3, 1, "float32", stream)', group="other", timeout=LIMIT)
    warm_up = "dist.all_reduce(full(1, 1, 'float32', second), group=other)"
    return Step([warm_up, f"{second}  # BUG", first], [warm_up, first, second])


@kind(harmless(), needs_queues=True, modes=MODES[1:])
def one_rank_uses_two_groups_in_another_order_without_waiting(plan: Plan) -> Step:
    """One rank uses two groups in the other order, asynchronously: each group has a stream of its own."""
    first = plan.call("all_reduce", "gradients")
    second = plan.call("all_reduce", 'full(3, 1, "float32", stream)', group="other")
    return Step([second, f"{first}  # BUG"], [first, second])


@kind(harmless())
def one_rank_comes_late(plan: Plan) -> Step:
    """One rank is slow, but comes within the timeout."""
    return Step(
        ["time.sleep(0.1)  # BUG", plan.call("all_reduce", "gradients")], [plan.call("all_reduce", "gradients")]
    )


@kind(harmless())
def an_array_is_dropped_right_after_its_call(plan: Plan) -> Step:
    """One rank drops the array of a call at once, and allocates and writes others of its size."""
    spare = plan.call("all_reduce", f'GpuArray.of(np.ones({plan.count}, "float32"), stream=stream)')
    others = f'others = [GpuArray.of(np.ones({plan.count}, "float32"), stream=second) for _ in range(20)]'
    rest = "for spare in others: expect(spare, 1)"
    reduce = plan.call("all_reduce", "gradients")
    return Step([spare, f"{others}  # BUG", rest, reduce], [spare, reduce])


@kind(harmless(), needs_gates=True, modes=("blocking",))
def an_array_is_used_on_two_streams_in_turn(plan: Plan) -> Step:
    """All ranks write an array on one stream, and reduce it there; its next use is on another one, which waits."""
    lines = [
        "with held(stream):",
        "    gradients.set(np.full(gradients.shape, rank + step))",
        f"    {plan.call('all_reduce', 'gradients')}",
        "gathered = full(gradients.size * size, 7, gradients.dtype, second)",
        "dist.all_gather_single(gathered, gradients, group=group)",
        "expect(gathered, size * step + sum(range(size)))",
    ]
    return Step([*lines[:-1], f"{lines[-1]}  # BUG"], lines)


@kind(harmless(), needs_gates=True, needs_queues=True, modes=("blocking",))
def an_array_is_written_on_a_stream_that_is_not_its_own(plan: Plan) -> Step:
    """All ranks write an array on a stream that it does not name: the call does not wait for that, as documented."""
    lines = [
        "gradients.get()",
        "with held(second):",
        "    gradients.stream = second",
        "    gradients.set(np.full(gradients.shape, 77))",
        "    gradients.stream = stream",
        f"    {plan.call('all_reduce', 'gradients')}",
        "    expect(gradients, size * step + sum(range(size)))",
        "gradients.stream = second",
        "expect(gradients, 77)",
        "gradients.set(np.full(gradients.shape, size * step + sum(range(size))))",
    ]
    return Step([*lines[:-1], f"{lines[-1]}  # BUG"], lines)


# --- what a rank does ---


@dataclass
class Report:
    """What a rank has seen of one program. See bugs.surroundings.Seen."""

    kind: str = ""
    text: str = ""
    attributes: dict[str, Any] = field(default_factory=dict)
    moment: float = 0.0
    changed: list[str] = field(default_factory=list)
    later: str | None = None
    """The kind of error of a call after the failure; None: there was none to make."""
    ended: float = 0.0


class Player:
    """One rank, which plays programs one after the other, each in groups of its own."""

    def __init__(self, rank: int, size: int, place: Path) -> None:
        self._rank, self._size, self._place = rank, size, place
        self._made: list[tuple[GpuArray, np.ndarray]] = []

    def play(self, plan: Plan, group: Any, other: Any) -> Report:
        text = text_of(plan)
        works: list[Any] = []
        self._made = []
        names = self._names(plan)
        exec(compile(text, str(self._place / plan.file), "exec"), names)
        dist.barrier()
        report = Report()
        try:
            names["train"](self._rank, self._size, group, other, works)
        except (dist.DistError, WrongResult) as error:
            self._see(report, error)
            if report.kind == "GroupBroken" and self._is_wrong(plan, "GroupBroken"):
                self._look_at(works, report)
        report.moment = time.monotonic()
        (self._place / f"{plan.seed}.{self._rank}.seen").touch()
        step = KINDS[plan.kind].step(plan)
        changed = self._changed(plan.step)  # and what is queued on the streams ends
        report.changed = [] if step.reuses_arrays else changed
        if report.kind:
            report.later = self._kind_of(
                lambda: dist.all_reduce(self._full(1, 1, "int8", gpu_arrays.LEGACY), group=group)
            )
        return report

    def _is_wrong(self, plan: Plan, error: str) -> bool:
        """Return whether this rank is to raise another error."""
        bug = bug_of(plan)
        errors = bug.guilty_errors if self._rank == plan.guilty else bug.errors
        return error not in (errors or ())

    def _names(self, plan: Plan) -> dict[str, Any]:
        """Return what the programs use."""
        modules = {"dist": dist, "np": np, "os": os, "signal": signal, "sys": sys, "time": time}
        functions = {"full": self._full, "expect": expect, "held": held, "new_stream": new_stream}
        word = f"{plan.seed}.{{}}.word"
        return {
            **modules,
            **functions,
            "GpuArray": GpuArray,
            "place": self._place,
            "fault": lambda: (self._place / f"{plan.seed}.fault").write_text(str(time.monotonic())),
            "say_a_word": lambda: (self._place / word.format(self._rank)).touch(),
            "wait_for_words": lambda ranks: wait_for([self._place / word.format(rank) for rank in ranks]),
        }

    def _full(self, count: int, value: float, dtype: Any, stream: int) -> GpuArray:
        """Return an array that is watched."""
        elements = np.full(count, value, dtype)
        array = GpuArray.of(elements, stream=stream)
        self._made.append((array, elements))
        return array

    def _changed(self, first: int) -> list[str]:
        """Return what arrays have become; those from the step of the bug on are reported."""
        became = [(elements, array.get()) for array, elements in self._made]
        return [f"{before[:4]} became {after[:4]}" for before, after in became[first:] if not (before == after).all()]

    def _look_at(self, works: list[Any], report: Report) -> None:
        """See what has ended the group, as the first work that failed for another reason has it."""
        for work in works:
            try:
                work.wait()
            except dist.DistError as error:
                if type(error).__name__ != "GroupBroken":
                    self._see(report, error)
                    return

    @staticmethod
    def _see(report: Report, error: BaseException) -> None:
        plain = (str, int, float, bool, tuple, list, dict, type(None))
        report.kind, report.text = type(error).__name__, str(error)
        report.attributes = {name: value for name, value in vars(error).items() if isinstance(value, plain)}

    @staticmethod
    def _kind_of(call: Callable[[], Any]) -> str:
        try:
            call()
        except dist.DistError as error:
            return type(error).__name__
        return ""


def expect(array: GpuArray, value: float) -> None:
    """Raise WrongResult if an array does not have this value everywhere."""
    if not ((elements := array.get()) == value).all():
        raise WrongResult(f"got {elements[:8]}, expected {value}")


def wait_for(files: Sequence[Path]) -> None:
    while not all(file.exists() for file in files):
        time.sleep(0.001)
