"""The same program on torch.distributed with Gloo and on procgroup gives equal results.

Both are held against NumPy, to the bit: a case is right when every rank of both libraries has what NumPy says, or
when both refuse it. Where torch differs, deviations.py says so.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
import pytest
from parity import deviations
from parity.deviations import DEVIATIONS, WITNESS_SIZE
from parity.played import BEYOND_A_SEGMENT, PLAYED, SIZES, Report, every_case
from parity.probes import PROBES
from parity.worlds import World, play, probe
from seeded_cases import Case

from tiers import SAMPLED

SAMPLE = 30
"""Cases of each size, beside one of every third pair of operation and element type."""

SECONDS = 60.0 if SAMPLED else 600.0
"""For one world of at most 1,000 cases, on a machine that has other work."""

pytestmark = [pytest.mark.torch, pytest.mark.timeout(180 if SAMPLED else 3600)]

ALL_OF_OURS = list(product(["shm", "tcp"], ["numpy", "torch"]))


def sample(size: int) -> list[Case]:
    random = np.random.default_rng(size)
    small: dict[tuple[str, str], list[Case]] = defaultdict(list)
    large = []
    for case in every_case(size):
        if case.count < BEYOND_A_SEGMENT:
            small[case.operation, case.dtype].append(case)
        elif case.is_defined:
            large.append(case)
    kinds = list(small.values())
    one_of_each = [cases[random.integers(len(cases))] for cases in kinds[size % 3 :: 3]]
    more = [cases[random.integers(len(cases))] for cases in (kinds[random.integers(len(kinds))] for _ in range(SAMPLE))]
    return [*one_of_each, *more, *(large[random.integers(len(large))] for _ in range(8))]


def asked_of_torch(cases: Sequence[Case]) -> list[Case]:
    """Leave out what harms torch's ranks, and reductions without a meaning: what torch makes of them is its own."""
    defined = [case for case in cases if case.is_defined]
    return [case for case in defined if all(deviation.asked for deviation in deviations.of(case))]


@dataclass(frozen=True)
class Comparison:
    """Cases that torch's ranks and procgroup's play, the latter in several ways."""

    size: int
    cases: Sequence[Case]
    ours: Sequence[tuple[str, str]]

    def worlds(self) -> list[World]:
        ours = [World(self.size, self.cases, "procgroup", arrays, way, SECONDS) for way, arrays in self.ours]
        return [World(self.size, asked_of_torch(self.cases), "torch", seconds=SECONDS), *ours]

    def differences(self, theirs: Any, results: Sequence[Any]) -> list[str]:
        asked = by_case(asked_of_torch(self.cases), theirs)
        wrong = [text for case, reports in asked if (text := wrong_in_torch(self.size, case, reports))]
        for (transport, arrays), result in zip(self.ours, results, strict=True):
            wrong += [
                f"{case}, {self.size} ranks, {arrays} over {transport}: {text}"
                for case, reports in by_case(self.cases, result)
                if (text := wrong_in_ours(case, reports))
            ]
        return wrong


def compare(comparisons: Sequence[Comparison]) -> None:
    """Play cases on torch and on procgroup, and fail where either is not what it should be."""
    results = iter(play([world for comparison in comparisons for world in comparison.worlds()]))
    wrong = []
    for comparison in comparisons:
        theirs = next(results)
        wrong += comparison.differences(theirs, [next(results) for _ in comparison.ours])
    assert not wrong, f"{len(wrong)} differences:\n" + "\n".join(wrong[:20])


def by_case(cases: Sequence[Case], reports: Sequence[Sequence[Report]]) -> list[tuple[Case, list[Report]]]:
    return [(case, [rank[number] for rank in reports]) for number, case in enumerate(cases)]


def wrong_in_ours(case: Case, reports: Sequence[Report]) -> str:
    if not case.is_defined:
        accepted = [rank for rank, report in enumerate(reports) if not report.refused]
        return f"ranks {accepted} accepted it" if accepted else ""
    return "; ".join(f"rank {rank}: {text}" for rank, report in enumerate(reports) if (text := str_of(report)))


def wrong_in_torch(size: int, case: Case, reports: Sequence[Report]) -> str:
    """Tell what torch does that neither NumPy nor the table of deviations says; "" for nothing."""
    for deviation in deviations.of(case):
        if is_seen(deviation.refused, reports):
            return ""
    wrong = "; ".join(f"rank {rank}: {text}" for rank, report in enumerate(reports) if (text := str_of(report)))
    return f"{case}, {size} ranks of torch: {wrong}" if wrong else ""


def is_seen(refused: str, reports: Sequence[Report]) -> bool:
    """Return whether torch refused a case with such a text or, with none, gave wrong elements in silence."""
    if refused:
        return all(re.search(refused, report.refused) for report in reports)
    return any(report.wrong for report in reports) and not any(report.refused for report in reports)


def str_of(report: Report) -> str:
    return report.refused or report.wrong


@pytest.mark.skipif(not SAMPLED, reason="the whole product is played")
def test_a_sample_is_equal_on_torch_and_procgroup() -> None:
    compare([Comparison(size, sample(size), [ALL_OF_OURS[number % 4]]) for number, size in enumerate(SIZES)])


@pytest.mark.slow
@pytest.mark.parametrize(("size", "operation"), list(product(SIZES, PLAYED)))
def test_the_whole_product_is_equal_on_torch_and_procgroup(size: int, operation: str) -> None:
    cases = [case for case in every_case(size) if case.operation == operation]
    for start in range(0, len(cases), 1000):
        compare([Comparison(size, cases[start : start + 1000], ALL_OF_OURS)])


def test_torch_does_what_the_deviations_say_and_procgroup_does_not() -> None:
    witnesses = [deviation for deviation in DEVIATIONS if deviation.asked]
    cases = [deviation.witness for deviation in witnesses]
    ours = [deviation.witness for deviation in DEVIATIONS]
    theirs, results = play([World(WITNESS_SIZE, cases, "torch"), World(WITNESS_SIZE, ours, "procgroup")])
    for deviation, (case, reports) in zip(witnesses, by_case(cases, theirs), strict=True):
        assert is_seen(deviation.refused, reports), f"torch does not differ in {case}: {reports}"
    for case, reports in by_case(ours, results):
        assert not (text := wrong_in_ours(case, reports)), f"{case}: {text}"
    for number, one in enumerate(PROBES):
        for library, expected in (("torch", one.seen_in_torch), ("procgroup", one.seen_in_ours)):
            for rank, (pattern, seen) in enumerate(zip(expected, probe(number, library), strict=True)):
                assert re.search(pattern, seen), f"{one.what}: rank {rank} of {library} got {seen}"


def test_the_page_of_deviations_is_what_the_table_says() -> None:
    assert deviations.PAGE.read_text() == deviations.page(), "write it again with tests/parity/deviations.py"
