"""Every exception that procgroup raises.

::

    RuntimeError
    └── DistError                      anything that goes wrong between ranks
        ├── DistBackendError           in a process group
        │   ├── OperationError         in one call: has op, sequence, group, rank, size
        │   │   ├── CollectiveMismatch     the ranks did not make the same call
        │   │   ├── CollectiveTimeout      the deadline passed before every rank arrived
        │   │   ├── Deadlock               ranks wait for each other in a cycle
        │   │   ├── PeerLost               a rank's process ended
        │   │   ├── PeerFailed             a rank left this call with an error of its own
        │   │   └── GroupBroken            the group has failed, was aborted or was left
        │   ├── ObjectError            an object could not be moved; the group can still be used
        │   │   ├── PicklingFailed         a rank could not pickle its object
        │   │   └── UnpicklingFailed       this rank could not unpickle what a rank sent
        │   ├── WaitTimeout            wait(timeout) ended before the call did; the call goes on
        │   ├── GroupDestroyed         a group was used after destroy_process_group
        │   └── ForkedProcessError     a group was used in a forked child
        ├── DistNetworkError           a connection could not be made
        ├── DistStoreError             in a key-value store
        │   ├── QueueEmptyError        queue_pop(block=False) found nothing
        │   ├── StoreTimeout           the deadline passed before the keys were there
        │   ├── StoreLost              the store's server is gone
        │   └── StoreLimitError        a key or value is larger than the store takes
        └── RendezvousError            while ranks find each other
            ├── IncompleteEnvironment  env:// lacks variables; says what started this process, and what to write
            ├── RendezvousTimeout      some ranks never came; names them
            └── RendezvousConflict     two ranks claim one place, or disagree on the world size

    ValueError, RuntimeError
    └── ArgumentError                  an array or list that does not fit its call

Each is built from data and keeps it as attributes; the text follows from the data.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


class DistError(RuntimeError):
    """Anything that goes wrong between ranks."""


class DistBackendError(DistError):
    """A process group could not do what it was asked."""


class ArgumentError(ValueError, RuntimeError):
    """An array, list or number that does not fit its call: nothing was sent, and the group can go on.

    torch.distributed raises RuntimeError for most of these.
    """


class _CallError(DistBackendError):
    """What the errors of one call on a group have in common: which call it was, and this rank's place in the group."""

    def __init__(
        self, text: str, *, op: str, group: str, rank: int, size: int, members: Sequence[int] = (), number: str = ""
    ) -> None:
        self.op = op
        self.group = group
        self.rank = rank
        self.size = size
        self.members: tuple[int, ...] = tuple(members or range(size))
        self.global_rank: int = self.members[rank]
        also = "" if self.global_rank == rank else f"; global rank {self.global_rank}"
        super().__init__(f"{op}{number} on group {group} (rank {rank} of {size}{also}): {text}")


class OperationError(_CallError):
    """One call on a process group failed on this rank.

    Attributes: ``op`` (name of the operation), ``sequence`` (its number in the group), ``group``
    (the group's name), ``rank`` and ``size`` (this rank in the group, and how many there are), ``members`` (the global
    rank of each group rank) and ``global_rank`` (this rank's). Texts name global ranks, and group ranks where those are
    others. ``intact`` tells whether the array that this call writes is as it was: False when it may be half done, None
    for calls that write none, and where that is not known.
    """

    def __init__(
        self, happened: str, *, sequence: int, intact: bool | None = None, advice: str = "", **call: Any
    ) -> None:
        self.intact = intact
        self.sequence = sequence
        super().__init__(f"{happened}. {advice}" if advice else happened, number=f" #{sequence}", **call)


class CollectiveMismatch(OperationError):
    """The ranks did not make the same call, or a message is not what its receive expects; no array was changed.

    ``calls`` maps each rank to the description of the call that it made. ``pair`` names the two ranks
    and their sizes where an all_to_all failed because they do not agree on the block between them; else it is empty.
    Where the ranks hold different things rather than make different calls, ``differing`` names what, with ``advice``.
    """

    def __init__(
        self, *, calls: Mapping[int, str], pair: str = "", differing: str = "", advice: str = "", **call: Any
    ) -> None:
        self.calls: dict[int, str] = dict(calls)
        self.pair = pair
        did, happened = "has", f"the ranks have different {differing}"
        if not differing:
            did = "called"
            happened, advice = _MISMATCHES.get(call["op"]) or (_DIFFERENT_BLOCKS if pair else _DIFFERENT_CALLS)
        mine = self.calls[call["rank"]]
        others = [f"{_name(rank, call)} {did} {text}" for rank, text in sorted(self.calls.items()) if text != mine]
        shown = pair or ", ".join([f"this rank {did} {mine}", *others])
        super().__init__(f"{happened}: {shown}", advice=advice, **call)


