"""Joining: every rank says who it is, and all learn together whether the world is complete.

Vocabulary. A *round* is one attempt of all ranks to come together; a store can see many, one after the
other, because programs initialise, destroy and initialise again. A *member* is one rank's record: rank,
host, process, nonce. The *verdict* ends a round, is written once, and everybody waits for it: the
members, or what went wrong.

::

    rank r                                   keys below "rendezvous/"
    1  read the current round                round            -> n
    2  claim my rank in it                   n/rank/r         compare_set: first come, first served
    3  agree on the world size               n/world_size     compare_set
    4  write myself into the list            n/members        append
    5  count myself                          n/count          add; the last one writes the verdict
    6  wait for the verdict                  n/verdict        get

That is six requests for each rank, however many there are. A second process with rank r loses step 2, a
rank with another world size loses step 3, a rank that gives up (timeout, Ctrl-C) leaves: each writes the
verdict, so that all ranks raise the same error at once. Rank 0 wakes every 5 s to say who is missing.
A claim that an ended round holds is no conflict: its rank goes on to the next round.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from procgroup import types
from procgroup.errors import (
    DistError,
    RendezvousConflict,
    RendezvousError,
    RendezvousTimeout,
    StoreTimeout,
)
from procgroup.rendezvous.members import Member, read_members
from procgroup.stores.store import Store
from procgroup.types import Timeout

REPORT_SECONDS = 5.0
"""How often rank 0 says who is missing."""

_LEAVE_SECONDS = 0.2
_READ_SECONDS = 5.0


@dataclass(frozen=True)
class World:
    """What all ranks of a complete round know: its number in the store, its members, and a secret that they share."""

    round: int
    members: tuple[Member, ...]
    key: bytes


def join(
    store: Store,
    rank: int,
    world_size: int,
    timeout: Timeout,
    *,
    started: float | None = None,
    say: Callable[[str], None] = lambda line: print(line, file=sys.stderr, flush=True),
) -> World:
    """Come together with the other ranks through ``store``; return when all are there.

    Raises RendezvousConflict when two processes claim one rank or the world sizes differ, RendezvousTimeout
    when ranks are missing after ``timeout`` (timedelta or seconds), RendezvousError when another rank left.
    All ranks that are there raise it, and may join again. ``started`` is the time.monotonic() that ``timeout``
    counts from; ``say`` prints rank 0's reports.
    """
    me = Member(rank, world_size, socket.gethostname(), os.getpid(), secrets.token_hex(8))
    return _Joining(store, me, types.seconds(timeout), time.monotonic() if started is None else started, say).run()


class _Joining:
    def __init__(self, store: Store, me: Member, limit: float, started: float, say: Callable[[str], None]) -> None:
        self.store = store
        self.me = me
        self.limit = limit
        self.say = say
        self.deadline = started + limit
        self.round = -1

    def run(self) -> World:
        try:
            self._claim()
            self._agree_on_world_size()
            self.store.append(self._key("members"), self.me.line())
            if self.store.add(self._key("count"), 1) == self.me.size:
                self._complete()
            return self._read(self._await_verdict())
        except RendezvousError:
            raise
        except BaseException as error:
            self._leave(error)
            raise

    def _claim(self) -> None:
        """Find the round to be in and claim this rank's place there."""
        self.round = self.store.add("rendezvous/round", 0)
        while True:
            mine = self.me.line()
            holder = self.store.compare_set(self._key(f"rank/{self.me.rank}"), "", mine).decode(errors="replace")
            if holder == mine:
                return
            if not self.store.check([self._key("verdict")]):
                self._refuse_claim(holder)
            self.round += 1

    def _refuse_claim(self, holder: str) -> None:
        """Raise on all ranks that two processes claim one rank; return when the round was complete before that."""
        others = [member for member in read_members(holder) if member.rank == self.me.rank]
        first = others[0].process() if others else "an unknown process"
        text = f"rank {self.me.rank} joined twice: {first}, {self.me.process()}"
        self._read(self._decide({"kind": "conflict", "text": text}))

    def _agree_on_world_size(self) -> None:
        mine = f"{self.me.size} {self.me.rank}"
        first = self.store.compare_set(self._key("world_size"), "", mine).decode(errors="replace")
        size, _, rank = first.partition(" ")
        if size != str(self.me.size):
            text = f"world_size disagreement: rank {self.me.rank} says {self.me.size}, rank {rank} says {size}"
            self._read(self._decide({"kind": "conflict", "text": text}))
            raise RendezvousConflict(text)

    def _complete(self) -> None:
        members = self._members()
        self._decide(
            {"kind": "complete", "members": [member.line() for member in members], "key": secrets.token_hex(32)}
        )

    def _decide(self, verdict: dict[str, Any]) -> bytes:
        """Write the verdict unless there is one; return the one that counts."""
        # With the writer's nonce: two ranks that say the same would both count the round, and the next ranks to come
        # would be in different ones.
        text = json.dumps({**verdict, "by": self.me.nonce})
        written = self.store.compare_set(self._key("verdict"), "", text)
        if written == text.encode():
            self.store.add("rendezvous/round", 1)
        return written

    def _await_verdict(self) -> bytes:
        while True:
            left = self.deadline - time.monotonic()
            slice_seconds = min(left, REPORT_SECONDS) if self.me.rank == 0 else left
            try:
                return self.store.get(self._key("verdict"), timeout=max(slice_seconds, 0.001))
            except StoreTimeout:
                if time.monotonic() >= self.deadline:
                    return self._time_out()
            self._report()

    def _report(self) -> None:
        joined = {member.rank: member.host for member in self._members()}
        missing = [str(rank) for rank in range(self.me.size) if rank not in joined]
        if missing:
            ranks = f"rank {missing[0]}" if len(missing) == 1 else f"ranks {' '.join(missing)}"
            where = " ".join(f"{rank}@{host}" for rank, host in sorted(joined.items()))
            self.say(f"waiting for {ranks} of {self.me.size} (joined: {where})")

    def _time_out(self) -> bytes:
        joined = {member.rank: member.host for member in self._members()}
        missing = [rank for rank in range(self.me.size) if rank not in joined]
        return self._decide(
            {
                "kind": "timeout",
                "missing": missing,
                "joined": list(joined.items()),
                "size": self.me.size,
                "seconds": self.limit,
            }
        )

    def _leave(self, error: BaseException) -> None:
        """Tell the others, as far as the store still can, that this rank does not wait any longer."""
        if self.round < 0:
            return
        reason = f"{type(error).__name__}: {error}".rstrip(": ")
        before = self.store.timeout
        with contextlib.suppress(DistError, OSError):
            self.store.set_timeout(_LEAVE_SECONDS)
            self._decide({"kind": "left", "text": f"rank {self.me.rank} ({self.me.process()}) left: {reason}"})
        with contextlib.suppress(DistError, OSError):
            self.store.set_timeout(before)

    def _read(self, verdict: bytes) -> World:
        data = json.loads(verdict)
        if data["kind"] == "complete":
            members = tuple(sorted(read_members("".join(data["members"])), key=lambda member: member.rank))
            return World(self.round, members, bytes.fromhex(data["key"]))
        if data["kind"] == "timeout":
            raise RendezvousTimeout(
                missing=data["missing"], joined=dict(data["joined"]), size=data["size"], seconds=data["seconds"]
            )
        raise (RendezvousConflict if data["kind"] == "conflict" else RendezvousError)(data["text"])

    def _members(self) -> list[Member]:
        return read_members(self.store.get(self._key("members"), timeout=_READ_SECONDS).decode(errors="replace"))

    def _key(self, name: str) -> str:
        return f"rendezvous/{self.round}/{name}"
