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
        │   └── Refused, CutShort      by a process that is no rank of this job; in the middle of the handshake
        ├── DistStoreError             in a key-value store
        │   ├── QueueEmptyError        queue_pop(block=False) found nothing
        │   ├── StoreTimeout           the deadline passed before the keys were there
        │   ├── StoreLost              the store's server is gone
        │   └── StoreLimitError        a key or value is larger than the store takes
        ├── RendezvousError            while ranks find each other
        │   ├── IncompleteEnvironment      env:// lacks variables; says what started this process, and what to write
        │   ├── RendezvousTimeout          some ranks never came; names them
        │   └── RendezvousConflict         two ranks claim one place, or disagree on the world size
        └── ModelMismatch, BackwardFailed, GraphChanged, InputsExhausted, RanksApart: in data-parallel training

    ValueError, RuntimeError
    └── ArgumentError                  an array or list that does not fit its call

    Exception
    └── ProcessException               a spawned process failed
        └── ProcessRaisedException, ProcessExitedException: its function raised; it ended without an exception

Each is built from data and keeps it as attributes; the text follows from the data.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from procgroup import failure_text
from procgroup.failure_text import global_rank, name_rank, state_of_array


class DistError(RuntimeError):
    """Anything that goes wrong between ranks."""


class DistBackendError(DistError):
    """A process group could not do what it was asked."""


class ArgumentError(ValueError, RuntimeError):
    """An array, list or number that does not fit its call: nothing was sent, and the group can go on.

    torch.distributed raises RuntimeError for most of these.
    """


class _CallError(DistBackendError):
    """An error of one call on a group, with this rank's place in the group."""

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
        happened, advice = failure_text.mismatch(self.calls, pair, differing, advice, call)
        super().__init__(happened, advice=advice, **call)


class CollectiveTimeout(OperationError):
    """The deadline passed before every rank arrived. ``missing`` lists the ranks, ``seconds`` the limit.

    ``global_missing`` has their global ranks. ``calls`` maps the first of the missing ranks to what each was doing
    then, as far as this rank could see: "in recv of 4 float64 from rank 0 (call #3)", "in no call for 12 s".
    For a call that still waited for an earlier one they are those that the earlier one waits for. ``missing`` is empty
    for a receive from any rank, where the earlier call is another thread's, and where another backend moves the data
    and does not name the ranks that it waits for; then ``awaited`` says so.
    """

    def __init__(
        self,
        *,
        missing: Sequence[int],
        seconds: float,
        calls: Mapping[int, str] | None = None,
        awaited: str = "",
        **call: Any,
    ) -> None:
        self.missing: tuple[int, ...] = tuple(missing)
        self.global_missing: tuple[int, ...] = tuple(global_rank(rank, call) for rank in self.missing)
        self.seconds = seconds
        self.calls: dict[int, str] = dict(calls or {})
        self.awaited = awaited
        happened, advice = failure_text.timeout(self.missing, awaited, seconds, self.calls, call)
        super().__init__(happened, advice=advice, **call)


class Deadlock(OperationError):
    """Ranks wait for each other in a cycle, so that none of them could ever go on.

    ``waits`` maps the global rank of each of them to what it is in: "recv from 1". All ranks in it are global ranks.
    """

    def __init__(self, *, waits: Mapping[int, str], **call: Any) -> None:
        self.waits: dict[int, str] = dict(waits)
        happened = "deadlock: " + ", ".join(f"rank {rank} in {wait}" for rank, wait in waits.items())
        advice = "Let one of these ranks make its other call first, or use isend and irecv."
        super().__init__(happened, advice=advice, **call)


class PeerLost(OperationError):
    """A rank has ended: its process, or its part in the group.

    ``peer`` is its rank in the group, ``global_peer`` its global rank, ``pid`` its process, ``host`` the name of its
    host where that is another one, ``how`` what is known.
    """

    def __init__(self, *, peer: int, pid: int, how: str, host: str = "", **call: Any) -> None:
        self.peer = peer
        self.global_peer: int = global_rank(peer, call)
        self.pid = pid
        self.host = host
        self.how = how
        advice = f"{state_of_array(call)}Look at that rank's own output for the cause."
        process = f"(pid {pid}{host and f' on {host}'})"
        super().__init__(f"lost {name_rank(peer, call)} {process}: {how}", advice=advice, **call)


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
        self.global_peer: int = global_rank(peer, call)
        self.reason = reason
        self.cause = cause
        self.missing: tuple[int, ...] = tuple(missing)
        self.seconds = seconds
        advice = f"{state_of_array(call)}Look at rank {self.global_peer}'s own error for the cause."
        super().__init__(f"{name_rank(peer, call)} failed: {reason}", advice=advice, **call)


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
        advice = f"No object was received; look at rank {global_rank(source, call)}'s own error."
        happened = f"{name_rank(source, call)} could not pickle its object"
        super().__init__(happened, source=source, advice=advice, **call)


class UnpicklingFailed(ObjectError):
    """This rank could not unpickle what a rank sent; ``kind`` is the name of the object's type. See ``__cause__``."""

    def __init__(self, *, source: int, kind: str, safe: bool = False, **call: Any) -> None:
        self.kind = kind
        mending = "trust the sender with safe=False" if safe else "make its type importable on this rank"
        advice = f"Send dicts, lists, numbers, strings and arrays, or {mending}."
        happened = f"cannot unpickle the {kind} of {name_rank(source, call)}"
        super().__init__(happened, source=source, advice=advice, **call)


