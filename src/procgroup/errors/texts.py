"""The texts of errors, built from their data: sentences that several errors share, and the longer messages.

``call`` is the data of the call that failed: ``op``, ``rank``, ``size``, ``group`` and, where they are known,
``members`` (the global rank of each group rank) and ``intact`` (see OperationError).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

ParameterUse = tuple[str, tuple[int, ...], int, int]
"""A parameter's name and shape, and how often the first backward used it, and this one."""

_UNCHANGED = "no array was changed."
_DIFFERENT_CALLS = (
    "the ranks made different calls",
    f"Make the same call with the same op, dtype, count and root on every rank; {_UNCHANGED}",
)
_DIFFERENT_BLOCKS = (
    "the ranks do not agree on the size of a block",
    f"Make the size that rank s sends to rank r equal to the size that rank r expects from rank s; {_UNCHANGED}",
)
_DIFFERENT_MESSAGES = (
    "the message does not match its receive",
    f"Send and receive the same dtype and count; {_UNCHANGED}",
)
_DIFFERENT_GROUPS = (
    "the members make different groups",
    "Pass the same ranks on every member, and make groups in the same order; no group was made.",
)
_MISMATCHES = {"send": _DIFFERENT_MESSAGES, "recv": _DIFFERENT_MESSAGES}
_MISMATCHES |= {"new_group": _DIFFERENT_GROUPS, "split_group": _DIFFERENT_GROUPS}


def global_rank(rank: int, call: Mapping[str, Any]) -> int:
    """Return the global rank of a group rank of the group that a call was made on."""
    members = call.get("members")
    return int(members[rank]) if members else rank


def name_rank(rank: int, call: Mapping[str, Any]) -> str:
    """Return "rank 1", or "rank 3 (rank 1 of group 2)" where the two differ."""
    return _name_group_ranks([rank], call)


def _name_group_ranks(ranks: Sequence[int], call: Mapping[str, Any]) -> str:
    """Return "ranks 1, 2", or "ranks 3, 5 (ranks 1, 2 of group 2)" where they differ."""
    found = [global_rank(rank, call) for rank in ranks]
    return name_ranks(found) + ("" if found == list(ranks) else f" ({name_ranks(ranks)} of group {call['group']})")


def state_of_array(call: Mapping[str, Any]) -> str:
    """Return a sentence on the array that a failed call writes, followed by a space; "" where nothing is known."""
    intact = call.get("intact")
    if intact is None:
        return ""
    return "No array was changed. " if intact else "The array that this call writes may be partly written. "


def _rounded(seconds: float) -> str:
    """Return three digits: the remaining timeout of a part of a call is not a round number."""
    return f"{float(f'{seconds:.3g}'):g}"


def name_ranks(ranks: Sequence[int]) -> str:
    """Return "rank 1" or "ranks 1, 2"."""
    return f"rank {ranks[0]}" if len(ranks) == 1 else "ranks " + ", ".join(map(str, ranks))


def mismatch(
    calls: Mapping[int, str], lines: Mapping[int, str], pair: str, differing: str, advice: str, call: Mapping[str, Any]
) -> tuple[str, str]:
    """Return the text and the advice of a CollectiveMismatch."""
    did, happened = "has", f"the ranks have different {differing}"
    if not differing:
        did = "called"
        happened, advice = _MISMATCHES.get(call["op"]) or (_DIFFERENT_BLOCKS if pair else _DIFFERENT_CALLS)
    mine = calls[call["rank"]]
    at = {rank: f" at {line}" for rank, line in lines.items()}
    others = [
        f"{name_rank(rank, call)} {did} {text}{at.get(rank, '')}"
        for rank, text in sorted(calls.items())
        if text != mine
    ]
    shown = pair or ", ".join([f"this rank {did} {mine}{at.get(call['rank'], '')}", *others])
    if call.get("intact") is False:  # a GPU had begun, or a small rooted call had its result, before the ranks compared
        advice = advice.replace(_UNCHANGED, "the array that this call writes may have been changed.")
    elif any(text.startswith(("broadcast ", "scatter ")) for text in calls.values()):
        # Another rank may have had its result, in a small call.
        advice = advice.replace(_UNCHANGED, "no array of this rank was changed.")
    return f"{happened}: {shown}", advice


