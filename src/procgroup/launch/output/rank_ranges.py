"""Sets of ranks as people write them: "0, 2, 5-9"."""

from __future__ import annotations

from collections.abc import Iterable

_MOST_DIGITS = 6


def format_ranks(ranks: Iterable[int]) -> str:
    """Return "0, 2, 5-9": sorted, with three consecutive ranks or more as a range."""
    spans: list[list[int]] = []
    for rank in sorted(set(ranks)):
        if spans and rank == spans[-1][-1] + 1:
            spans[-1].append(rank)
        else:
            spans.append([rank])
    return ", ".join(f"{span[0]}-{span[-1]}" if len(span) > 2 else ", ".join(map(str, span)) for span in spans)


def parse_ranks(text: str) -> frozenset[int]:
    """Read "0,3-5" as {0, 3, 4, 5}. Raises ValueError, which shows the text, for anything else."""
    ranks: set[int] = set()
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        bounds = (first, last if dash else first)
        if not all(bound.isascii() and bound.isdigit() and len(bound) <= _MOST_DIGITS for bound in bounds):
            raise ValueError(f"expected ranks such as 0,3-5, got {text!r}")
        if int(bounds[0]) > int(bounds[1]):
            raise ValueError(f"expected the smaller rank first, got {part.strip()!r} in {text!r}")
        ranks.update(range(int(bounds[0]), int(bounds[1]) + 1))
    return frozenset(ranks)
