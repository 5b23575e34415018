"""Totals over all calls of a rank, whose record holds the newest ones only."""

from __future__ import annotations

from collections import defaultdict
from typing import NamedTuple

from procgroup.diagnostics.recorded_job.job import Rank, RecordedCall
from procgroup.diagnostics.recorded_job.reading import RECORDED_CALLS


class Total(NamedTuple):
    """Over the ended calls of an operation: their number, their bytes, the seconds that they took."""

    calls: float = 0.0
    bytes: float = 0.0
    seconds: float = 0.0


class Totals:
    """The totals of a rank by operation, counted on at each look at its record."""

    def __init__(self) -> None:
        self._recorded = 0
        self._counted: set[tuple[str, int]] = set()
        self._by_operation: dict[str, Total] = defaultdict(Total)

    def count(self, rank: Rank) -> dict[str, Total]:
        """Count the calls that have ended since the last look; return all totals.

        Where more calls came than a record holds, those that are lost are taken to be like the others.
        """
        ended = {_identity(call): call for call in rank.calls if call.ended}
        fresh = [call for identity, call in ended.items() if identity not in self._counted]
        added = rank.recorded - self._recorded
        weight = added / len(fresh) if fresh and added > RECORDED_CALLS else 1.0
        for call in fresh:
            before = self._by_operation[call.op]
            self._by_operation[call.op] = Total(
                before.calls + weight,
                before.bytes + weight * call.bytes,
                before.seconds + weight * max(call.ended - call.started, 0.0),
            )
        self._recorded, self._counted = rank.recorded, set(ended)
        return self._by_operation


def _identity(call: RecordedCall) -> tuple[str, int]:
    return call.group.key, call.record_index
