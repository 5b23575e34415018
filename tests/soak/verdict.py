"""What is wrong with what was seen of a scenario: an error that is missing, wrong or late, a result, an end."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from failures.instants import JOINING

from soak.plan import (
    ABSENCES,
    CUTS,
    DEATHS,
    ENDLESS,
    EXCEPTIONS,
    HARMLESS,
    LONG,
    WRONG_CALLS,
    WRONG_GROUPS,
    WRONG_ORDERS,
    Plan,
)
from soak.player import Scene, Seen, says_for_whom_it_waits

SOON = 1.0
"""In seconds: the error after a death, an exception, a wrong call."""
GRACE = 0.5
"""How much later than its deadline a call may raise."""
CYCLE = 2.0
"""After how long ranks that wait for each other, or make groups that differ, raise an error before their deadline."""
EXIT = 2.0
AT_MOST = 30.0
"""How long a process that says for whom it waits at its end may wait."""
MARGIN = 0.25
"""For what a moment does not show of this machine: on top of the time that processes have waited for a core."""

DIRECT = {
    fault: kinds
    for faults, kinds in (
        (DEATHS, {"PeerLost"}),
        (EXCEPTIONS, {"PeerFailed"}),
        (("interrupt",), {"PeerFailed", "PicklingFailed"}),  # the latter where it comes while an object is pickled
        (ABSENCES, {"CollectiveTimeout"}),
        (WRONG_CALLS, {"CollectiveMismatch"}),
        (WRONG_ORDERS, {"CollectiveMismatch", "CollectiveTimeout"}),
        (WRONG_GROUPS, {"CollectiveMismatch", "CollectiveTimeout", "Deadlock"}),
        (CUTS, {"CollectiveTimeout", "PeerLost"}),
    )
    for fault in faults
}
"""What a rank raises that waits for the victim itself."""
NOISE = ("Exception ignored", "Fatal Python error", "terminate called")
PASSED_ON = {"PeerFailed", "GroupBroken", "PeerLost"}
"""What a rank raises because of another one's error."""


@dataclass(frozen=True)
class Defect:
    kind: str
    text: str

    @property
    def may_be_the_machines(self) -> bool:
        return self.kind in ("late", "slow exit", "early timeout")

    def __str__(self) -> str:
        return f"{self.kind}: {self.text}"


