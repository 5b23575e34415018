"""Joining: every rank registers itself in the store, and all read one verdict on whether the world is complete.

Vocabulary. A *round* is one attempt of all ranks to form a world; a store can serve many rounds, one after the
other, because programs initialise, destroy and initialise again. A *member* is one rank's record: rank,
host, process, nonce. The *verdict* ends a round: the list of members, or the failure. It is written once, and all
ranks wait for it.

::

    rank r                                   keys below "rendezvous/"
    1  read the current round                round            -> n
    2  have my end made known                n/lost           set_on_disconnect (stores/start_up.py)
    3  claim my rank in it                   n/rank/r         compare_set: first come, first served
    4  agree on the world size               n/world_size     compare_set
    5  write myself into the list            n/members        append
    6  count myself                          n/count          add; the last one writes the verdict
    7  wait for the verdict                  n/verdict        get_unless n/lost

That is seven requests for each rank, however many there are, and two more where a round came before, whose verdict
errors quote. A second process with rank r loses step 3, a rank with another world size loses step 4, a rank that gives
up (timeout, Ctrl-C) leaves, a rank is lost: in each case a verdict is written, so that all ranks raise the same error
at once. Every 5 s the lowest rank that has come says who is missing.
A claim that an ended round holds is no conflict: its rank goes on to the next round. When a start has failed and the
process that hosts the store ends, it writes why at "over", and stays a second for the ranks that have not come yet.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from procgroup import types
from procgroup.errors import (
    DistError,
    PeerFailed,
    PeerLost,
    RendezvousConflict,
    RendezvousError,
    RendezvousTimeout,
    StoreLost,
    StoreTimeout,
)
from procgroup.errors.texts import name_ranks
from procgroup.process import log, process_end
from procgroup.rendezvous import hosting
from procgroup.stores.start_up import Member, StartUp, read_members
from procgroup.stores.store import Store
from procgroup.types import Timeout

REPORT_SECONDS = 5.0
"""How often the lowest rank that has come says who is missing."""

_OVER = "rendezvous/over"
_LEAVE_SECONDS = 0.2
_READ_SECONDS = 5.0
# With a short timeout, the ranks look this long before the deadline whether all have joined although the last one has
# not written the verdict, so that time is left to connect.
_CONNECT_SECONDS = 1.0


class JoinedWorld(NamedTuple):
    """A complete round: its number in the store, its members, and a secret that they share.

    ``start_up`` watches the start-up that follows; the caller ends it with ``leave`` or ``report_failure``.
    """

    round: int
    members: tuple[Member, ...]
    key: bytes
    start_up: StartUp

    @property
    def new_ranks(self) -> tuple[int, ...]:
        """The ranks whose processes are new, where others go on from an earlier group."""
        if not any(member.goes_on for member in self.members):
            return ()
        return tuple(member.rank for member in self.members if not member.goes_on)


def join(
    store: Store,
    rank: int,
    world_size: int,
    timeout: Timeout,
    *,
    group: str = "0",
    started: float | None = None,
    goes_on: bool = False,
    say: Callable[[str], None] = log.warning,
) -> JoinedWorld:
    """Come together with the other ranks through ``store``; return when all are there.

    Raises RendezvousConflict when two processes claim one rank or the world sizes differ, RendezvousTimeout
    when ranks are missing after ``timeout`` (timedelta or seconds), RendezvousError when another rank left,
    PeerLost when its process ended. All ranks that are there raise it, and may join again. ``group`` is the group's
    name for errors, ``started`` the time.monotonic() that ``timeout`` counts from; ``goes_on`` says that this process
    was in the group before. ``say`` gets this rank's reports, by default as warnings.
    """
    nonce = secrets.token_hex(8)
    me = Member(rank, world_size, socket.gethostname(), os.getpid(), nonce, store.is_hosted_here(), goes_on)
    limit = types.seconds(timeout)
    deadline = (time.monotonic() if started is None else started) + limit
    host = hosting.host_of(store, max(deadline - time.monotonic(), 0.0))
    start_up = StartUp(store, me, group=group, timeout=limit, deadline=deadline, host=host)
    return _Joining(store, start_up, say).run()


class _Joining:
    def __init__(self, store: Store, start_up: StartUp, say: Callable[[str], None]) -> None:
        self.store = store
        self.start_up = start_up
        self.me = start_up.me
        self.limit = start_up.timeout
        self.say = say
        self.deadline = start_up.deadline
        self.round = -1
        self.why_round_before_ended = ""

    def run(self) -> JoinedWorld:
        try:
            with self.start_up.mapped_store_errors():
                self._claim()
                self._agree_on_world_size()
                self._bounded_store.append(self._key("members"), self.me.line())
                if self._bounded_store.add(self._key("count"), 1) == self.me.size:
                    self._decide(_complete_verdict(self._members()))
                return self._read(self._await_verdict())
        except BaseException as error:
            # A rank that comes when the round before has failed waits here for ranks that are gone.
            if self.why_round_before_ended and isinstance(error, (RendezvousTimeout, PeerLost, StoreLost)):
                error.add_note(f"The ranks that had come before this one did not go on: {self.why_round_before_ended}")
            if not isinstance(error, (RendezvousError, PeerLost, PeerFailed)):
                self._leave(error)
            self.start_up.drop()
            self._stay_for_late_ranks(error)
            raise

    @property
    def _bounded_store(self) -> Store:
        """The store, with requests that end soon after the deadline: its host may stop at any time."""
        return self.store.with_timeout(self.start_up.answer_seconds())

    def _claim(self) -> None:
        """Find the round to be in and claim this rank's place there."""
        self.round = self._bounded_store.add("rendezvous/round", 0)
        if self.round > 0 and self._bounded_store.check([_OVER]):
            self._read(self._bounded_store.get(_OVER))
        while True:
            mine = self.me.line()
            self.start_up.enter(f"rendezvous/{self.round}")
            claimed = self._bounded_store.compare_set(self._key(f"rank/{self.me.rank}"), "", mine)
            holder = claimed.decode(errors="replace")
            if holder == mine:
                if self.round > 0:
                    self._read_round_before()
                return
            if not self._bounded_store.check([self._key("verdict")]):
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
        first = self._bounded_store.compare_set(self._key("world_size"), "", mine).decode(errors="replace")
        size, _, rank = first.partition(" ")
        if size != str(self.me.size):
            text = f"world_size disagreement: rank {self.me.rank} says {self.me.size}, rank {rank} says {size}"
            self._read(self._decide({"kind": "conflict", "text": text}))
            raise RendezvousConflict(text)

    def _decide(self, verdict: dict[str, Any], seconds: float | None = None) -> bytes:
        """Write the verdict unless there is one; return the one that counts. ``seconds``: at most, for each request."""
        limit = self.start_up.answer_seconds() if seconds is None else seconds
        # With the writer's nonce: two ranks that say the same would both count the round, and the next ranks to come
        # would be in different ones.
        text = json.dumps({**verdict, "by": self.me.nonce})
        written = self.store.with_timeout(limit).compare_set(self._key("verdict"), "", text)
        if written == text.encode():
            self.store.with_timeout(limit).add("rendezvous/round", 1)
        return written

    def _await_verdict(self) -> bytes:
        left = self.deadline - time.monotonic()
        pause = min(REPORT_SECONDS, max(left - _CONNECT_SECONDS, left / 2))
        while True:
            left = self.deadline - time.monotonic()
            try:
                return self.start_up.await_key("verdict", min(left, pause))
            except StoreTimeout:
                if time.monotonic() >= self.deadline:
                    return self._time_out()
            except (PeerLost, PeerFailed) as error:
                return self._decide({"kind": "lost", "text": str(error)})
            with contextlib.suppress(StoreTimeout):  # a store that is silent may answer again before the deadline
                members = self._members()
                if len({member.rank for member in members}) == self.me.size:
                    self._decide(_complete_verdict(members))  # the rank that was to do that is stopped
                elif pause == REPORT_SECONDS:
                    self._report(members)
            pause = REPORT_SECONDS

    def _report(self, members: list[Member]) -> None:
        joined = {member.rank: member.host for member in members}
        if self.me.rank == min(joined, default=-1):  # one report is enough: that of rank 0, unless it is missing
            missing = [rank for rank in range(self.me.size) if rank not in joined]
            where = " ".join(f"{rank}@{host}" for rank, host in sorted(joined.items()))
            self.say(f"waiting for {name_ranks(missing)} of {self.me.size} (joined: {where})")

    def _time_out(self) -> bytes:
        members = self._members()
        joined = {member.rank: member.host for member in members}
        missing = [rank for rank in range(self.me.size) if rank not in joined]
        if not missing:
            return self._decide(_complete_verdict(members))
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
        if self.round < 0 or self.start_up.is_store_silent:
            return
        reason = f"{type(error).__name__}: {error}".rstrip(": ")
        with contextlib.suppress(DistError, OSError):
            text = f"rank {self.me.rank} ({self.me.process()}) left: {reason}"
            self._decide({"kind": "left", "text": text}, _LEAVE_SECONDS)

    def _read(self, verdict: bytes) -> JoinedWorld:
        data = json.loads(verdict)
        if data["kind"] == "complete":
            members = tuple(sorted(read_members("".join(data["members"])), key=lambda member: member.rank))
            self.start_up.set_members(members)
            log.debug(f"all {self.me.size} ranks have joined round {self.round}")
            return JoinedWorld(self.round, members, bytes.fromhex(data["key"]), self.start_up)
        if data["kind"] == "timeout":
            raise RendezvousTimeout(
                missing=data["missing"], joined=dict(data["joined"]), size=data["size"], seconds=data["seconds"]
            )
        if data["kind"] == "lost":
            self.start_up.raise_if_lost()
        raise (RendezvousConflict if data["kind"] == "conflict" else RendezvousError)(data["text"])

    def _stay_for_late_ranks(self, error: BaseException) -> None:
        """Let the end of this process, if it hosts the store, tell the ranks that have not come why it has failed."""
        if self.round < 0 or not self.store.is_hosted_here() or not isinstance(error, Exception):
            return
        with contextlib.suppress(DistError):
            has_any = self.store.check([self._key("members")])
            if has_any and len({member.rank for member in self._members()}) >= self.me.size:
                return
            kind = "conflict" if isinstance(error, RendezvousConflict) else "left"
            ended = f"the start has failed at {time.strftime('%H:%M:%S')}, before this rank came: {error}"
            text = json.dumps({"kind": kind, "text": ended, "by": self.me.nonce})
            process_end.stay_for_late_ranks(lambda: self._tell_late_ranks(text))

    def _tell_late_ranks(self, text: str) -> None:
        with contextlib.suppress(DistError):
            self.store.set(_OVER, text)
            # Ranks that have come since the start failed wait in the next round.
            last = self.store.add("rendezvous/round", 0)
            self.store.compare_set(f"rendezvous/{last}/verdict", "", text)

    def _read_round_before(self) -> None:
        """Keep why the round before failed, while the store is there: its host may be one of those that leave."""
        key = f"rendezvous/{self.round - 1}/verdict"
        if self._bounded_store.check([key]):
            with contextlib.suppress(ValueError):
                self.why_round_before_ended = json.loads(self._bounded_store.get(key)).get("text", "")

    def _members(self) -> list[Member]:
        # The store may not answer any more: rank 0, which hosts it, may be stopped.
        seconds = min(self.start_up.answer_seconds(), _READ_SECONDS)
        return read_members(self.store.get(self._key("members"), timeout=seconds).decode(errors="replace"))

    def _key(self, name: str) -> str:
        return f"rendezvous/{self.round}/{name}"


def _complete_verdict(members: list[Member]) -> dict[str, Any]:
    return {"kind": "complete", "members": [member.line() for member in members], "key": secrets.token_hex(32)}
