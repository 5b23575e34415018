from __future__ import annotations

import math
import random

import pytest

from procgroup.diagnostics.bench.intervals import Ratio, ratio_of_rounds, student_t_bound


@pytest.mark.parametrize(
    ("freedom", "bound"),
    [(1, 12.7062), (2, 4.3027), (3, 3.1824), (4, 2.7764), (9, 2.2622), (10, 2.2281), (1000, 1.9623)],
)
def test_student_bounds_are_those_of_the_printed_tables(freedom: int, bound: float) -> None:
    assert student_t_bound(0.95, freedom) == pytest.approx(bound, abs=1e-4)


@pytest.mark.parametrize("rounds", [2, 5, 10])
def test_the_interval_holds_the_true_ratio_95_times_of_100(rounds: int) -> None:
    source = random.Random(rounds)
    truth, runs, held = 1.3, 2000, 0
    for _ in range(runs):
        # The machine's drift hits both alike; what is left differs by 10 % from round to round.
        drift = [source.lognormvariate(0, 1.0) for _ in range(rounds)]
        reference = [value * source.lognormvariate(0, 0.1) for value in drift]
        peer = [value * truth * source.lognormvariate(0, 0.1) for value in drift]
        ratio = ratio_of_rounds(peer, reference)
        held += ratio.low <= truth <= ratio.high
    assert 0.935 < held / runs < 0.965


def test_the_mean_is_geometric_so_that_swapping_the_sides_inverts_it() -> None:
    times, others = [2.0, 8.0, 3.0], [1.0, 2.0, 4.0]
    one, other = ratio_of_rounds(times, others), ratio_of_rounds(others, times)
    assert one.mean == pytest.approx(math.prod(a / b for a, b in zip(times, others, strict=True)) ** (1 / 3))
    assert (one.low * other.high, one.mean * other.mean) == (pytest.approx(1), pytest.approx(1))


def test_one_round_proves_nothing() -> None:
    ratio = ratio_of_rounds([50.0], [1.0])
    assert (ratio.mean, ratio.low, ratio.high, ratio.verdict) == (pytest.approx(50), 0.0, math.inf, "open")


@pytest.mark.parametrize(
    ("low", "high", "verdict"), [(1.01, 2, "ahead"), (0.5, 0.99, "behind"), (0.99, 1.01, "open"), (1.0, 2, "open")]
)
def test_ahead_means_that_the_interval_excludes_one(low: float, high: float, verdict: str) -> None:
    assert Ratio(1.0, low, high, 10).verdict == verdict


def test_equal_rounds_give_an_interval_without_width() -> None:
    ratio = ratio_of_rounds([3.0, 6.0], [1.0, 2.0])
    assert (ratio.low, ratio.high) == (pytest.approx(3), pytest.approx(3))


@pytest.mark.parametrize(("peer", "reference"), [([], []), ([1.0], [1.0, 2.0]), ([0.0], [1.0]), ([1.0], [-1.0])])
def test_rounds_that_do_not_pair_or_are_not_positive_are_refused(peer: list[float], reference: list[float]) -> None:
    with pytest.raises(ValueError, match="expected"):
        ratio_of_rounds(peer, reference)


@pytest.mark.parametrize(("confidence", "freedom"), [(0.0, 3), (1.0, 3), (0.95, 0)])
def test_bounds_that_do_not_exist_are_refused(confidence: float, freedom: int) -> None:
    with pytest.raises(ValueError, match="expected"):
        student_t_bound(confidence, freedom)