_DIFFERENT_CALLS = (
    "the ranks made different calls",
    "Make the same call with the same op, dtype, count and root on every rank; no array was changed.",
)
_DIFFERENT_BLOCKS = (
    "the ranks do not agree on the size of a block",
    "Give rank r, in its output split for rank s, the size that rank s gives in its input split for rank r; "
    "no array was changed.",
)
_DIFFERENT_MESSAGES = (
    "the message is not what was expected",
    "Send and receive the same dtype and count; no array was changed.",
)
_DIFFERENT_GROUPS = (
    "the ranks make different groups",
    "Pass the same ranks on every member, and make groups in the same order; no group was made.",
)
_MISMATCHES = {"send": _DIFFERENT_MESSAGES, "recv": _DIFFERENT_MESSAGES}
_MISMATCHES |= {"new_group": _DIFFERENT_GROUPS, "split_group": _DIFFERENT_GROUPS}


class CollectiveTimeout(OperationError):
    """The deadline passed before every rank arrived. ``missing`` lists the ranks, ``seconds`` the limit.

    ``global_missing`` has their global ranks. ``calls`` maps the first of the missing ranks to what each was doing
    then, as far as this rank could see: "in recv of 4 float64 from rank 0 (call #3)", "in no call for 12 s".
    For a call that still waited for an earlier one they are those that the earlier one waits for. ``missing`` is empty
    for a receive from any rank, and where the earlier call is another thread's.
    """

    def __init__(
        self, *, missing: Sequence[int], seconds: float, calls: Mapping[int, str] | None = None, **call: Any
    ) -> None:
        self.missing: tuple[int, ...] = tuple(missing)
        self.global_missing: tuple[int, ...] = tuple(_global(rank, call) for rank in self.missing)
        self.seconds = seconds
        self.calls: dict[int, str] = dict(calls or {})
        awaited = "a message from any rank, or for an earlier call to end"
        if self.missing:
            awaited = _names(self.missing, call)
        doing = "; ".join(f"{_name(rank, call)} is {text}" for rank, text in self.calls.items())
        super().__init__(
            f"not complete after {_rounded(seconds)} s; still waiting for {awaited}{': ' if doing else ''}{doing}",
            # PyTorch's own tests look for the word "timeout" between two spaces.
            advice=f"{_state_of_array(call)}See what those ranks are doing, or pass a longer timeout than that.",
            **call,
        )


class Deadlock(OperationError):
    """Ranks wait for each other in a cycle, so that none of them could ever go on.

    ``waits`` maps the global rank of each of them to what it is in: "recv from 1". All ranks in it are global ranks.
    """

    def __init__(self, *, waits: Mapping[int, str], **call: Any) -> None:
        self.waits: dict[int, str] = dict(waits)
        super().__init__(
            "deadlock: " + ", ".join(f"rank {rank} in {wait}" for rank, wait in self.waits.items()),
            advice="Let one of these ranks make its other call first, or use isend and irecv.",
            **call,
        )


class PeerLost(OperationError):
    """A rank has ended: its process, or its part in the group.

    ``peer`` is its rank in the group, ``global_peer`` its global rank, ``pid`` its process, ``host`` the name of its
    host where that is another one, ``how`` what is known.
    """

    def __init__(self, *, peer: int, pid: int, how: str, host: str = "", **call: Any) -> None:
        self.peer = peer
        self.global_peer: int = _global(peer, call)
        self.pid = pid
        self.host = host
        self.how = how
        super().__init__(
            f"lost {_name(peer, call)} (pid {pid}{host and f' on {host}'}): {how}",
            advice=f"{_state_of_array(call)}Look at that rank's own output for the cause.",
            **call,
        )


