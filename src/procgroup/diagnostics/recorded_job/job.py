"""A job as its flight records have it: plain values, whose times are on one clock.

Times are seconds on the wall clock of each rank's host, which ranks of one boot of a host share exactly. Records of
several hosts are as far apart as their clocks.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import NamedTuple

from procgroup.errors.texts import name_ranks
from procgroup.process.exit_reason import Origin

MAKES_GROUP = "new_group"
"""The recorded operation of a rank that makes a group: it has no number in the group."""


class RecordedGroup(NamedTuple):
    """A process group. Its members are global ranks, and none where the record had no room for them."""

    key: str
    name: str
    size: int
    members: tuple[int, ...]


class RecordedCall(NamedTuple):
    """One call of one rank. ``peer`` is the global rank of the root, or of the other rank of a message; -1: none.

    ``record_index`` counts the calls of a record, from 0 on.
    """

    group: RecordedGroup
    sequence: int
    op: str
    text: str
    is_message: bool
    peer: int
    bytes: int
    state: str
    line: str
    issued: float
    started: float
    ended: float
    record_index: int = 0

    @property
    def name(self) -> str:
        """Return "all_reduce #17 of group 0"."""
        if self.op == MAKES_GROUP:
            return f"{self.op} of {name_ranks(self.group.members)}"
        return f"{self.op} #{self.sequence} of group {self.group.name}"

    @property
    def is_running(self) -> bool:
        """Whether the call has started and not ended."""
        return self.state == "started"

    @property
    def is_on_gpu(self) -> bool:
        """Whether the call has ended on the host, and its work on a GPU has not."""
        return self.state == "queued"


class Rank(NamedTuple):
    """One rank: its process, how that is, and its last calls, oldest first.

    ``state`` is "running", "stopped", "left" (in order), "failed" (with ``reason`` and ``origin``: where the failure
    began) or "lost": killed, or crashed.
    ``stack`` has the innermost frame first, and was taken at ``stack_taken``. ``recorded`` counts all calls that it has
    made, also those that its record has no room for any more: ``calls`` has all that it issued since ``whole_since``.
    """

    rank: int
    world_size: int
    host: str
    pid: int
    program: str
    state: str
    reason: str
    seen: float
    calls: list[RecordedCall]
    stack: list[str]
    report: str
    began: float
    stack_taken: float
    recorded: int
    whole_since: float = 0.0
    origin: Origin = Origin()

    @property
    def is_alive(self) -> bool:
        """Whether its process has not ended."""
        return self.state in ("running", "stopped")

    @property
    def last(self) -> RecordedCall | None:
        """Return the call that has ended last, or None."""
        return max((call for call in self.calls if call.ended), key=lambda call: call.ended, default=None)

    @property
    def call(self) -> RecordedCall | None:
        """Return the call that it is in, or None; of several the oldest."""
        return next((call for call in self.calls if call.is_running), None)

    @property
    def on_gpu(self) -> list[RecordedCall]:
        """Return the calls that its GPU has not finished, while its host has gone on; oldest first."""
        return [call for call in self.calls if call.is_on_gpu]

    @property
    def current_stack(self) -> list[str]:
        """Return the stack of a running rank that is in no call, unless it has made a call since: [] then."""
        last = self.last
        is_current = self.state == "running" and self.call is None and (last is None or self.stack_taken >= last.ended)
        return self.stack if is_current else []

    def reached(self, group: RecordedGroup) -> int:
        """Return the number of the last collective of a group that this rank has started."""
        numbers = (call.sequence for call in self.calls if call.group.key == group.key and not call.is_message)
        return max(numbers, default=0)


class Job(NamedTuple):
    """The ranks of a job, as far as their records are here, in order."""

    name: str
    directory: Path
    ranks: list[Rank]

    @property
    def world_size(self) -> int:
        """Return how many ranks the job has."""
        return max(rank.world_size for rank in self.ranks)

    @property
    def is_alive(self) -> bool:
        """Whether the process of a rank has not ended."""
        return any(rank.is_alive for rank in self.ranks)

    @property
    def began(self) -> float:
        """When the first rank began."""
        return min(rank.began for rank in self.ranks)

    @property
    def now(self) -> float:
        """The present where a rank lives, and otherwise when the last one ended."""
        return max(map(self.until, self.ranks))

    def until(self, rank: Rank) -> float:
        """Return the moment up to which a rank is known: the present where it lives, otherwise when it ended."""
        return time.time() if rank.is_alive else rank.seen

    def rank(self, number: int) -> Rank | None:
        """Return a rank; None when its record is not here."""
        return next((rank for rank in self.ranks if rank.rank == number), None)
