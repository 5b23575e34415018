"""What to think of what was seen: whether the right rank and line were named, and in time."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from typing import Any

from bugs import bug as expectations
from bugs.bug import ENDS_WELL, Bug
from bugs.surroundings import EXIT_SECONDS, GLOO, Seen, Surrounding, Surroundings
from failures.waiting_calls import allowance

WORST_FIRST = (
    "WRONG RESULT",
    "crash",
    "hang",
    "no error",
    "no rank",
    "wrong rank",
    "wrong error",
    "late",
    "slow exit",
    "no line",
    "ok",
)
"""Verdicts. A crash is the death of a rank that has done nothing wrong."""


TRIES = 3


@dataclass(frozen=True)
class Verdict:
    word: str
    reason: str = ""
    seconds: float | None = None
    """From the fault to the last error of a rank that must raise."""
    names_line: bool = True
    """Whether all those errors name the guilty line, where it can be known."""

    @property
    def is_ok(self) -> bool:
        return self.word == "ok"

    def __str__(self) -> str:
        line = "" if self.names_line or not self.is_ok else ", no line"
        time = "" if self.seconds is None else f" {self.seconds:.2f} s"
        return f"{self.word}{line}{time}"


def judge(bug: Bug, seen: list[Seen], any_error: bool = False) -> Verdict:
    """Return the worst verdict of all ranks. With ``any_error`` the classes of errors do not matter."""
    fault = moment_of_fault(bug, seen)
    found = [_judge_rank(bug, one, fault, any_error) for one in seen]
    word, reason = min(found, key=lambda verdict: WORST_FIRST.index(verdict[0]))
    raising = [one for one in seen if one.rank in bug.must_raise() and bug.errors and one.kind]
    seconds = max((max(one.moment - fault, 0.0) for one in raising if one.moment), default=None)
    named = all(bug.place in f"{one.text} {one.attributes}" for one in raising)
    return Verdict(word, reason, seconds, named or not bug.has_line)


def try_out(bug: Bug, surrounding: Surrounding, surroundings: Surroundings) -> Verdict:
    """Run a program and judge it; one that is late runs again, up to twice, because the machine may be to blame."""
    verdicts: list[Verdict] = []
    while len(verdicts) < TRIES and all(verdict.word == "late" for verdict in verdicts):
        verdicts.append(judge(bug, surroundings.play(bug, surrounding), any_error=surrounding == GLOO))
    return verdicts[-1]


def moment_of_fault(bug: Bug, seen: list[Seen]) -> float:
    """Return when the guilty rank came to its guilty line, or else when the last rank began."""
    faults = [one.fault for one in seen if one.fault is not None and one.rank in bug.guilty]
    return max(faults or [one.started or 0.0 for one in seen])


def _judge_rank(bug: Bug, one: Seen, fault: float, any_error: bool) -> tuple[str, str]:
    """Return a verdict on what one rank saw, and the reason."""
    who = f"rank {one.rank}"
    if one.kind == "WrongResult":
        return "WRONG RESULT", f"{who}: {one.text}"
    if one.rank in bug.guilty and one.rank not in bug.must_raise():
        return _judge_guilty(bug, one, any_error)
    if one.moment is None:
        if one.status is not None:
            return "crash", f"{who} ended with status {one.status}"
        return "hang", f"{who} hangs: {one.output[-3000:]}"  # which has its stacks
    says_intact = one.attributes.get("intact") is True and one.watched == 1
    if one.changed and one.kind and (bug.keeps_arrays or says_intact):
        return "WRONG RESULT", f"{who}: an array has changed: {one.changed}; it raised {one.text}"
    if one.rank in bug.must_raise() and bug.errors:
        word, reason = _judge_error(bug, one, fault, any_error)
    else:
        word, reason = ("wrong error", f"raised {one.kind}: {one.text}") if one.kind else ("ok", "")
    if word == "ok":
        word, reason = _judge_end(one)
    return word, f"{who}: {reason}" if reason else ""


def _judge_guilty(bug: Bug, one: Seen, any_error: bool) -> tuple[str, str]:
    """Judge a rank that has gone wrong: it may do what it likes, unless it must raise, or is still there."""
    who = f"rank {one.rank}, which is guilty,"
    if one.status is None and not bug.is_stuck:
        return "hang", f"{who} hangs"
    if bug.guilty_errors is None or any_error:
        return "ok", ""
    if one.changed and one.kind and bug.keeps_arrays:
        return "WRONG RESULT", f"{who} has changed arrays: {one.changed}"
    if one.kind not in (bug.guilty_errors or ("",)):
        return ("wrong error" if one.kind else "no error"), f"{who} raised {one.kind or 'nothing'}: {one.text}"
    return "ok", ""


def _judge_error(bug: Bug, one: Seen, fault: float, any_error: bool) -> tuple[str, str]:
    """Judge the error of a rank that must raise one."""
    assert one.moment is not None
    text = f"{one.kind}: {one.text}"
    if not one.kind:
        if ENDS_WELL in bug.errors:
            return "ok", ""
        return ("WRONG RESULT", f"no error, and {one.changed}") if one.changed else ("no error", "raised nothing")
    named = ranks_named(one)
    if not bug.names_the_right_ones(named, one.rank):
        return ("wrong rank", f"names {sorted(named)}: {text}") if named else ("no rank", text)
    if one.kind not in bug.errors and not any_error:
        return "wrong error", text
    if one.moment - fault > allowance(bug.within):
        return "late", f"after {one.moment - fault:.2f} s: {text}"
    # A call that another rank's failure has ended names that rank, and what it reports.
    is_passed_on = one.kind == "PeerFailed" and "PeerFailed" not in bug.errors[:1]
    if (
        expectations.LINES_ARE_NAMED
        and bug.has_line
        and not is_passed_on
        and bug.place not in f"{text} {one.attributes}"
    ):
        return "no line", f"{bug.place} is not in {text}"
    return "ok", ""


def _judge_end(one: Seen) -> tuple[str, str]:
    """Judge how a rank has ended that was right until then."""
    assert one.moment is not None
    if one.ended is None:
        return "hang", "does not exit"
    if one.ended - one.moment > allowance(EXIT_SECONDS):
        return "slow exit", f"exits {one.ended - one.moment:.2f} s after the end of its program"
    if one.left:
        return "slow exit", f"leaves processes behind: {one.left}"
    if (one.status or 0) < 0 or (one.status and not one.kind):
        return "crash", f"ends with status {one.status}: {one.output[-500:]}"
    return "ok", ""


def ranks_named(one: Seen) -> set[int]:
    """Return the global ranks that an error names; the place of the rank that has raised it counts as none."""
    return _ranks_in_attributes(one.attributes) | _ranks_in(one.text)


def _ranks_in_attributes(attributes: dict[str, Any]) -> set[int]:
    members = attributes.get("members") or list(range(1000))
    named = {attributes[name] for name in ("global_peer", "global_source") if name in attributes}
    named |= {members[rank] for rank in attributes.get("missing", ())}
    named |= {int(rank) for rank in attributes.get("waits", {})}
    calls = {members[int(rank)]: call for rank, call in attributes.get("calls", {}).items()}
    if "missing" in attributes:
        return named | set(calls)
    return named | _odd_ones(calls)


def _odd_ones(calls: dict[int, str]) -> set[int]:
    """Return the ranks whose call is not that of most ranks; all, where no call is that of most."""
    if not calls:
        return set()
    (most, count), *_ = Counter(calls.values()).most_common()
    return {rank for rank, call in calls.items() if 2 * count <= len(calls) or call != most}


def _ranks_in(text: str) -> set[int]:
    """Return the global ranks in a text, as in "lost rank 3 (rank 1 of group 2)" and "ranks 0, 2 and 3"."""
    without_places = re.sub(r"\(rank \d+ of [^)]*\)|\brank \d+ of \d+", "", text)
    lists = re.findall(r"\branks? (\d+(?:(?:, | and )\d+)*)", without_places)
    return {int(number) for ranks in lists for number in re.findall(r"\d+", ranks)}
