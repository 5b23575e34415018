"""Who waits for whom in a job, and why: sentences, the cause before its consequences.

A call is *open* when it has started and not ended, or when it failed and was the last collective of its rank: then the
job ended there. A rank is *missing* from an open collective when it has not started the collective of that number.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from procgroup.diagnostics.recorded_job.job import MAKES_GROUP, Job, Rank, RecordedCall
from procgroup.errors.texts import name_ranks
from procgroup.process.exit_reason import CALL, OWN

# A live rank that has waited no longer than this is not a finding: every rank waits a little.
_USUAL_SECONDS = 1.0

# Where frames are that are not the program's own. Stacks have none of procgroup's.
_LIBRARIES = ("/lib/python3", "/site-packages/", "<frozen ")


class JobFinding(NamedTuple):
    """One thing that is wrong. ``ranks`` are those that cause it, ``waiting`` those that wait because of it."""

    sentence: str
    ranks: tuple[int, ...]
    waiting: tuple[int, ...]


def find(job: Job, now: float | None = None) -> list[JobFinding]:
    """Return what is wrong in a job, the most telling first; nothing when no rank waits for another for long."""
    if now is None:
        now = max(job.now, *(rank.seen for rank in job.ranks))
    ended = [rank for rank in job.ranks if rank.state in ("lost", "failed", "stopped")]
    causes = [rank for rank in ended if rank.origin.kind == OWN]
    found = [*(_ended(job, rank, now) for rank in causes), *_mismatches(job)]
    explained = {rank.rank for rank in causes}
    deadlock = _deadlock(job, now)
    if deadlock:
        found.append(deadlock)
        explained.update(deadlock.ranks)
    others = [*_late_ranks(job, now), *_messages(job, now), *_late_gpus(job, now)]
    found += [finding for finding in others if not explained.issuperset(finding.ranks)]
    # Where no record tells the cause, the ranks report consequences of each other; a call's own error says most.
    reports = sorted(ended, key=lambda rank: rank.origin.kind != CALL)
    return found or [_ended(job, rank, now) for rank in reports[:1]]


def place(rank: Rank, now: float) -> str:
    """Return where a rank is, in words that follow "it is"."""
    call = rank.call
    if call is not None:
        return f"in {_described(call)}{at(call)} for {duration(now - call.started)}"
    if rank.on_gpu and now - rank.on_gpu[0].started >= _USUAL_SECONDS:
        return f"in no call, but its GPU is {_on_gpu(rank, now)}"
    if rank.current_stack:
        # The innermost frame, and the innermost other one of the program's own, or else its caller.
        innermost, *callers = rank.current_stack
        own = [frame for frame in callers if not any(part in frame for part in _LIBRARIES)]
        return "in " + ", called by ".join(_short(frame) for frame in [innermost, *(own or callers)[:1]])
    last = rank.last
    if last is None:
        return "in no call, and has made none"
    idle = f" for {duration(now - last.ended)}" if now - last.ended >= _USUAL_SECONDS else ""
    return f"in no call{idle}; its last was {last.name}{at(last)}"


def _on_gpu(rank: Rank, now: float) -> str:
    """Return where the GPU of a rank is, in words that follow "its GPU is"."""
    call, *behind = rank.on_gpu
    queued = f", with {len(behind)} {'call' if len(behind) == 1 else 'calls'} behind it" if behind else ""
    return f"in {_described(call)}{at(call)} for {duration(now - call.started)}{queued}"


def _described(call: RecordedCall) -> str:
    return call.name if call.op == MAKES_GROUP else f"{call.text} ({call.name})"


def at(call: RecordedCall) -> str:
    """Return " at train.py:12"; "" where the line is not known."""
    return f" at {_base(call.line)}" if call.line else ""


def _base(path: str) -> str:
    return path.rsplit("/", 1)[-1]


def _short(frame: str) -> str:
    """Return "load at data.py:88" for "load (/home/me/data.py:88)"."""
    function, _, where = frame.rstrip(")").rpartition(" (")
    return f"{function} at {_base(where)}"


def duration(seconds: float) -> str:
    """Return "12.3 s" or "11 min"."""
    return f"{max(seconds, 0.0):.1f} s" if seconds < 600 else f"{seconds / 60:.0f} min"


def _open_collectives(job: Job) -> list[tuple[RecordedCall, list[Rank]]]:
    """Return each open collective with the ranks that are in it, or failed in it."""
    found: dict[tuple[str, int], tuple[RecordedCall, list[Rank]]] = {}
    for rank in job.ranks:
        last = next((call for call in reversed(rank.calls) if not call.is_message and call.state != "issued"), None)
        for call in rank.calls:
            if call.is_message or not (call.is_running or (call is last and call.state == "failed")):
                continue
            found.setdefault((call.group.key, call.sequence), (call, []))[1].append(rank)
    return list(found.values())


def _waiting_for(job: Job, rank: int) -> list[tuple[int, RecordedCall]]:
    """Return the ranks whose open call cannot end without this rank, with that call."""
    found: list[tuple[int, RecordedCall]] = []
    for call, present in _open_collectives(job):
        if rank in _missing(job, call, present):
            found.extend((one.rank, call) for one in present)
    for other in job.ranks:
        found.extend(
            (other.rank, call) for call in other.calls if call.is_message and call.is_running and call.peer == rank
        )
    return sorted(found, key=lambda one: one[0])


def _missing(job: Job, call: RecordedCall, present: Sequence[Rank]) -> list[int]:
    """Return the members that have not started this collective, as far as their records are here."""
    here = {rank.rank for rank in present}
    missing = []
    if call.op == MAKES_GROUP:
        seen = {rank.rank for rank in job.ranks if any(one.group.key == call.group.key for one in rank.calls)}
        return [member for member in call.group.members if job.rank(member) is not None and member not in seen]
    for member in call.group.members:
        rank = job.rank(member)
        if member not in here and rank is not None and rank.reached(call.group) < call.sequence:
            missing.append(member)
    return missing


def _ended(job: Job, rank: Rank, now: float) -> JobFinding:
    what = {
        "lost": f"rank {rank.rank} is lost: its process (pid {rank.pid} on {rank.host}) was killed, or crashed",
        "failed": f"rank {rank.rank} failed: {rank.reason or 'its program ended with an error'}",
        "stopped": f"rank {rank.rank} is stopped (SIGSTOP; pid {rank.pid} on {rank.host})",
    }[rank.state]
    then = now if rank.state == "stopped" else rank.seen
    ago = "" if rank.state == "stopped" or now - rank.seen < 1 else f", {duration(now - rank.seen)} ago"
    sentence = f"{what}{ago}; it was {place(rank, then)}"
    waiting = _waiting_for(job, rank.rank)
    if waiting:
        sentence += f"; {_who_waits(waiting, now, job)}"
    return JobFinding(sentence, (rank.rank,), tuple(sorted({one for one, _ in waiting})))


def _who_waits(waiting: Sequence[tuple[int, RecordedCall]], now: float, job: Job) -> str:
    call = waiting[0][1]
    ranks = sorted({rank for rank, _ in waiting})
    live = any(rank.call is not None for rank in job.ranks if rank.rank in ranks)
    name = f"{call.name}{at(call)}"
    wait = "has waited" if len(ranks) == 1 else "have waited"
    if live:
        return f"{name_ranks(ranks)} {wait} for it in {name}, for {duration(now - min(c.started for _, c in waiting))}"
    return f"{name} failed on {name_ranks(ranks)}"


def _mismatches(job: Job) -> list[JobFinding]:
    found = []
    for call, present in _open_collectives(job):
        made: dict[int, RecordedCall] = {}
        for rank in present:
            own = next(
                one
                for one in reversed(rank.calls)
                if one.group.key == call.group.key and one.sequence == call.sequence and not one.is_message
            )
            made[rank.rank] = own
        if len({one.text for one in made.values()}) > 1:
            calls = ", ".join(f"rank {rank}: {one.text}{at(one)}" for rank, one in sorted(made.items()))
            sentence = f"the ranks made different calls as #{call.sequence} of group {call.group.name}: {calls}"
            found.append(JobFinding(sentence, tuple(sorted(made)), ()))
    return found


def _late_ranks(job: Job, now: float) -> list[JobFinding]:
    found = []
    for call, present in _open_collectives(job):
        is_live = any(rank.call is not None for rank in present)
        if is_live and now - call.started < _USUAL_SECONDS:
            continue
        missing = _missing(job, call, present)
        waiting = tuple(sorted(rank.rank for rank in present))
        wait = "has waited" if len(waiting) == 1 else "have waited"
        since = f"{name_ranks(waiting)} {wait} for {duration(now - call.started)}"
        for number in missing:
            late = job.rank(number)
            assert late is not None
            if late.state == "left":
                it = "its program ended without an error"
            else:
                it = f"it is {place(late, now)}" if is_live else f"it was {place(late, late.seen)}"
            end = since if is_live else f"the call failed on {name_ranks(waiting)}"
            found.append(
                JobFinding(f"rank {number} never entered {call.name}{at(call)}; {it}; {end}", (number,), waiting)
            )
        unseen = [member for member in call.group.members if job.rank(member) is None]
        if is_live and not missing and unseen:
            sentence = f"{since} in {call.name}{at(call)}; of {name_ranks(sorted(unseen))} there is no record here"
            found.append(JobFinding(sentence, tuple(unseen), waiting))
    return found


def _messages(job: Job, now: float) -> list[JobFinding]:
    found = []
    for rank in job.ranks:
        for call in rank.calls:
            if not (call.is_message and call.is_running) or now - call.started < _USUAL_SECONDS:
                continue
            peer = job.rank(call.peer)
            where = f"it is {place(peer, now)}" if peer is not None else "there is no record of it here"
            who = f"rank {call.peer}" if call.peer >= 0 else "any rank"
            sentence = f"rank {rank.rank} waits for {who} in {call.name}{at(call)} since {duration(now - call.started)}"
            found.append(JobFinding(f"{sentence}; {where}" if call.peer >= 0 else sentence, (call.peer,), (rank.rank,)))
    return found


def _late_gpus(job: Job, now: float) -> list[JobFinding]:
    """Return the calls that all ranks have made, and that some of their GPUs have not finished.

    Where the GPUs of some ranks have, those of the others are stuck; otherwise any may be, before the call or in it.
    """
    first: dict[tuple[str, int], list[Rank]] = {}
    for rank in job.ranks:
        if rank.on_gpu and now - rank.on_gpu[0].started >= _USUAL_SECONDS:
            first.setdefault((rank.on_gpu[0].group.key, rank.on_gpu[0].sequence), []).append(rank)
    found = []
    for ranks in first.values():
        numbers = tuple(sorted(rank.rank for rank in ranks))
        members = ranks[0].on_gpu[0].group.members
        have, one_is = ("has", "it is") if len(numbers) == 1 else ("have", "one of them is")
        gpus = f"the GPU of {name_ranks(numbers)}" if len(numbers) == 1 else f"the GPUs of {name_ranks(numbers)}"
        others = sorted(set(members) - set(numbers))
        where = "; ".join(f"rank {rank.rank}'s is {_on_gpu(rank, now)}" for rank in ranks)
        who = f"those of {name_ranks(others)} have" if others else f"{one_is} stuck, before this call or in it"
        call = ranks[0].on_gpu[0]
        found.append(JobFinding(f"{gpus} {have} not finished {call.name}{at(call)}; {who}: {where}", numbers, ()))
    return found


def _deadlock(job: Job, now: float) -> JobFinding | None:
    """Return a cycle of ranks, each in a call that another one of them has to join; None when there is none."""
    awaited: dict[int, list[int]] = {}
    for rank in job.ranks:
        call = rank.call
        if call is None or now - call.started < _USUAL_SECONDS:
            continue
        present = [one for one in job.ranks if one.reached(call.group) >= call.sequence]
        awaited[rank.rank] = [call.peer] if call.is_message else _missing(job, call, present)
    for start in awaited:
        path = [start]
        while path[-1] in awaited and awaited[path[-1]]:
            following = awaited[path[-1]][0]
            if following == start:
                waits = "; ".join(f"rank {one} is {place(waiting, now)}" for one in path if (waiting := job.rank(one)))
                return JobFinding(
                    f"deadlock: {name_ranks(sorted(path))} wait for each other: {waits}",
                    tuple(sorted(path)),
                    tuple(path),
                )
            if following in path:
                break
            path.append(following)
    return None
