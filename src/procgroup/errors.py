"""Every exception that procgroup raises.

::

    RuntimeError
    └── DistError                      anything that goes wrong between ranks
        ├── DistBackendError           in a process group
        │   ├── OperationError         in one call: has op, sequence, group, rank, size
        │   │   ├── CollectiveMismatch     the ranks did not make the same call
        │   │   ├── CollectiveTimeout      the deadline passed before every rank arrived
        │   │   ├── Deadlock               ranks wait for each other in a circle
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


class OperationError(DistBackendError):
    """One call on a process group failed on this rank.

    Attributes: ``op`` (name of the operation), ``sequence`` (its number in the group), ``group``
    (the group's name), ``rank`` and ``size`` (this rank in the group, and how many there are).
    """

    def __init__(
        self,
        happened: str,
        *,
        op: str,
        sequence: int,
        group: str,
        rank: int,
        size: int,
        advice: str = "",
    ) -> None:
        self.op = op
        self.sequence = sequence
        self.group = group
        self.rank = rank
        self.size = size
        text = f"{op} #{sequence} on group {group} (rank {rank} of {size}): {happened}"
        super().__init__(f"{text}. {advice}" if advice else text)


class CollectiveMismatch(OperationError):
    """The ranks did not make the same call, or a message is not what its receive expects; no array was changed.

    ``calls`` maps each rank to the description of the call that it made. ``pair`` says, where an all_to_all failed for
    two ranks that do not agree on the piece between them, which ranks and sizes these are; else it is empty.
    """

    def __init__(self, *, calls: Mapping[int, str], pair: str = "", **call: Any) -> None:
        self.calls = dict(calls)
        self.pair = pair
        mine = self.calls[call["rank"]]
        verb = "has" if call["op"] in _HOLDERS else "called"
        others = "; ".join(f"rank {rank} {verb} {text}" for rank, text in sorted(self.calls.items()) if text != mine)
        if call["op"] in ("send", "recv"):
            happened = f"the message is not what was expected; expected {mine}, got: {others}"
            advice = "Send and receive the same dtype and count; no array was changed."
        elif call["op"] in ("new_group", "split_group"):
            happened = f"the ranks make different groups; expected {mine} on every member, got: {others}"
            advice = "Pass the same ranks on every member, and make groups in the same order; no group was made."
        elif call["op"] in _HOLDERS:
            what, advice = _HOLDERS[call["op"]]
            happened = f"the ranks have different {what}; expected {mine} on every rank, got: {others}"
        elif pair:
            happened = f"the ranks do not agree on the size of a piece: {pair}"
            advice = "Let each rank's input split for a rank be that rank's output split for it; no array was changed."
        else:
            happened = f"the ranks made different calls; expected {mine} on every rank, got: {others}"
            advice = "Make the same call with the same op, dtype, count and root on every rank; no array was changed."
        super().__init__(happened, advice=advice, **call)


# What the ranks have to have in common before these calls: its name, and the advice where they have not.
_TREES = ("trees", "Pass the same structure, shapes and dtypes on every rank; nothing was sent.")
_HOLDERS = {
    "average_gradients": _TREES,
    "broadcast_parameters": _TREES,
    "DistributedSampler": (
        "data",
        "Give every rank the same data, seed and epoch, and make the samplers in the same order on every rank.",
    ),
    "communication_hook": ("settings", "Pass the same arguments to the hook's state on every rank; nothing was sent."),
    "OuterSteps": ("outer steps", "Begin with the same parameters and arguments on every rank; nothing was changed."),
}


class CollectiveTimeout(OperationError):
    """The deadline passed before every rank arrived. ``missing`` lists the ranks, ``seconds`` the limit.

    For a call that still waited for an earlier one they are those that the earlier one waits for. ``missing`` is empty
    for a receive from any rank, and where the earlier call is another thread's.
    """

    def __init__(self, *, missing: Sequence[int], seconds: float, **call: Any) -> None:
        self.missing = tuple(missing)
        self.seconds = seconds
        awaited = _ranks(self.missing) if self.missing else "a message from any rank, or for an earlier call to end"
        super().__init__(
            f"not complete after {seconds:g} s; still waiting for {awaited}",
            advice="See what those ranks are doing, or pass a longer timeout than that.",
            **call,
        )


class Deadlock(OperationError):
    """Ranks wait for each other in a circle, so that none of them could ever go on.

    ``waits`` maps the global rank of each of them to what it is in: "recv from 1".
    """

    def __init__(self, *, waits: Mapping[int, str], **call: Any) -> None:
        self.waits = dict(waits)
        super().__init__(
            "deadlock: " + ", ".join(f"rank {rank} in {wait}" for rank, wait in self.waits.items()),
            advice="Let one of these ranks make its other call first, or use isend and irecv.",
            **call,
        )


class PeerLost(OperationError):
    """The process of a rank ended. ``peer`` is its rank in the group, ``pid`` its process, ``how`` what is known."""

    def __init__(self, *, peer: int, pid: int, how: str, **call: Any) -> None:
        self.peer = peer
        self.pid = pid
        self.how = how
        super().__init__(
            f"lost rank {peer} (pid {pid}): {how}",
            advice="An array that this call was writing in place may be half done. "
            "Look at that rank's own output for the cause.",
            **call,
        )


class PeerFailed(OperationError):
    """A rank left this call with an error of its own. ``peer`` is its rank, ``reason`` what it said."""

    def __init__(self, *, peer: int, reason: str, **call: Any) -> None:
        self.peer = peer
        self.reason = reason
        super().__init__(
            f"rank {peer} gave up: {reason}",
            advice=f"Look at rank {peer}'s own error for the cause.",
            **call,
        )


class GroupBroken(OperationError):
    """The group has ended on this rank: it failed, was aborted or was left. ``reason`` says which."""

    def __init__(self, *, reason: str, **call: Any) -> None:
        self.reason = reason
        super().__init__(
            f"this group has ended: {reason}",
            advice="Destroy the group and make a new one.",
            **call,
        )


class ObjectError(DistBackendError):
    """An object could not be moved; the ranks are in step, and the group can still be used.

    Attributes: ``op``, ``group``, ``rank``, ``size``, ``source`` (the group rank whose object it is) and ``reason``.
    """

    def __init__(
        self, happened: str, *, op: str, group: str, rank: int, size: int, source: int, reason: str, advice: str
    ) -> None:
        self.op = op
        self.group = group
        self.rank = rank
        self.size = size
        self.source = source
        self.reason = reason
        super().__init__(f"{op} on group {group} (rank {rank} of {size}): {happened}: {reason}. {advice}")


class PicklingFailed(ObjectError):
    """A rank could not pickle its object. That rank raises the error itself, the others this."""

    def __init__(self, *, source: int, **call: Any) -> None:
        super().__init__(
            f"rank {source} could not pickle its object",
            source=source,
            advice=f"No object was received; look at rank {source}'s own error.",
            **call,
        )


class UnpicklingFailed(ObjectError):
    """This rank could not unpickle what a rank sent; ``kind`` is the name of the object's type. See ``__cause__``."""

    def __init__(self, *, source: int, kind: str, **call: Any) -> None:
        self.kind = kind
        super().__init__(
            f"cannot unpickle the {kind} of rank {source}",
            source=source,
            advice="Make its type importable on this rank, or send plain data.",
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
            "Call init_process_group again, and let go of the old group."
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
        self.keys = tuple(keys)
        self.seconds = seconds
        self.what = what
        names = ", ".join(f"/{key}" for key in self.keys) if what == "wait" else ", ".join(self.keys)
        label = "keys" if what == "wait" else "key"
        super().__init__(f"{what} timeout after {round(seconds * 1000)}ms, {label}: {names}")


class StoreLost(DistStoreError):
    """The store's server is gone. ``host`` and ``port`` say which."""

    def __init__(self, *, host: str, port: int, reason: str) -> None:
        self.host = host
        self.port = port
        super().__init__(f"lost the store at {host}:{port}: {reason}. Look at the process that hosts it.")


class StoreLimitError(DistStoreError):
    """A key or value is larger than the store takes. Nothing was stored."""

    def __init__(self, *, what: str, size: int, limit: int) -> None:
        self.size = size
        self.limit = limit
        super().__init__(f"{what} of {size} bytes is larger than the limit of {limit} bytes")


class RendezvousError(DistError):
    """The ranks could not find each other."""


class RendezvousTimeout(RendezvousError):
    """Some ranks never came. ``missing`` lists them; ``joined`` maps the others to where they joined from."""

    def __init__(self, *, missing: Sequence[int], joined: Mapping[int, str], size: int, seconds: float) -> None:
        self.missing = tuple(missing)
        self.joined = dict(joined)
        self.size = size
        self.seconds = seconds
        where = ", ".join(f"{rank}@{place}" for rank, place in sorted(self.joined.items())) or "none"
        super().__init__(
            f"rendezvous not complete after {seconds:g} s: still missing {_ranks(self.missing)} of {size} "
            f"(joined: {where}). Start the missing ranks with the same address and world size."
        )


class RendezvousConflict(RendezvousError):
    """Two processes claim one rank, or the ranks disagree on the world size."""


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else "ranks " + ", ".join(map(str, ranks))


_OPERATION_ERRORS: dict[str, type[OperationError]] = {
    "mismatch": CollectiveMismatch,
    "timeout": CollectiveTimeout,
    "deadlock": Deadlock,
    "lost": PeerLost,
    "failed": PeerFailed,
    "broken": GroupBroken,
}


def from_native(kind: str, data: Mapping[str, Any]) -> DistError:
    """Build the exception for a failure that the native engine reports as data."""
    return _OPERATION_ERRORS[kind](**data)