class WaitTimeout(DistBackendError):
    """``Work.wait(timeout)`` ended before the call did, which goes on. Has ``op`` and ``seconds``."""

    def __init__(self, *, op: str, where: str, seconds: float) -> None:
        self.op = op
        self.seconds = seconds
        super().__init__(failure_text.wait_timeout(op, where, seconds))


class GroupDestroyed(DistBackendError, ValueError):
    """A group was used after it was destroyed."""

    def __init__(self, group: str) -> None:
        self.group = group
        super().__init__(failure_text.group_destroyed(group))


class ForkedProcessError(DistBackendError):
    """A process group was used in a forked child, which shares no connection with the other ranks."""

    def __init__(self, what: str) -> None:
        super().__init__(failure_text.forked_process(what))


class DistNetworkError(DistError):
    """A connection could not be made."""


class Refused(DistNetworkError):
    """The other side is not a rank of this job, or cannot be reached."""


class CutShort(Refused):
    """The other side closed the connection in the middle of the handshake; another attempt may succeed."""


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
        super().__init__(failure_text.store_timeout(self.keys, seconds, what))


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
        super().__init__(f"{failure_text.incomplete_environment(self.missing, self.found)}. {advice}")


class RendezvousTimeout(RendezvousError):
    """Some ranks never came. ``missing`` lists them; ``joined`` maps the others to where they joined from."""

    def __init__(self, *, missing: Sequence[int], joined: Mapping[int, str], size: int, seconds: float) -> None:
        self.missing: tuple[int, ...] = tuple(missing)
        self.joined: dict[int, str] = dict(joined)
        self.size = size
        self.seconds = seconds
        super().__init__(failure_text.rendezvous_timeout(self.missing, self.joined, size, seconds))


class RendezvousConflict(RendezvousError):
    """Two processes claim one rank, or the ranks disagree on the world size."""


class ModelMismatch(DistError):
    """The ranks have wrapped different models; no parameter was changed.

    ``ranks`` are the ranks that differ from rank 0, and ``rank`` is the first of them. ``expected`` and ``got`` are the
    first different parameters of rank 0 and of ``rank``: name, shape and dtype, or "nothing".
    """

    def __init__(self, *, expected: str, got: str, rank: int, ranks: Sequence[int]) -> None:
        self.expected = expected
        self.got = got
        self.rank = rank
        self.ranks: tuple[int, ...] = tuple(ranks)
        super().__init__(failure_text.model_mismatch(expected, got, rank, ranks))


class BackwardFailed(DistError):
    """A backward failed on ``ranks``, so all ranks dropped its gradients.

    The group remains usable: all ranks can continue with the next step.
    """

    def __init__(self, *, ranks: Sequence[int]) -> None:
        self.ranks: tuple[int, ...] = tuple(ranks)
        super().__init__(failure_text.backward_failed(ranks))


class GraphChanged(DistError):
    """With static_graph=True, a backward used other parameters than the first one, or used them more or less often.

    ``uses`` maps ranks to lists of (name, shape, times in the first backward, times in this one).
    """

    def __init__(self, *, uses: Mapping[int, Sequence[tuple[str, tuple[int, ...], int, int]]]) -> None:
        self.uses: dict[int, list[tuple[str, tuple[int, ...], int, int]]] = {
            rank: list(changes) for rank, changes in uses.items() if changes
        }
        super().__init__(failure_text.graph_changed(self.uses))


class InputsExhausted(DistError):
    """In join(throw_on_early_termination=True), ``ranks`` have no more inputs. All ranks raise it at the same step."""

    def __init__(self, *, ranks: Sequence[int]) -> None:
        self.ranks: tuple[int, ...] = tuple(ranks)
        super().__init__(failure_text.inputs_exhausted(ranks))


class RanksApart(DistError):
    """In join(), the ranks call the model differently. ``places`` maps each rank to a description of its call."""

    def __init__(self, *, places: Mapping[int, str]) -> None:
        self.places: dict[int, str] = dict(places)
        super().__init__(failure_text.ranks_apart(self.places))


class ProcessException(Exception):
    """A spawned process failed. ``error_index`` is its number among the processes, ``error_pid`` its pid."""

    def __init__(self, msg: str, error_index: int, error_pid: int) -> None:
        super().__init__(msg)
        self.msg = msg
        self.error_index = error_index
        self.error_pid = error_pid

    def __reduce__(self) -> tuple[type[ProcessException], tuple[object, ...]]:
        return type(self), (self.msg, self.error_index, self.error_pid)


class ProcessRaisedException(ProcessException):
    """The function raised; the text holds the child's traceback."""


class ProcessExitedException(ProcessException):
    """The process ended without an exception: ``exit_code`` is negative for a signal, then ``signal_name`` names it."""

    def __init__(
        self, msg: str, error_index: int, error_pid: int, exit_code: int, signal_name: str | None = None
    ) -> None:
        super().__init__(msg, error_index, error_pid)
        self.exit_code = exit_code
        self.signal_name = signal_name

    def __reduce__(self) -> tuple[type[ProcessException], tuple[object, ...]]:
        return type(self), (self.msg, self.error_index, self.error_pid, self.exit_code, self.signal_name)


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
