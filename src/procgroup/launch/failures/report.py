"""Find the rank that failed first of those of all nodes, and print the report at the job's end.

Words: a *failure* is a rank that ended with an error, not because the launcher ended it. A failure is *secondary* when
it only follows from another rank's end: the rank lost a peer, the store, or a connection to one of them. The *first*
failure is the one that the others follow from; its traceback ends the report, where it is seen first.

Clocks of different nodes are never compared. Between nodes the order decides in which the failures were posted, unless
a rank names the rank that it lost.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from procgroup.launch.failures.evidence import TRACEBACK_HEADER
from procgroup.launch.failures.failure import RankFailure
from procgroup.launch.output.log_options import format_ranks
from procgroup.process.environ import TORCHELASTIC_ERROR_FILE
from procgroup.process.error_file import pass_on
from procgroup.process.exit_reason import CALL

if TYPE_CHECKING:
    from procgroup.launch.output.job_output import JobOutput


def first_failure(failures: Sequence[RankFailure]) -> RankFailure:
    """Return the failure that the others follow from; ``failures`` are in the order in which they were posted."""
    causes = [failure for failure in failures if not failure.is_secondary]
    if not causes:
        return _end_of_blame(failures)
    blamed_ranks = {failure.blamed_rank for failure in failures}
    blamed_nodes = {failure.node_rank for failure in causes if failure.rank in blamed_ranks}
    return _earliest([failure for failure in causes if failure.node_rank in blamed_nodes] or causes)


def summary(failures: Sequence[RankFailure]) -> str:
    """Return in one line why the ranks of a node failed."""
    first = first_failure(failures)
    return f"rank {first.rank} ({first.host}, pid {first.pid}) failed: {first.reason}"


def report(
    failures: Sequence[RankFailure], ended: Sequence[int], left: Sequence[int], host: str, output: JobOutput
) -> None:
    """Print the job's failures after the ranks' output, as `describe` has them.

    The first failure is also written to the launcher's own error file, for the program that started the launcher.
    """
    output.finish()
    output.put(describe(failures, ended, left, host))
    _pass_on(first_failure(failures), output)


def read(records: Sequence[str], own: Sequence[RankFailure]) -> list[RankFailure]:
    """Read the records of all nodes, in the order in which the nodes posted them.

    A record of one of this node's ``own`` failures is replaced by that failure, which holds more. Unreadable records
    are left out.
    """
    of_own = {(failure.node_rank, failure.rank, failure.pid): failure for failure in own}
    failures: list[RankFailure] = []
    for record in records:
        try:
            failure = RankFailure.from_json(record)
        except ValueError:
            continue
        failures.append(of_own.get((failure.node_rank, failure.rank, failure.pid), failure))
    return failures


def describe(failures: Sequence[RankFailure], ended: Sequence[int], left: Sequence[int], host: str) -> str:
    """Return the report: one line for each other failure, then the first failure.

    ``ended`` are the ranks that the launcher ended. ``left`` are those that ended by themselves with status 0; they are
    named where the first failure is secondary, because they explain it. ``host`` is the host of failures without one.
    """
    first = first_failure(failures)
    others = sorted((failure for failure in failures if failure is not first), key=_node_and_time)
    lines = [f"{line}\n" for line in _after(others, first)]
    if ended:
        lines.append(f"{_ranks(ended, 'was', 'were')} ended by the launcher\n")
    if left and first.is_secondary:
        lines.append(f"{_ranks(left, 'had', 'had')} ended with exit status 0\n")
    evidence = first.evidence
    is_in_evidence = TRACEBACK_HEADER in evidence and _is_of_a_call(first)  # a long text
    reason = first.exception_name if is_in_evidence else first.reason
    lines.append(f"rank {first.rank} ({first.host or host}, pid {first.pid}) failed first: {reason}\n")
    return "".join(lines) + (evidence if not evidence or evidence.endswith("\n") else evidence + "\n")


def _end_of_blame(failures: Sequence[RankFailure]) -> RankFailure:
    """Follow the blame from failure to failure to its end; in a cycle, return the earliest failure."""
    of_rank = {failure.rank: failure for failure in failures}
    earliest = found = _earliest(failures)
    for _ in failures:
        blamed = found.blamed_rank
        if blamed is None or blamed not in of_rank:
            return found
        found = of_rank[blamed]
    return earliest


def _earliest(failures: Sequence[RankFailure]) -> RankFailure:
    """Return the earliest failure of the node that posted its failures first."""
    node = failures[0].node_rank
    return min((failure for failure in failures if failure.node_rank == node), key=lambda failure: failure.time)


def _node_and_time(failure: RankFailure) -> tuple[int, float]:
    return failure.node_rank, failure.time


def _after(others: Sequence[RankFailure], first: RankFailure) -> Iterator[str]:
    """Give a line for each failure after the first one; those that say the same of it share one."""
    same = [other for other in others if other.exception_name == first.exception_name]
    of_call = [other for other in same if _is_of_a_call(other) and _is_of_a_call(first)]
    of_loss = [other for other in others if other.blamed_rank == first.rank]
    if of_call:
        yield f"{_name_ranks(of_call)} failed after that: the same {first.exception_name}"
    told = list(of_call)
    for what in dict.fromkeys(map(_without_numbers, of_loss)):
        alike = [other for other in of_loss if _without_numbers(other) == what]
        if len(alike) > 1:
            yield f"{_name_ranks(alike)} failed after that, having lost rank {first.rank}: {alike[0].reason}"
            told += alike
    for other in others:
        if other not in told:
            where = f"{other.host}, " if other.host != first.host else ""
            yield f"rank {other.rank} ({where}pid {other.pid}) failed after that: {other.reason}"


def _without_numbers(failure: RankFailure) -> str:
    """Return what ranks that lost one and the same rank say alike: their numbers differ, and who waited for whom."""
    name = failure.exception_name
    return name if name in ("GroupBroken", "PeerFailed", "PeerLost") else re.sub(r"\d+", "", failure.reason)


def _is_of_a_call(failure: RankFailure) -> bool:
    """Return whether a rank failed, by its record, in a call whose ranks all raise the same error."""
    return failure.origin is not None and failure.origin.kind == CALL


def _name_ranks(failures: Sequence[RankFailure]) -> str:
    ranks = sorted(failure.rank for failure in failures)
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {format_ranks(ranks)}"


def _ranks(ranks: Sequence[int], one: str, many: str) -> str:
    return f"rank {ranks[0]} {one}" if len(ranks) == 1 else f"ranks {format_ranks(ranks)} {many}"


def _pass_on(first: RankFailure, output: JobOutput) -> None:
    path = TORCHELASTIC_ERROR_FILE.get()
    if not path:
        return
    try:
        pass_on(Path(path), first.record, message=first.reason, traceback=first.evidence, exit_code=first.exit_code)
    except OSError as error:
        output.say(f"cannot write TORCHELASTIC_ERROR_FILE={path}: {error.strerror}")