def timeout(
    missing: Sequence[int], awaited: str, seconds: float, calls: Mapping[int, str], call: Mapping[str, Any]
) -> tuple[str, str]:
    """Return the text and the advice of a CollectiveTimeout."""
    if not awaited and missing:
        awaited = _name_group_ranks(missing, call)
    awaited = awaited or "a message from any rank, or for an earlier call to end"
    doing = "; ".join(f"{name_rank(rank, call)} is {text}" for rank, text in calls.items())
    return (
        f"not complete after {_rounded(seconds)} s; still waiting for {awaited}{': ' if doing else ''}{doing}",
        # PyTorch's own tests look for the word "timeout" between two spaces.
        f"{state_of_array(call)}See what those ranks are doing, or pass a longer timeout for this call.",
    )


def deadlock(waits: Mapping[int, str]) -> tuple[str, str]:
    """Return the text and the advice of a Deadlock."""
    happened = "deadlock: " + ", ".join(f"rank {rank} in {wait}" for rank, wait in waits.items())
    return happened, "Change the order of the calls on one of these ranks, or use isend and irecv."


def lost(peer: int, pid: int, how: str, host: str, call: Mapping[str, Any]) -> tuple[str, str]:
    """Return the text and the advice of a PeerLost; ``pid`` 0 is a process of which only the rank is known."""
    process = f" (pid {pid}{host and f' on {host}'})" if pid else ""
    return (
        f"lost {name_rank(peer, call)}{process}: {how}",
        f"{state_of_array(call)}Look at that rank's own output for the cause.",
    )


def peer_failed(peer: int, reason: str, call: Mapping[str, Any]) -> tuple[str, str]:
    """Return the text and the advice of a PeerFailed."""
    return (
        f"{name_rank(peer, call)} failed: {reason}",
        f"{state_of_array(call)}Look at rank {global_rank(peer, call)}'s own error for the cause.",
    )


def pickling_failed(source: int, call: Mapping[str, Any]) -> tuple[str, str]:
    """Return the text and the advice of a PicklingFailed."""
    return (
        f"{name_rank(source, call)} could not pickle its object",
        f"No object was received; look at rank {global_rank(source, call)}'s own error.",
    )


def unpickling_failed(source: int, kind: str, safe: bool, call: Mapping[str, Any]) -> tuple[str, str]:
    """Return the text and the advice of an UnpicklingFailed."""
    mending = "trust the sender with safe=False" if safe else "make its type importable on this rank"
    return (
        f"cannot unpickle the {kind} of {name_rank(source, call)}",
        f"Send dicts, lists, numbers, strings and arrays, or {mending}.",
    )


def wait_timeout(op: str, where: str, seconds: float) -> str:
    """Return the text of a WaitTimeout."""
    return (
        f"{op} on {where}: not complete after waiting {seconds:g} s. The call goes on: wait again, "
        "and leave its arrays alone until then."
    )


def group_destroyed(group: str) -> str:
    """Return the text of a GroupDestroyed."""
    return (
        f"Invalid process group specified: group {group} has been destroyed. "
        "Call init_process_group again, and use the group that it makes."
    )


def forked_process(what: str) -> str:
    """Return the text of a ForkedProcessError."""
    return (
        f"{what} cannot be used in a forked child of the process that made it. "
        "Call init_process_group in the child, or make no calls of the group there."
    )


