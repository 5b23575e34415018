"""Slurm's short form of lists of host names: ``n[1-3,07-09],login``."""

from __future__ import annotations

import itertools
import re

_MAX_HOSTS = 1_000_000
_NAME = r"(?:\[[^][]+\]|[^][,\s])+"


def expand_hosts(text: str) -> list[str]:
    """Return the host names of a list, in order, as ``scontrol show hostnames`` does.

    With several brackets in a name the last one varies fastest; ``[07-09]`` keeps the width of its numbers. Raises
    ValueError, which shows the list, for an invalid one.
    """
    if not re.fullmatch(rf"{_NAME}(?:,{_NAME})*", text):
        raise ValueError(f"expected a list of host names such as n[1-3,07-09],login, got {text!r}")
    return [host for name in re.findall(_NAME, text) for host in _expand_name(name, text)]


def _expand_name(name: str, text: str) -> list[str]:
    parts = re.split(r"\[([^][]*)\]", name)
    choices = [[part] if index % 2 == 0 else _expand_numbers(part, text) for index, part in enumerate(parts)]
    return ["".join(chosen) for chosen in itertools.product(*choices)]


def _expand_numbers(part: str, text: str) -> list[str]:
    """Return the numbers of one pair of brackets, as text."""
    numbers: list[str] = []
    for item in part.split(","):
        found = re.fullmatch(r"(\d+)(?:-(\d+))?", item, re.ASCII)
        first, last = (found[1], found[2] or found[1]) if found else ("1", "0")
        if not 0 <= int(last) - int(first) < _MAX_HOSTS:
            raise ValueError(f"expected numbers such as 1-3,07-09 in the brackets of the host list {text!r}")
        numbers += [str(number).zfill(len(first)) for number in range(int(first), int(last) + 1)]
    return numbers