class PeerFailed(OperationError):
    """A rank left this call with an error of its own, aborted its group, or its program ended with an exception.

    ``peer`` is its rank in the group, ``global_peer`` its global rank, ``reason`` the cause in words: of an exception
    its type, text and line. ``cause`` is what failed there: "error" (an exception, or a breach of the protocol),
    "timeout", "mismatch", "interrupted", "aborted", "deadlock". Of a timeout, ``missing`` has the group ranks that had
    not come, and ``seconds`` its length.
    """

    def __init__(
        self,
        *,
        peer: int,
        reason: str,
        cause: str = "error",
        missing: Sequence[int] = (),
        seconds: float = 0.0,
        **call: Any,
    ) -> None:
        self.peer = peer
        self.global_peer: int = _global(peer, call)
        self.reason = reason
        self.cause = cause
        self.missing: tuple[int, ...] = tuple(missing)
        self.seconds = seconds
        super().__init__(
            f"{_name(peer, call)} failed: {reason}",
            advice=f"{_state_of_array(call)}Look at rank {self.global_peer}'s own error for the cause.",
            **call,
        )


class GroupBroken(OperationError):
    """The group has ended on this rank: it failed, was aborted or was left. ``reason`` says which."""

    def __init__(self, *, reason: str, **call: Any) -> None:
        self.reason = reason
        super().__init__(f"this group has ended: {reason}", advice="Destroy the group and make a new one.", **call)


class ObjectError(_CallError):
    """An object could not be moved; the ranks are in step, and the group can still be used.

    Attributes: ``op``, ``group``, ``rank``, ``size``, ``members``, ``global_rank``, ``source`` (the group rank whose
    object it is), ``global_source`` and ``reason``.
    """

    def __init__(self, happened: str, *, source: int, reason: str, advice: str, **call: Any) -> None:
        super().__init__(f"{happened}: {reason}. {advice}", **call)
        self.source = source
        self.global_source: int = self.members[source]
        self.reason = reason


class PicklingFailed(ObjectError):
    """A rank could not pickle its object. That rank raises the error itself, the others this."""

    def __init__(self, *, source: int, **call: Any) -> None:
        super().__init__(
            f"{_name(source, call)} could not pickle its object",
            source=source,
            advice=f"No object was received; look at rank {_global(source, call)}'s own error.",
            **call,
        )


class UnpicklingFailed(ObjectError):
    """This rank could not unpickle what a rank sent; ``kind`` is the name of the object's type. See ``__cause__``."""

    def __init__(self, *, source: int, kind: str, safe: bool = False, **call: Any) -> None:
        self.kind = kind
        mending = "trust the sender with safe=False" if safe else "make its type importable on this rank"
        super().__init__(
            f"cannot unpickle the {kind} of {_name(source, call)}",
            source=source,
            advice=f"Send dicts, lists, numbers, strings and arrays, or {mending}.",
            **call,
        )


class WaitTimeout(DistBackendError):
    """``Work.wait(timeout)`` ended before the call did, which goes on. Has ``op`` and ``seconds``."""

    def __init__(self, *, op: str, where: str, seconds: float) -> None:
        self.op = op
        self.seconds = seconds
        super().__init__(
            f"{op} on {where}: not complete after waiting {seconds:g} s. The call goes on: wait again, "
            "and leave its arrays alone until then."
        )


class GroupDestroyed(DistBackendError, ValueError):
    """A group was used after it was destroyed."""

    def __init__(self, group: str) -> None:
        self.group = group
        super().__init__(
            f"Invalid process group specified: group {group} has been destroyed. "
            "Call init_process_group again, and use the group that it makes."
        )


class ForkedProcessError(DistBackendError):
    """A process group was used in a forked child, which shares no connection with the other ranks."""

    def __init__(self, what: str) -> None:
        super().__init__(
            f"{what} was used in a forked child of the process that made it; "
            "call init_process_group in the child, or use only arrays there."
        )


class DistNetworkError(DistError):
    """A connection could not be made."""


class DistStoreError(DistError):
    """A key-value store could not do what it was asked."""


class QueueEmptyError(DistStoreError):
    """``queue_pop(block=False)`` found nothing."""


class StoreTimeout(DistStoreError):
    """The deadline passed before the keys were there.

    ``keys`` are all that were waited for, ``seconds`` the limit, ``what`` the operation.
    """

    def __init__(self, *, keys: Sequence[str], seconds: float, what: str = "wait") -> None:
        self.keys: tuple[str, ...] = tuple(keys)
        self.seconds = seconds
        self.what = what
        names = ", ".join(f"/{key}" for key in self.keys) if what == "wait" else ", ".join(self.keys)
        label = "keys" if what == "wait" else "key"
        super().__init__(f"{what} timeout after {round(seconds * 1000)}ms, {label}: {names}")