def store_timeout(keys: Sequence[str], seconds: float, what: str) -> str:
    """Return the text of a StoreTimeout."""
    names = ", ".join(f"/{key}" for key in keys) if what == "wait" else ", ".join(keys)
    label = "keys" if what == "wait" else "key"
    return (
        f"{what} timeout after {round(seconds * 1000)}ms, {label}: {names}. "
        f"Check the ranks that set the {label}, or pass a longer timeout."
    )


def incomplete_environment(missing: Sequence[str], found: Mapping[str, str]) -> str:
    """Return the text of an IncompleteEnvironment, without the advice."""
    also = f" (also missing: {', '.join(missing[1:])})" if missing[1:] else ""
    shown = ", ".join(f"{name}={value}" for name, value in found.items())
    return (
        "Error initializing procgroup using env:// rendezvous: environment variable "
        f"{missing[0]} expected, but not set{also}; already set: {shown or 'none of them'}"
    )


def rendezvous_timeout(missing: Sequence[int], joined: Mapping[int, str], size: int, seconds: float) -> str:
    """Return the text of a RendezvousTimeout."""
    where = ", ".join(f"{rank}@{place}" for rank, place in sorted(joined.items())) or "none"
    return (
        f"rendezvous not complete after {seconds:g} s: still missing {name_ranks(missing)} of {size} "
        f"(joined: {where}). Start the missing ranks with the same address and world size."
    )


def model_mismatch(expected: str, got: str, rank: int, ranks: Sequence[int]) -> str:
    """Return the text of a ModelMismatch."""
    return (
        f"DistributedDataParallel: the ranks have different models; {name_ranks(ranks)} differ"
        f"{'s' if len(ranks) == 1 else ''} from rank 0. The first difference: rank 0 has {expected}, "
        f"rank {rank} has {got}. Build the same model on every rank; no parameter was changed."
    )


def backward_failed(ranks: Sequence[int]) -> str:
    """Return the text of a BackwardFailed."""
    return (
        f"DistributedDataParallel: backward failed on {name_ranks(ranks)}, so the gradients of this step were "
        "dropped on every rank. Look at the error there; training can continue with the next step."
    )


def inputs_exhausted(ranks: Sequence[int]) -> str:
    """Return the text of an InputsExhausted. Its beginning is torch's."""
    return (
        "Detected at least one rank that exhausted inputs. Throwing across all ranks. "
        f"Out of inputs: {name_ranks(ranks)}; every rank stops at this step."
    )


def graph_changed(uses: Mapping[int, Sequence[ParameterUse]]) -> str:
    """Return the text of a GraphChanged."""
    said = "; ".join(
        f"rank {rank}: "
        + ", ".join(
            f"{name} {shape}: used {then} times in the first backward, {now} times in this one"
            for name, shape, then, now in changes
        )
        for rank, changes in sorted(uses.items())
    )
    return (
        f"DistributedDataParallel: static_graph=True, but this backward did not use the parameters as the first "
        f"one did ({said}). Remove static_graph=True: unused parameters need no flag."
    )


def ranks_apart(places: Mapping[int, str]) -> str:
    """Return the text of a RanksApart."""
    return (
        "DistributedDataParallel: the ranks do not call the model in the same way ("
        + ", ".join(f"rank {rank} is {place}" for rank, place in sorted(places.items()))
        + "). Let each rank that has inputs run the same forward and backward passes."
    )


def ranks_failed(errors: Mapping[int, Exception], size: int) -> str:
    """Return the text of a RanksFailed: which ranks failed, and the first of the errors."""
    rank, error = next(iter(errors.items()))
    return f"{name_ranks(sorted(errors))} of {size} failed; rank {rank}: {type(error).__name__}: {error}"


def ranks_timeout(running: Sequence[int], size: int, seconds: float, errors: Mapping[int, BaseException]) -> str:
    """Return the text of a RanksTimeout, without the stacks."""
    raised = "".join(f"\n--- rank {rank} raised {error!r}" for rank, error in sorted(errors.items()))
    return f"{name_ranks(running)} of {size} still running after {seconds:g} s{raised}"
