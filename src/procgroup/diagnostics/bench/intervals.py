"""How sure a ratio is: the confidence interval of the geometric mean of per-round ratios.

The logarithms of the ratios are taken as independent and about normal, which gives Student's t interval. A
bootstrap over ten rounds would be too narrow (its 95 % interval holds the truth about 90 % of the time).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Verdict = Literal["ahead", "behind", "open"]


@dataclass(frozen=True)
class Ratio:
    """Time of a peer divided by the time of the reference: above 1, the reference is faster."""

    mean: float
    low: float
    high: float
    rounds: int

    @property
    def verdict(self) -> Verdict:
        """``ahead``: the whole interval says that the reference is faster; ``behind``: slower; else ``open``."""
        if self.low > 1:
            return "ahead"
        return "behind" if self.high < 1 else "open"


def ratio_of_rounds(peer: Sequence[float], reference: Sequence[float], confidence: float = 0.95) -> Ratio:
    """Return the geometric mean of ``peer[i] / reference[i]`` and its interval.

    Times are of any one unit, one per round. One round alone gives the interval from 0 to infinity.
    Raises ValueError when there are no rounds, not equally many, or a time is not positive.
    """
    if len(peer) != len(reference) or not peer:
        raise ValueError(f"expected as many rounds of both, at least one; got {len(peer)} and {len(reference)}")
    if min(*peer, *reference) <= 0:
        raise ValueError(f"expected positive times, got {min(*peer, *reference)}")
    logarithms = [math.log(a / b) for a, b in zip(peer, reference, strict=True)]
    count = len(logarithms)
    mean = math.fsum(logarithms) / count
    if count == 1:
        return Ratio(math.exp(mean), 0.0, math.inf, 1)
    variance = math.fsum((value - mean) ** 2 for value in logarithms) / (count - 1)
    half = student_t_bound(confidence, count - 1) * math.sqrt(variance / count)
    return Ratio(math.exp(mean), math.exp(mean - half), math.exp(mean + half), count)


def student_t_bound(confidence: float, freedom: int) -> float:
    """Return t such that a Student variable of ``freedom`` degrees is within -t and t with that probability."""
    if not 0 < confidence < 1 or freedom < 1:
        raise ValueError(f"expected 0 < confidence < 1 and freedom >= 1, got {confidence} and {freedom}")
    high = 1.0
    while _student_t_inside(high, freedom) < confidence:
        high *= 2
    low = 0.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if _student_t_inside(middle, freedom) < confidence else (low, middle)
    return high


def _student_t_inside(t: float, freedom: int) -> float:
    """Return the probability of -t < T < t (Abramowitz and Stegun, 26.7.3 for odd and 26.7.4 for even degrees)."""
    angle = math.atan(t / math.sqrt(freedom))
    cosine = math.cos(angle)
    odd = freedom % 2
    term = cosine if odd else 1.0
    total = 0.0
    for step in range(1, freedom // 2 + 1):
        total += term
        term *= cosine * cosine * (2 * step - 1 + odd) / (2 * step + odd)
    if odd:
        return 2 / math.pi * (angle + math.sin(angle) * total)
    return math.sin(angle) * total
