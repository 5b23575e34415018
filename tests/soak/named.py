"""Which ranks an error names."""

from __future__ import annotations

import re

import procgroup as dist


def named_by(error: dist.DistError) -> set[int]:
    """Return the global ranks that an error names, but for the one that raised it."""
    if isinstance(error, dist.OperationError):
        return _named_by_call(error) - {error.global_rank}
    if isinstance(error, dist.RendezvousTimeout):
        return set(error.missing)
    return ranks_in(str(error))


def _named_by_call(error: dist.OperationError) -> set[int]:
    if isinstance(error, dist.PeerLost):
        return {error.global_peer}
    if isinstance(error, dist.PeerFailed):
        return {error.global_peer, *(error.members[rank] for rank in error.missing), *ranks_in(error.reason)}
    if isinstance(error, dist.CollectiveTimeout):
        beyond = re.findall(r"waiting for ranks? [\d, ]+", " ".join(error.calls.values()))
        return {error.members[rank] for rank in (*error.missing, *error.calls)} | ranks_in("; ".join(beyond))
    if isinstance(error, dist.CollectiveMismatch):
        mine = error.calls[error.rank]
        return {error.members[rank] for rank, call in error.calls.items() if call != mine}
    if isinstance(error, dist.GroupBroken):
        return ranks_in(error.reason)
    return set(error.waits) if isinstance(error, dist.Deadlock) else set()


def ranks_in(text: str) -> set[int]:
    """Return the global ranks in a text: "lost rank 3 (rank 1 of group 2) (pid 4)"."""
    lists = re.findall(r"(?<!\()ranks? ([\d, ]+)", text)
    return {int(number) for ranks in lists for number in re.findall(r"\d+", ranks)}
