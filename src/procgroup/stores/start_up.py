"""The start of a group through a store: waits that end when a rank is lost, and errors that name ranks.

The ranks of a new group wait for each other's keys. A rank that has ended never writes its key. So the store sets the
key ``lost`` when the process of a rank ends, and every wait for keys is also a wait for ``lost``::

    enter           let the store set "lost" to this rank's record when its connection ends    set_on_disconnect
    exchange        set this rank's key, and wait for those of all ranks, or "lost"             set, get_unless
    report_failure  set "lost" to this rank's record and the reason why its start failed        compare_set
    leave           withdraw the record: this rank's end no longer concerns the start           OnDisconnect.withdraw

The first record counts, so all ranks name the same lost rank. Stores other than TCPStore do not notice the end of a
process, but carry the record of ``report_failure``; with them, a rank that was killed is named at the deadline, by the
key that it has not written. When the store itself is lost, so is the rank whose process hosts it.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

from procgroup.errors import (
    CollectiveTimeout,
    DistError,
    DistNetworkError,
    DistStoreError,
    OperationError,
    PeerFailed,
    PeerLost,
    Refused,
    StoreLost,
    StoreTimeout,
)
from procgroup.process import process_end
from procgroup.stores.prefix import PrefixStore
from procgroup.stores.store import OnDisconnect, Store

_LOST = "lost"
_OP = "init_process_group"
# A rank raises at most 0.5 s after the deadline, or 0.7 s after it where the server of a TCPStore stopped during a
# request that does not wait: its client takes 0.3 s to give up a request that a silent server does not answer.

# How long a rank waits for the records of a stage that the others ended at the deadline.
_GRACE_SECONDS = 0.3
# How long after the deadline the store may answer, and how long each request may take then.
_ANSWER_SECONDS = 0.4
_LATE_REQUEST_SECONDS = 0.1
# How long the store may take to answer when this rank reports its failure.
_REPORT_SECONDS = 0.5
_MAX_REASON = 2000
_MAX_SHOWN = 8
_MAX_HOST = 256


class Member(NamedTuple):
    """One rank that joined: its rank, the world size that it was given, its host and process, and a random nonce.

    ``hosts_store`` is whether the store ends with its process, ``goes_on`` whether its process was in the job's group
    before, and has what was computed there.
    """

    rank: int
    size: int
    host: str
    pid: int
    nonce: str
    hosts_store: bool = False
    goes_on: bool = False

    def line(self) -> str:
        return json.dumps(self._asdict()) + "\n"

    def process(self) -> str:
        return f"{self.host} pid {self.pid}"


def read_members(text: str) -> list[Member]:
    """Parse members' lines. Other lines are left out: other programs may have written to the key."""
    return [member for line in text.splitlines() if (member := read_member(line)) is not None]


def read_member(line: str) -> Member | None:
    """Parse one member's line; return None for another line."""
    try:
        fields = json.loads(line)
        return Member(
            int(fields["rank"]),
            int(fields["size"]),
            str(fields["host"])[:_MAX_HOST],
            int(fields["pid"]),
            str(fields["nonce"]),
            bool(fields.get("hosts_store", False)),
            bool(fields.get("goes_on", False)),
        )
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError, AttributeError):
        return None


