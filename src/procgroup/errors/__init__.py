"""The exception classes of procgroup.

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
        │   └── Refused                the other side is not a rank of this job, or cannot be reached
        │       └── CutShort               the connection closed during the handshake
        ├── DistStoreError             in a key-value store
        │   ├── QueueEmptyError        queue_pop(block=False) found nothing
        │   ├── StoreTimeout           the deadline passed before the keys were there
        │   ├── StoreLost              the store's server is gone
        │   └── StoreLimitError        a key or value is larger than the store takes
        ├── RendezvousError            while ranks find each other
        │   ├── IncompleteEnvironment      env:// lacks variables; says what started this process, and what to write
        │   ├── RendezvousTimeout          some ranks never came; names them
        │   └── RendezvousConflict         two processes claim one rank, or ranks disagree on the world size
        └── ModelMismatch, BackwardFailed, GraphChanged, InputsExhausted, RanksApart: in data-parallel training

    Exception
    ├── ArgumentError (ValueError, RuntimeError)    an array or list that does not fit its call
    ├── ProcessException               a spawned process failed
    │   └── ProcessRaisedException, ProcessExitedException: its function raised; it ended without an exception
    ├── RanksFailed (ExceptionGroup), RanksTimeout (TimeoutError): from run_ranks
    └── internal: MalformedObjects, Refusal of etcd, SshError, JobConflict, JobEnded, PeerFailure in a benchmark

Most of them are built from data, which they keep as attributes. The others carry a text only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from procgroup.errors import texts
from procgroup.errors.texts import ParameterUse, global_rank
from procgroup.process.exit_reason import PEER, origin_of

Ranks = Sequence[int]
Texts = Mapping[int, str]


class DistError(RuntimeError):
    """Anything that goes wrong between ranks."""


class DistBackendError(DistError):
    """A process group operation failed."""


class ArgumentError(ValueError, RuntimeError):
    """An argument that does not fit its call; nothing was sent. (torch.distributed raises RuntimeError for most.)"""


class _CallError(DistBackendError):
    """An error of one call on a group, with this rank's place in the group.

    ``ended_by`` is the global rank that caused this error; None if there is none, or it is unknown.
    """

    ended_by: int | None = None

    def __init__(
        self,
        text: str,
        *,
        op: str,
        group: str,
        rank: int,
        size: int,
        members: Ranks = (),
        number: str = "",
        function: str = "",
    ) -> None:
        self.op = op
        self.group = group
        self.rank = rank
        self.size = size
        self.members: tuple[int, ...] = tuple(members or range(size))
        self.global_rank: int = self.members[rank]
        also = "" if self.global_rank == rank else f"; global rank {self.global_rank}"
        super().__init__(f"{function or op}{number} on group {group} (rank {rank} of {size}{also}): {text}")


class OperationError(_CallError):
    """One call on a process group failed on this rank.

    Attributes: ``op`` (name of the operation), ``sequence`` (its number in the group), ``group`` (the group's name),
    ``rank`` (this rank in the group), ``size`` (of the group), ``members`` (the global rank of each group rank),
    ``global_rank`` (of this rank) and ``intact``: whether the array that the call writes is unchanged; False when it
    may be partly written, None when unknown or without such an array. ``issued_at`` is the program's line that made the
    call, as in "train.py:12"; "" when it is not known. The message names global ranks, and adds the group rank where it
    differs. It begins with the name of the called function, which can differ from ``op``.
    """

    def __init__(
        self,
        happened: str,
        advice: str = "",
        *,
        sequence: int,
        intact: bool | None = None,
        issued_at: str = "",
        note: str = "",
        **call: Any,
    ) -> None:
        self.sequence = sequence
        self.intact = intact
        self.issued_at = issued_at
        happened = f"{happened}; {note}" if note else happened
        super().__init__(f"{happened}. {advice}" if advice else happened, number=f" #{sequence}", **call)


class CollectiveMismatch(OperationError):
    """The ranks did not make the same call, or a message is not what its receive expects.

    No array was changed unless ``intact`` is False: then a GPU may have started the call, or this rank already had its
    result from a rank whose call agreed.

    ``calls`` maps each rank to a description of its call, and ``lines`` to the program's line that made it, as in
    "train.py:12", where it is known. ``pair`` names two ranks of an all_to_all that disagree on the block between them,
    and their sizes. ``differing`` names the data that differs although the calls agree.
    """

    def __init__(
        self,
        *,
        calls: Texts,
        pair: str = "",
        differing: str = "",
        advice: str = "",
        lines: Texts | None = None,
        **call: Any,
    ) -> None:
        self.calls: dict[int, str] = dict(calls)
        self.lines: dict[int, str] = dict(lines or {})
        self.pair = pair
        super().__init__(*texts.mismatch(self.calls, self.lines, pair, differing, advice, call), **call)


class CollectiveTimeout(OperationError):
    """The deadline (``seconds``) passed before every rank arrived.

    ``missing`` lists the ranks, ``global_missing`` their global ranks, ``calls`` what the first of them were doing, and
    for which ranks they waited in their collectives. A queued call lists those that the call before it waits for.
    ``awaited`` says what is awaited if not ``missing``.
    """

    def __init__(
        self, *, missing: Ranks, seconds: float, calls: Texts | None = None, awaited: str = "", **call: Any
    ) -> None:
        self.missing: tuple[int, ...] = tuple(missing)
        self.global_missing: tuple[int, ...] = tuple(global_rank(rank, call) for rank in self.missing)
        self.seconds = seconds
        self.awaited = awaited
        self.calls: dict[int, str] = dict(calls or {})
        super().__init__(*texts.timeout(self.missing, awaited, seconds, self.calls, call), **call)


class Deadlock(OperationError):
    """Ranks wait for each other in a cycle.

    ``waits`` maps their global ranks to their calls and the program's lines, as in "recv from 1 at train.py:12".
    """

    def __init__(self, *, waits: Texts, **call: Any) -> None:
        self.waits: dict[int, str] = dict(waits)
        super().__init__(*texts.deadlock(waits), **call)


class PeerLost(OperationError):
    """The process of a rank has ended, or the rank has left the group.

    ``peer`` is its group rank, ``global_peer`` its global rank, ``pid`` its process id, ``host`` the name of its host
    if it is another one. ``how`` describes its end, and ``left`` is True if it left in order.
    """

    def __init__(self, *, peer: int, pid: int, how: str, host: str = "", left: bool = False, **call: Any) -> None:
        self.peer = peer
        self.global_peer: int = global_rank(peer, call)
        self.ended_by: int | None = self.global_peer
        self.pid = pid
        self.host = host
        self.how = how
        self.left = left
        super().__init__(*texts.lost(peer, pid, how, host, call), **call)


class PeerFailed(OperationError):
    """A rank left this call with an error of its own, aborted its group, or its program ended with an exception.

    ``peer`` is the failed rank's group rank, ``global_peer`` its global rank, ``reason`` the failure as text, ``cause``
    its kind: "error" (an exception, or a breach of the protocol), "timeout", "mismatch", "interrupted", "aborted" or
    "deadlock". For "timeout", ``missing`` lists the group ranks that ``peer`` waited for, followed by those that the
    ranks failed by its timeout waited for.
    """

    def __init__(
        self, *, peer: int, reason: str, cause: str = "error", missing: Ranks = (), seconds: float = 0.0, **call: Any
    ) -> None:
        self.peer = peer
        self.global_peer: int = global_rank(peer, call)
        self.ended_by: int | None = self.global_peer
        self.reason = reason
        self.cause = cause
        self.missing: tuple[int, ...] = tuple(missing)
        self.seconds = seconds
        super().__init__(*texts.peer_failed(peer, reason, call), **call)


class GroupBroken(OperationError):
    """The group has ended on this rank: it failed, was aborted or was left. ``reason`` says which.

    ``peer`` is the group rank whose end broke the group; None for another cause.
    """

    def __init__(self, *, reason: str, peer: int | None = None, **call: Any) -> None:
        self.reason = reason
        self.peer = peer
        self.ended_by: int | None = None if peer is None else global_rank(peer, call)
        super().__init__(f"this group has ended: {reason}", "Destroy the group and make a new one.", **call)


class ObjectError(_CallError):
    """The object of ``source``, a group rank, could not be moved, for ``reason``; the group can still be used."""

    def __init__(self, happened: str, advice: str, *, source: int, reason: str, **call: Any) -> None:
        super().__init__(f"{happened}: {reason}. {advice}", **call)
        self.source = source
        self.global_source: int = self.members[source]
        self.reason = reason


class PicklingFailed(ObjectError):
    """A rank could not pickle its object. That rank raises the error itself, the others this."""

    def __init__(self, *, source: int, **call: Any) -> None:
        super().__init__(*texts.pickling_failed(source, call), source=source, **call)
        self.ended_by: int | None = self.global_source


class UnpicklingFailed(ObjectError):
    """This rank could not unpickle what a rank sent; ``kind`` is the name of the object's type. See ``__cause__``."""

    def __init__(self, *, source: int, kind: str, safe: bool = False, **call: Any) -> None:
        self.kind = kind
        super().__init__(*texts.unpickling_failed(source, kind, safe, call), source=source, **call)


class WaitTimeout(DistBackendError):
    """``Work.wait(timeout)`` ended before the call did, which goes on. Has ``op`` and ``seconds``."""

    def __init__(self, *, op: str, where: str, seconds: float) -> None:
        self.op = op
        self.seconds = seconds
        super().__init__(texts.wait_timeout(op, where, seconds))


class GroupDestroyed(DistBackendError, ValueError):
    """A group was used after it was destroyed."""

    def __init__(self, group: str) -> None:
        self.group = group
        super().__init__(texts.group_destroyed(group))


class ForkedProcessError(DistBackendError):
    """A process group was used in a forked child, which shares no connection with the other ranks."""

    def __init__(self, what: str) -> None:
        super().__init__(texts.forked_process(what))


class DistNetworkError(DistError):
    """A connection could not be made."""


class Refused(DistNetworkError):
    """The other side is not a rank of this job, or cannot be reached."""


class CutShort(Refused):
    """The other side closed the connection in the middle of the handshake; another attempt may succeed."""


class DistStoreError(DistError):
    """A key-value store operation failed."""


class QueueEmptyError(DistStoreError):
    """``queue_pop(block=False)`` found nothing."""


class StoreTimeout(DistStoreError):
    """After a timeout of ``seconds``, some of the ``keys`` that operation ``what`` waited for were not set."""

    def __init__(self, *, keys: Sequence[str], seconds: float, what: str = "wait") -> None:
        self.keys: tuple[str, ...] = tuple(keys)
        self.seconds = seconds
        self.what = what
        super().__init__(texts.store_timeout(self.keys, seconds, what))


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
        super().__init__(
            f"{what} of {size} bytes is larger than the limit of {limit} bytes. Split it, or send it with a collective."
        )


class RendezvousError(DistError):
    """The ranks could not find each other."""


class IncompleteEnvironment(RendezvousError, ValueError):
    """env:// lacks the variables ``missing``. ``found`` has the others, ``launcher`` the detected launcher or ""."""

    def __init__(self, *, missing: Sequence[str], found: Mapping[str, str], launcher: str, advice: str) -> None:
        self.missing: tuple[str, ...] = tuple(missing)
        self.found: dict[str, str] = dict(found)
        self.launcher = launcher
        super().__init__(f"{texts.incomplete_environment(self.missing, self.found)}. {advice}")


class RendezvousTimeout(RendezvousError):
    """Some ranks never came. ``missing`` lists them; ``joined`` maps the others to where they joined from."""

    def __init__(self, *, missing: Ranks, joined: Texts, size: int, seconds: float) -> None:
        self.missing: tuple[int, ...] = tuple(missing)
        self.joined: dict[int, str] = dict(joined)
        self.size = size
        self.seconds = seconds
        super().__init__(texts.rendezvous_timeout(self.missing, self.joined, size, seconds))


class RendezvousConflict(RendezvousError):
    """Two processes claim one rank, or the ranks disagree on the world size."""


class ModelMismatch(DistError):
    """The ranks have wrapped different models; no parameter was changed.

    ``ranks`` differ from rank 0, and ``rank`` is the first of them. ``expected`` and ``got`` describe the first
    parameter that differs, on rank 0 and on ``rank``: name, shape and dtype, or "nothing".
    """

    def __init__(self, *, expected: str, got: str, rank: int, ranks: Ranks) -> None:
        self.expected = expected
        self.got = got
        self.rank = rank
        self.ranks: tuple[int, ...] = tuple(ranks)
        super().__init__(texts.model_mismatch(expected, got, rank, ranks))


class BackwardFailed(DistError):
    """A backward failed on ``ranks``: all ranks dropped its gradients, and can go on with the next step."""

    def __init__(self, *, ranks: Ranks) -> None:
        self.ranks: tuple[int, ...] = tuple(ranks)
        super().__init__(texts.backward_failed(ranks))


class GraphChanged(DistError):
    """With static_graph=True, a backward used other parameters than the first one, or used them less or more often.

    ``uses`` lists them.
    """

    def __init__(self, *, uses: Mapping[int, Sequence[ParameterUse]]) -> None:
        self.uses: dict[int, list[ParameterUse]] = {rank: list(changes) for rank, changes in uses.items() if changes}
        super().__init__(texts.graph_changed(self.uses))


class InputsExhausted(DistError):
    """In join(throw_on_early_termination=True), ``ranks`` have no more inputs. All ranks raise it at the same step."""

    def __init__(self, *, ranks: Ranks) -> None:
        self.ranks: tuple[int, ...] = tuple(ranks)
        super().__init__(texts.inputs_exhausted(ranks))


class RanksApart(DistError):
    """In join(), the ranks call the model differently. ``places`` maps each rank to a description of its call."""

    def __init__(self, *, places: Texts) -> None:
        self.places: dict[int, str] = dict(places)
        super().__init__(texts.ranks_apart(self.places))


class ProcessException(Exception):
    """A spawned process failed. ``error_index`` is its number among the processes, ``error_pid`` its process id."""

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


class RanksFailed(ExceptionGroup[Exception]):
    """Some ranks raised. ``errors`` maps each of them to its exception; causes come before consequences."""

    errors: dict[int, Exception]

    def __new__(cls, errors: Mapping[int, Exception], size: int) -> RanksFailed:
        ordered = dict(sorted(errors.items(), key=lambda entry: (origin_of(entry[1]).kind == PEER, entry[0])))
        for rank, error in ordered.items():
            error.add_note(f"(raised on rank {rank} of {size})")
        failed = super().__new__(cls, texts.ranks_failed(ordered, size), list(ordered.values()))
        failed.errors = ordered
        return failed

    def __init__(self, errors: Mapping[int, Exception], size: int) -> None:
        """Take the exceptions by rank, and how many ranks there were."""


class RanksTimeout(TimeoutError):
    """Some ranks were still running at the deadline. ``running`` lists them, ``errors`` is what other ranks raised."""

    def __init__(
        self, running: Ranks, size: int, seconds: float, stacks: str, errors: Mapping[int, BaseException]
    ) -> None:
        self.running: tuple[int, ...] = tuple(running)
        self.errors: dict[int, BaseException] = dict(errors)
        super().__init__(texts.ranks_timeout(running, size, seconds, errors) + stacks)


class MalformedObjects(ValueError):
    """Received bytes that contradict the announced sizes, or the format of this version."""


class Refusal(Exception):
    """An error that etcd returned: a gRPC status code and a text."""

    def __init__(self, endpoint: object, code: int, text: str) -> None:
        super().__init__(f"etcd at {endpoint} returned an error: {text}")
        self.code = code
        self.text = text


class SshError(Exception):
    """ssh cannot be run, or has no settings for a host."""


class JobConflict(Exception):
    """A node cannot join the job: another node has its rank, or the job has other settings."""


class JobEnded(Exception):
    """A node tried to join a job that has ended."""


class PeerFailure(RuntimeError):
    """The ``peer`` of a benchmark could not be started or measured, for ``reason``; it takes no further part."""

    def __init__(self, peer: str, reason: str) -> None:
        self.peer = peer
        self.reason = reason
        super().__init__(f"{peer}: {reason}")