@dataclass
class Judge:
    plan: Plan
    scene: Scene

    def __post_init__(self) -> None:
        self.fault = self.scene.fault(self.plan)
        self.errors = {seen.rank: error for seen in self.scene.ranks if (error := seen.first("error"))}
        self.survivors = [seen for seen in self.scene.ranks if seen.rank != self.plan.victim or self._all_survive]

    @property
    def _all_survive(self) -> bool:
        return self.plan.fault in (*CUTS, *HARMLESS)

    def defects(self) -> list[Defect]:
        found = [Defect("leftover", text) for text in self.scene.left]
        for seen in self.scene.ranks:
            found += self._of_any(seen)
        for seen in self.survivors:
            found += self._of_survivor(seen)
        return found

    def seconds(self) -> float | None:
        """Return how long after the fault the last survivor's error came."""
        moments = [self.errors[seen.rank]["moment"] for seen in self.survivors if seen.rank in self.errors]
        return max(moments) - self.fault if moments and self.fault is not None else None

    def _of_any(self, seen: Seen) -> Iterator[Defect]:
        who = f"rank {seen.rank}"
        for event in seen.all("wrong"):
            yield Defect("WRONG RESULT", f"{who}: {event['text']}")
        if seen.status is None:
            since = f", the fault was at {self.fault}" if self.fault is not None else ", without a fault"
            yield Defect("hang", f"{who} hangs{since}: {seen.events[-1:]}\n{seen.output[-6000:]}")
        elif late := self._lateness_of_end(seen):
            yield Defect("slow exit", f"{who} ends {late}: {seen.events[-1:]}\n{seen.output[-2000:]}")
        may_be_noisy = seen.rank == self.plan.victim and (self.plan.moment == "shutdown" or self.plan.fault == "crash")
        if any(word in seen.output for word in NOISE) and not may_be_noisy:
            yield Defect("noise", f"{who} writes: {seen.output[-3000:]}")

    def _of_survivor(self, seen: Seen) -> Iterator[Defect]:
        who, error = f"rank {seen.rank}", self.errors.get(seen.rank)
        for event in seen.all("destroyed"):
            if left := [thing for thing in event["left"] if not _is_kept(seen.rank, thing)]:
                yield Defect("leftover", f"{who} has after destroy_process_group: {left}")
        if seen.status is not None and (seen.status not in (0, 1) or not (error or seen.first("done"))):
            yield Defect("crash", f"{who} ends with status {seen.status}: {seen.output[-3000:]}")
        elif error is not None:
            yield from self._of_error(seen, error)
            yield from self._barriers(seen)
        elif seen.status is not None and self.fault is not None and not self.plan.may_go_unnoticed:
            yield Defect("no error", f"{who} ends well")

    def _of_error(self, seen: Seen, error: dict[str, Any]) -> Iterator[Defect]:
        call = error["call"] or "while groups are made"
        text = f"rank {seen.rank}, {call}: {error['kind']}: {error['text']}"
        if self.fault is None or self.plan.fault in HARMLESS or error["moment"] < self.fault:
            yield Defect("early timeout" if self._is_timeout(error) else "needless error", text)
        elif not self._blames_the_guilty(seen.rank):
            yield Defect("wrong rank" if error["named"] else "no rank", text)
        elif not self._is_right_kind(seen.rank, error):
            yield Defect("wrong error", text)
        elif (late := error["moment"] - self._deadline(seen, error)) > 0:
            yield Defect("late", f"{error['moment'] - self.fault:.2f} s after the fault, {late:.2f} s late: {text}")

    def _is_timeout(self, error: dict[str, Any]) -> bool:
        kind, text = error["kind"], error["text"]
        is_told = kind == "PeerFailed" and "time limit of" in text  # by the rank whose time limit it was
        return kind in ("CollectiveTimeout", "RendezvousTimeout") or "timed out" in text or is_told

    def _guilty(self, rank: int) -> set[int]:
        """Return whom this rank may blame."""
        if self.plan.fault in CUTS:
            return {other for other, host in enumerate(self.plan.hosts) if host != self.plan.hosts[rank]}
        return {self.plan.victim}

    def _blames_the_guilty(self, rank: int) -> bool:
        """Return whether an error names a guilty rank, or ranks that have failed, and so on, down to such a one."""
        seen: set[int] = set()
        blamed = {rank}
        while blamed - seen:
            seen |= blamed
            for one in blamed.copy():
                named = set(self.errors[one]["named"]) if one in self.errors else set()
                if named & self._guilty(one):
                    return True
                blamed |= named
        return False

    def _is_right_kind(self, rank: int, error: dict[str, Any]) -> bool:
        direct = DIRECT[self.plan.fault]
        if self._may_not_have_met:
            direct = direct | {"RendezvousTimeout", "RendezvousError"}
        if self._may_never_have_come:
            direct = direct | DIRECT["sleep"] | ({"DistNetworkError"} if self.plan.victim == 0 else set())
        if set(error["named"]) & self._guilty(rank):
            # A victim that has raised an error of its own may have left after it.
            return error["kind"] in direct | (
                PASSED_ON if self.plan.victim in self.errors else PASSED_ON - {"PeerLost"}
            )
        return error["kind"] in PASSED_ON or (self._ends_by_deadline and error["kind"] == "CollectiveTimeout")

    @property
    def _may_not_have_met(self) -> bool:
        return self._may_never_have_come or (self.plan.moment == "join" and self.plan.instant in JOINING)

    @property
    def _may_never_have_come(self) -> bool:
        """Whether the victim may not have reached the store, or, where it hosts the store, not have started it."""
        has_joined = self.scene.ranks[self.plan.victim].first("joined") is not None
        return self.plan.moment == "before" or (self.plan.moment == "meet" and not has_joined)

    @property
    def _ends_by_deadline(self) -> bool:
        return self.plan.fault in (*ABSENCES, *WRONG_ORDERS, *WRONG_GROUPS, *CUTS) or self._may_never_have_come

    def _deadline(self, seen: Seen, error: dict[str, Any]) -> float:
        assert self.fault is not None
        slow = MARGIN + self.scene.delay + sum(self._delay(other, other.first("error")) for other in self.survivors)
        if not self._ends_by_deadline:
            return self.fault + SOON + slow
        seconds = CYCLE if self.plan.fault in WRONG_GROUPS and self.plan.timeout == LONG else self.plan.timeout
        started = (seen.first("joined") or seen.first("start") or error)["moment"]
        return max(self.fault, error["issued"] or started) + seconds + GRACE + slow

    def _delay(self, seen: Seen, until: dict[str, Any] | None) -> float:
        """Return how long a rank's threads have waited for a core from when the calls began until an event."""
        since = seen.first("calling") or seen.first("joined") or seen.first("start")
        return max(0.0, until["delay"] - since["delay"]) if until and since else 0.0

    def _lateness_of_end(self, seen: Seen) -> str:
        """Return how late a process has ended; "" where it has in time, or has said for whom it waits."""
        last = [event for event in seen.events if event["what"] in ("error", "done", "fault")]
        if not last or (seen.rank == self.plan.victim and self.plan.fault in ENDLESS):
            return ""
        since = max(last[-1]["moment"], self.scene.resumed or 0.0 if seen.rank == self.plan.victim else 0.0)
        if says_for_whom_it_waits(seen.output):
            # It has named no more than a limit, which those on a host that cannot be reached make it wait for.
            limit = since + AT_MOST if self.plan.fault in CUTS else 0.0
            since = max(since, limit, *(other.ended for other in self.scene.ranks if other is not seen))
        slow = MARGIN + GRACE + self.scene.delay + max(0.0, seen.delay - last[-1]["own_delay"])
        took = seen.ended - since
        return f"{took:.2f} s after {last[-1]['what']}" if took > EXIT + slow else ""

    def _barriers(self, seen: Seen) -> Iterator[Defect]:
        if self.plan.fault in WRONG_ORDERS or self._all_survive:
            return
        entered = {event["number"] for event in self.scene.ranks[self.plan.victim].all("barrier")}
        for event in seen.all("met"):
            if self.plan.victim in event["members"] and event["number"] not in entered:
                yield Defect("WRONG RESULT", f"rank {seen.rank}: barrier {event['number']} ended without the victim")


def _is_kept(rank: int, thing: str) -> bool:
    """Return whether a process has this to its end: its flight record, and, on rank 0, the store that others use."""
    if ".record" in thing or "procgroup-stack" in thing:
        return True
    return rank == 0 and thing in ("descriptor socket", "descriptor anon_inode", "thread")
