"""Finds the flight records of a job's ranks, and reads them."""

from __future__ import annotations

import re
import time
from collections.abc import Collection, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeAlias

from procgroup import _native
from procgroup.diagnostics.recorded_job.job import Job, Rank, RecordedCall, RecordedGroup
from procgroup.process import flight_records
from procgroup.process.exit_reason import Origin, printable

RECORDED_CALLS = 1024
"""So many calls are in a record at most."""

# How long a live rank is given to write its stack.
_STACK_SECONDS = 0.3
_LOOK_SECONDS = 0.01
# A rank of another host whose record ends so long before those of its neighbours has ended before them.
_SILENT_SECONDS = 2.0

_Record: TypeAlias = tuple[Path, dict[str, Any]]
"""A record's file and what it holds."""


def find(which: str = "") -> Path:
    """Return the directory of a job: one itself, the beginning of a job's name, a launcher's run id; "": the newest.

    Raises LookupError with a text for the user when there is none.
    """
    if which and Path(which).is_dir():
        return Path(which)
    found = jobs()
    if not which and found:
        return found[0]
    named = [path for path in found if path.name.startswith(which) or _run_id(path) == which]
    if which and named:
        return named[0]
    root = flight_records.directory()
    where = root or "nowhere: PROCGROUP_RECORD_DIR=none"
    raise LookupError(f"there is no flight record of {f'job {which!r}' if which else 'any job'} (kept in {where})")


def jobs() -> list[Path]:
    """Return the directories of all recorded jobs, the newest first."""
    root = flight_records.directory()
    if root is None or not root.is_dir():
        return []
    paths = [path for path in root.iterdir() if path.is_dir() and any(_records_in(path))]
    return sorted(paths, key=lambda path: path.stat().st_mtime, reverse=True)


def is_running(directory: Path) -> bool:
    """Return whether a rank of this job lives on this host."""
    return any(map(flight_records.is_in_use, _records_in(directory)))


def request_stacks(directory: Path, ranks: Collection[int]) -> None:
    """Have these ranks write their stacks to their records, and do not wait for that."""
    for path in _records_in(directory):
        if path.stem.startswith(tuple(f"{rank}-" for rank in ranks)) and flight_records.is_in_use(path):
            with suppress(OSError, ValueError):
                _native.request_stack(str(path))


def load(directory: Path, *, with_stacks: bool = True, newest: int = RECORDED_CALLS) -> Job:
    """Read the records of a job. ``with_stacks`` has live ranks of this host write where they are now.

    ``newest`` is how many calls of each record are read at least, besides all that have not ended. Raises LookupError
    when there is no readable record.
    """
    paths = sorted(_records_in(directory)) if directory.is_dir() else []  # a job may be removed meanwhile
    if with_stacks:
        _await_stacks([path for path in paths if flight_records.is_in_use(path)])
    read: dict[int, list[_Record]] = {}
    problems = []
    for path in paths:
        try:
            record = _native.read_flight_record(str(path), newest)
        except (OSError, ValueError) as error:
            problems.append(str(error))
            continue
        read.setdefault(record["rank"], []).append((path, record))
    if not read:
        raise LookupError("; ".join(problems) or f"there is no flight record in {directory}")
    ranks = [_rank_of(sorted(records, key=_number)) for _, records in sorted(read.items())]
    name = next((records[-1][1]["job"] for records in read.values() if records[-1][1]["job"]), "")
    return Job(name or directory.resolve().name, directory, _without_silent(ranks))


def _records_in(directory: Path) -> Iterable[Path]:
    return (path for path in directory.iterdir() if path.suffix == flight_records.SUFFIX)


def _run_id(directory: Path) -> str:
    for path in _records_in(directory):
        try:
            return str(_native.read_flight_record(str(path))["job"])
        except (OSError, ValueError):
            continue
    return ""


def _number(one: _Record) -> int:
    """Return which process group of its process a record is of: the 2 of 0-2.record."""
    found = re.search(r"-(\d+)$", one[0].stem)
    return int(found[1]) if found else 0


def _await_stacks(paths: list[Path]) -> None:
    asked = time.monotonic_ns()
    waiting = []
    for path in paths:
        try:
            _native.request_stack(str(path))
            waiting.append(path)
        except (OSError, ValueError):
            continue
    deadline = time.monotonic() + _STACK_SECONDS
    while waiting and time.monotonic() < deadline:
        time.sleep(_LOOK_SECONDS)
        waiting = [path for path in waiting if not _has_answered(path, asked)]