class StoreLost(DistStoreError):
    """The store's server is gone. ``host`` and ``port`` say which, ``reason`` how that was seen."""

    def __init__(self, *, host: str, port: int, reason: str) -> None:
        self.host = host
        self.port = port
        self.reason = reason
        super().__init__(f"lost the store at {host}:{port}: {reason}. Look at the process that hosts it.")


class StoreLimitError(DistStoreError):
    """A key or value is larger than the store takes. Nothing was stored."""

    def __init__(self, *, what: str, size: int, limit: int) -> None:
        self.size = size
        self.limit = limit
        super().__init__(f"{what} of {size} bytes is larger than the limit of {limit} bytes")


class RendezvousError(DistError):
    """The ranks could not find each other."""


class IncompleteEnvironment(RendezvousError, ValueError):
    """The environment does not say which rank this is, or where the ranks meet.

    ``missing`` lists the variables that env:// lacks, ``found`` maps the others to what the environment or an argument
    says, ``launcher`` names the launcher that was detected, or is "".
    """

    def __init__(self, *, missing: Sequence[str], found: Mapping[str, str], launcher: str, advice: str) -> None:
        self.missing: tuple[str, ...] = tuple(missing)
        self.found: dict[str, str] = dict(found)
        self.launcher = launcher
        also = f" (also missing: {', '.join(self.missing[1:])})" if self.missing[1:] else ""
        shown = ", ".join(f"{name}={value}" for name, value in self.found.items())
        super().__init__(
            "Error initializing procgroup using env:// rendezvous: environment variable "
            f"{self.missing[0]} expected, but not set{also}; already set: {shown or 'none of them'}. {advice}"
        )


class RendezvousTimeout(RendezvousError):
    """Some ranks never came. ``missing`` lists them; ``joined`` maps the others to where they joined from."""

    def __init__(self, *, missing: Sequence[int], joined: Mapping[int, str], size: int, seconds: float) -> None:
        self.missing: tuple[int, ...] = tuple(missing)
        self.joined: dict[int, str] = dict(joined)
        self.size = size
        self.seconds = seconds
        where = ", ".join(f"{rank}@{place}" for rank, place in sorted(self.joined.items())) or "none"
        super().__init__(
            f"rendezvous not complete after {seconds:g} s: still missing {name_ranks(self.missing)} of {size} "
            f"(joined: {where}). Start the missing ranks with the same address and world size."
        )


class RendezvousConflict(RendezvousError):
    """Two processes claim one rank, or the ranks disagree on the world size."""


def _global(rank: int, call: Mapping[str, Any]) -> int:
    """Return the global rank of a group rank of the group that a call was made on."""
    members = call.get("members")
    return int(members[rank]) if members else rank


def _name(rank: int, call: Mapping[str, Any]) -> str:
    """Return "rank 1", or "rank 3 (rank 1 of group 2)" where the two differ."""
    return _names([rank], call)


def _names(ranks: Sequence[int], call: Mapping[str, Any]) -> str:
    """Return "ranks 1, 2", or "ranks 3, 5 (ranks 1, 2 of group 2)" where they differ."""
    found = [_global(rank, call) for rank in ranks]
    return name_ranks(found) + ("" if found == list(ranks) else f" ({name_ranks(ranks)} of group {call['group']})")


def _state_of_array(call: Mapping[str, Any]) -> str:
    intact = call.get("intact")
    if intact is None:
        return ""
    return "No array was changed. " if intact else "The array that this call writes may be half done. "


def _rounded(seconds: float) -> str:
    """Three digits: what a part of a call has left of the timeout that was passed is no round number."""
    return f"{float(f'{seconds:.3g}'):g}"


def name_ranks(ranks: Sequence[int]) -> str:
    """Return "rank 1" or "ranks 1, 2"."""
    return f"rank {ranks[0]}" if len(ranks) == 1 else "ranks " + ", ".join(map(str, ranks))


_OPERATION_ERRORS: dict[str, type[OperationError]] = {
    "mismatch": CollectiveMismatch,
    "timeout": CollectiveTimeout,
    "deadlock": Deadlock,
    "lost": PeerLost,
    "error": PeerFailed,
    "broken": GroupBroken,
    "interrupted": GroupBroken,
    "aborted": GroupBroken,
}


def from_native(kind: str, data: Mapping[str, Any]) -> DistError:
    """Build the exception for a failure that the native engine reports as data."""
    return _OPERATION_ERRORS[kind](**data)