class StartUp:
    """The start of a group on one rank, with the group's keys below a prefix in ``store``.

    ``timeout`` is the time in seconds that errors show, ``deadline`` the time.monotonic() at which it ends. ``host`` is
    the member whose process hosts the store (None: not known yet).
    """

    def __init__(
        self, store: Store, me: Member, *, group: str, timeout: float, deadline: float, host: Member | None = None
    ) -> None:
        self.me = me
        self.timeout: float = timeout
        self.deadline: float = deadline
        self._whole_store = store
        self._prefix = ""
        self._group = group
        self._host = host
        self._members: dict[int, Member] = {}
        self._on_disconnect: OnDisconnect | None = None
        self._began = deadline - timeout
        self.is_store_silent: bool = False

    @property
    def store(self) -> Store:
        """The store below the prefix; its requests end at the deadline, and take little time after it."""
        return PrefixStore(self._prefix, self._whole_store.with_timeout(max(self.left(), _LATE_REQUEST_SECONDS)))

    def left(self) -> float:
        """Return the seconds until the deadline."""
        return self.deadline - time.monotonic()

    def answer_seconds(self) -> float:
        """Return how long the store may take to answer: until a little after the deadline. Then it counts as silent."""
        return max(self.left() + _ANSWER_SECONDS, _LATE_REQUEST_SECONDS)

    def enter(self, prefix: str) -> None:
        """Begin, or begin again below another prefix; from now on the other ranks detect the end of this process."""
        self.leave()
        self._prefix = prefix
        store = self._whole_store.with_timeout(self.answer_seconds())
        with self.mapped_store_errors():
            try:
                self._on_disconnect = store.set_on_disconnect(f"{prefix}/{_LOST}", self._record(""))
            except DistNetworkError:
                # If the store answers, it is this process, or the number of connections, that allows no other one.
                self._whole_store.with_timeout(self.answer_seconds()).check([f"{prefix}/{_LOST}"])
                raise

    def set_members(self, members: Sequence[Member]) -> None:
        """Set the members of the group, one for each rank."""
        self._members = {member.rank: member for member in members}
        self._host = next((member for member in members if member.hosts_store), self._host)
        self._whole_store.name_users({member.pid: f"rank {member.rank} ({member.process()})" for member in members})

    def limit_connecting(self, timeout: float, seconds: float) -> None:
        """Let the start of the ranks that have met end ``seconds`` from now, or ``timeout`` seconds after it began.

        What comes first counts. If the ranks had longer than ``timeout`` to meet, they have as long to connect.
        """
        self.timeout = max(self.timeout, timeout)
        self.deadline = self._began + self.timeout
        if seconds < self.left():
            self.timeout = seconds
            self.deadline = time.monotonic() + seconds

    def leave(self) -> None:
        """End this rank's part: the end of its process no longer fails the start. Idempotent."""
        on_disconnect, self._on_disconnect = self._on_disconnect, None
        if on_disconnect is not None:
            with suppress(DistError):
                on_disconnect.withdraw()

    def report_failure(self, error: BaseException) -> None:
        """End the waits of all ranks with this rank's error, if the store still answers; then leave."""
        reason = f"{type(error).__name__}: {error}".rstrip(": ")[:_MAX_REASON]
        missing = list(error.missing) if isinstance(error, CollectiveTimeout) else []
        if not self.is_store_silent:
            with suppress(DistError, OSError):
                store = self._whole_store.with_timeout(_REPORT_SECONDS)
                store.compare_set(f"{self._prefix}/{_LOST}", "", self._record(reason, missing))
        self.drop()

    def drop(self) -> None:
        """End this rank's part after an error that the other ranks have, too. Idempotent."""
        process_end.note_failure(starting=True)
        on_disconnect, self._on_disconnect = self._on_disconnect, None
        if on_disconnect is not None:
            on_disconnect.close()

    def await_key(self, key: str, seconds: float) -> bytes:
        """Return a key's value. Raises StoreTimeout; PeerLost or PeerFailed for another rank."""
        found = self.store.get_unless([key], _LOST, max(seconds, 0.001))
        if isinstance(found, bytes):
            raise self._error_of(found)
        return found[0]

    def exchange(self, stage: str, value: str) -> list[bytes]:
        """Publish a value, and return those of all ranks once every rank has published one. Raises as ``gather``."""
        with self.mapped_store_errors():
            self.store.set(f"{stage}/{self.me.rank}", value)
        return self.gather(stage)

    def agree(self, stage: str, problem: str | None) -> str | None:
        """Publish the outcome of a stage; return the first problem of any rank, or None. Raises as ``gather``.

        Ranks that are still in the stage find a problem at ``stage/failed``, see ``raise_if_failed``.
        """
        if problem is not None:
            with self.mapped_store_errors():
                self.store.set(f"{stage}/failed", f"rank {self.me.rank}: {problem}")
        outcomes = self.exchange(f"{stage}/verdict", problem or "")
        return next((f"rank {rank}: {text.decode()}" for rank, text in enumerate(outcomes) if text), None)

    def raise_if_failed(self, stage: str) -> None:
        """Raise Refused when another rank has a problem with the stage, PeerLost or PeerFailed when one is lost."""
        self.raise_if_lost()
        with self.mapped_store_errors():
            if self.store.check([f"{stage}/failed"]):
                raise Refused(self.store.get(f"{stage}/failed").decode())

    def gather(self, stage: str) -> list[bytes]:
        """Return the values of ``stage/rank`` for all ranks.

        Raises PeerLost, PeerFailed, and CollectiveTimeout, which names the ranks whose keys are missing.
        """
        keys = [f"{stage}/{rank}" for rank in range(self.me.size)]
        with self.mapped_store_errors():
            try:
                found = self.store.get_unless(keys, _LOST, max(self.left(), _GRACE_SECONDS))
            except StoreTimeout:
                store = self.store.with_timeout(self.answer_seconds())
                missing = [rank for rank, key in enumerate(keys) if not store.check([key])]
                if missing:
                    raise self._timeout(missing) from None
                found = self.store.multi_get(keys, self.answer_seconds())
        if isinstance(found, bytes):
            raise self._error_of(found)
        return found

    def raise_if_lost(self) -> None:
        """Raise PeerLost or PeerFailed when a rank is known to be lost."""
        with self.mapped_store_errors():
            if self.store.check([_LOST]):
                raise self._error_of(self.store.get(_LOST))

    @contextmanager
    def mapped_store_errors(self) -> Iterator[None]:
        """Map errors of a store that has ended or is silent to errors that name the rank whose process hosts it."""
        try:
            yield
        except StoreLost as error:
            if self._host is None or self._host.rank == self.me.rank:
                error.add_note(f"Rank {self.me.rank} of {self.me.size} was in {_OP}.")
                raise
            raise self._peer_lost(self._host, "which hosts the store") from error
        except StoreTimeout as error:
            raise self._silence() from error

    def _silence(self) -> DistError:
        """Return the error for a store that does not answer although its connections have not ended."""
        self.is_store_silent = True
        if self._host is None:
            return DistStoreError(
                f"{_OP} (rank {self.me.rank} of {self.me.size}): the store has not answered within "
                f"{self.timeout:g} s. See what the process that hosts it is doing; it may be stopped."
            )
        error = self._timeout([self._host.rank])
        error.add_note(f"The process of rank {self._host.rank} hosts the store, which does not answer.")
        return error

    def _timeout(self, missing: Sequence[int]) -> CollectiveTimeout:
        members = [self._members[rank] for rank in missing[:_MAX_SHOWN] if rank in self._members]
        calls = {member.rank: f"process {member.pid} on host {member.host}" for member in members}
        return CollectiveTimeout(missing=missing, seconds=self.timeout, calls=calls, **self._call())

    def _record(self, reason: str, missing: Sequence[int] = ()) -> str:
        return json.dumps({"member": self.me.line(), "reason": reason, "missing": list(missing)})

    def _error_of(self, record: bytes) -> DistError:
        """Return the error for the record at ``lost``, which any client may have written."""
        try:
            fields = json.loads(record)
            member, reason = read_member(fields["member"]), str(fields["reason"])[:_MAX_REASON]
            missing = [rank for rank in range(self.me.size) if rank in fields["missing"]]
        except (ValueError, TypeError, KeyError, RecursionError):
            member, reason, missing = None, "", []
        if member is None or not 0 <= member.rank < self.me.size:
            return DistStoreError(
                f"{_OP} (rank {self.me.rank} of {self.me.size}): the store says that a rank has left, in a record that "
                "no rank of this job wrote. Something else writes to it: give each job a store or port of its own."
            )
        if missing and self.me.rank not in missing:
            return self._timeout(missing)
        if reason:
            where = f"{reason} ({member.process()})"
            return PeerFailed(peer=member.rank, reason=where, **self._call())
        return self._peer_lost(member)

    def _peer_lost(self, member: Member, detail: str = "") -> OperationError:
        detail = f", {detail}," if detail else ""
        how = f"its process on host {member.host}{detail} ended before every rank had made the group"
        return PeerLost(peer=member.rank, pid=member.pid, how=how, **self._call())

    def _call(self) -> dict[str, Any]:
        return {"op": _OP, "sequence": 0, "group": self._group, "rank": self.me.rank, "size": self.me.size}
