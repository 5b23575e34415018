"""Which rank failed first, and the report that names it.

Words: a *failure* is a rank that ended with an error on its own account, not because the launcher ended it.
It is *secondary* when it only follows from another rank's end: the rank lost a peer, the store, or a connection to
one of them. The *first* failure is the one that the others follow from; its traceback ends the report, where the eye
falls on it.

Clocks of different nodes are never compared. Failures of several nodes come in the order in which they were posted;
between nodes, that order decides, unless a rank names the rank whose failure it met.
"""

from __future__ import annotations

from collections.abc import Sequence

from procgroup.launch.failures.evidence import TRACEBACK_HEADER
from procgroup.launch.failures.failure import Failure
from procgroup.launch.output.rank_ranges import format_ranks

# Errors of which all ranks of a call have one each, in the same words but for the order of the ranks.
_SHARED = frozenset({"CollectiveMismatch", "Deadlock"})


def first_failure(failures: Sequence[Failure]) -> Failure:
    """Return the failure that the others follow from; failures of several nodes in the order of their posting."""
    causes = [failure for failure in failures if not failure.is_secondary]
    if not causes:
        return _end_of_blame(failures)
    blamed_ranks = {failure.blamed_rank for failure in failures}
    blamed_nodes = {failure.node_rank for failure in causes if failure.rank in blamed_ranks}
    return _earliest([failure for failure in causes if failure.node_rank in blamed_nodes] or causes)


def describe(failures: Sequence[Failure], ended: Sequence[int], left: Sequence[int], host: str) -> str:
    """Return the report: the other failures in one line each, then the first.

    ``ended`` are the ranks that the launcher ended; ``left`` those that ended by themselves without an error,
    which explain a first failure that only says that a peer was lost. ``host`` is that of failures without one.
    """
    first = first_failure(failures)
    others = sorted((failure for failure in failures if failure is not first), key=_node_and_time)
    lines = [f"{_place_after(other, first)} failed after that: {_reason_after(other, first)}\n" for other in others]
    if ended:
        lines.append(f"{_ranks(ended, 'was', 'were')} ended by the launcher\n")
    if left and first.is_secondary:
        lines.append(f"{_ranks(left, 'had', 'had')} ended with exit status 0\n")
    evidence = first.evidence
    is_said_below = TRACEBACK_HEADER in evidence and first.exception_name in _SHARED  # in many words
    reason = first.exception_name if is_said_below else first.reason
    lines.append(f"rank {first.rank} ({first.host or host}, pid {first.pid}) failed first: {reason}\n")
    return "".join(lines) + (evidence if not evidence or evidence.endswith("\n") else evidence + "\n")


def _end_of_blame(failures: Sequence[Failure]) -> Failure:
    """Follow the ranks that name each other as lost or failed; in a circle, return the earliest failure."""
    of_rank = {failure.rank: failure for failure in failures}
    earliest = found = _earliest(failures)
    for _ in failures:
        blamed = found.blamed_rank
        if blamed is None or blamed not in of_rank:
            return found
        found = of_rank[blamed]
    return earliest


def _earliest(failures: Sequence[Failure]) -> Failure:
    """Return the earliest failure of the node that posted first."""
    node = failures[0].node_rank
    return min((failure for failure in failures if failure.node_rank == node), key=lambda failure: failure.time)


def _node_and_time(failure: Failure) -> tuple[int, float]:
    return failure.node_rank, failure.time


def _place_after(failure: Failure, first: Failure) -> str:
    where = f"{failure.host}, " if failure.host != first.host else ""
    return f"rank {failure.rank} ({where}pid {failure.pid})"


def _reason_after(failure: Failure, first: Failure) -> str:
    """Return why a rank failed after the first one, but not what the report says below anyway."""
    name = failure.exception_name
    return f"the same {name}" if name == first.exception_name and name in _SHARED else failure.reason


def _ranks(ranks: Sequence[int], one: str, many: str) -> str:
    return f"rank {ranks[0]} {one}" if len(ranks) == 1 else f"ranks {format_ranks(ranks)} {many}"