def _has_answered(path: Path, asked: int) -> bool:
    record = _native.read_flight_record(str(path))
    return bool(record["stopped"]) or (record["stack"] is not None and record["stack"][0] >= asked)


def _rank_of(records: list[_Record]) -> Rank:
    """Return a rank by the records of its process groups, the newest last."""
    calls = [call for path, record in records for call in _calls_of(path, record)]
    calls.sort(key=lambda call: call.issued)
    path, last = records[-1]
    stack = last["stack"][1] if last["stack"] else ""  # as Python's faulthandler writes it, the innermost frame first
    frames = re.findall(r'^  File "(.*)", line (\d+) in (.*)$', stack, re.MULTILINE)
    return Rank(
        rank=last["rank"],
        world_size=last["world_size"],
        host=last["host"],
        pid=last["pid"],
        program=last["program"],
        state=_state_of(path, last),
        reason=last["reason"],
        origin=Origin(last["origin"], last["failed_peer"] if last["failed_peer"] >= 0 else None),
        seen=_wall(last, last["beat_ns"]),
        calls=calls,
        stack=[f"{function} ({file}:{line})" for file, line, function in frames],
        report=printable(last["report"][1]) if last["report"] else "",
        began=records[0][1]["created_wall_ns"] / 1e9,
        stack_taken=_wall(last, last["stack"][0]) if last["stack"] else 0.0,
        recorded=sum(record["recorded"] for _, record in records),
        whole_since=max(_whole_since(record) for _, record in records),
    )


def _state_of(path: Path, record: dict[str, Any]) -> str:
    state = str(record["state"])
    if state != "running":
        return state
    if record["stopped"]:
        return "stopped"
    if flight_records.is_in_use(path):
        return "running"
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return "running" if record["boot"] != boot else "lost"


def _without_silent(ranks: list[Rank]) -> list[Rank]:
    """RecordedCall a rank lost whose record ends long before those of the other ranks of its host."""
    seen: dict[str, float] = {}
    for rank in ranks:
        seen[rank.host] = max(seen.get(rank.host, 0.0), rank.seen)
    return [
        rank._replace(state="lost")
        if rank.state == "running" and seen[rank.host] - rank.seen > _SILENT_SECONDS
        else rank
        for rank in ranks
    ]


def _wall(record: dict[str, Any], ns: int) -> float:
    return float(record["created_wall_ns"] + ns - record["created_ns"]) / 1e9 if ns else 0.0


def _whole_since(record: dict[str, Any]) -> float:
    """Return the moment since which all calls of a record were read; 0.0 when all were."""
    calls = record["calls"]
    if not calls or len(calls) >= record["recorded"]:
        return 0.0
    # Before the newest calls there may be older ones that have not ended.
    newest = next((call for call in calls if call["ended_ns"]), calls[-1])
    return _wall(record, newest["issued_ns"])


def _calls_of(path: Path, record: dict[str, Any]) -> Iterable[RecordedCall]:
    number = _number((path, record))
    groups = {one["identity"]: _group_of(one, number) for one in record["groups"]}
    shift = record["created_wall_ns"] - record["created_ns"]
    for call in record["calls"]:
        group = groups.get(call["group"]) or RecordedGroup(f"{call['group']:x}-{number}", "?", 0, ())
        peer = call["root"]
        issued, started, ended = call["issued_ns"], call["started_ns"], call["ended_ns"]
        yield RecordedCall(
            group=group,
            sequence=call["sequence"],
            op=call["op"],
            text=call["call"],
            is_message=call["is_message"],
            peer=group.members[peer] if 0 <= peer < len(group.members) else peer,
            bytes=call["bytes"],
            state=call["state"],
            line=call["source"],
            issued=(shift + issued) / 1e9 if issued else 0.0,
            started=(shift + started) / 1e9 if started else 0.0,
            ended=(shift + ended) / 1e9 if ended else 0.0,
            record_index=call["index"],
        )


def _group_of(group: dict[str, Any], number: int) -> RecordedGroup:
    return RecordedGroup(f"{group['identity']:x}-{number}", group["name"], group["size"], tuple(group["members"]))
