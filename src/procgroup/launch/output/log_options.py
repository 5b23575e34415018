"""The flags about output: which lines are shown on the console, and which are written to files.

Each function reads the value of one flag. It raises ValueError, which shows an unusable value.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import NamedTuple

from procgroup.process.environ import TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE

STDOUT, STDERR = 0, 1
"""The streams of a rank, as indices."""

ONE_NODE_PREFIX = "[rank {rank}] "
SEVERAL_NODES_PREFIX = "[rank {rank} {host}] "

_FIELDS = ("rank", "local_rank", "node_rank", "host", "role")
_FIELD = re.compile(r"\{(\w+)\}")
_TORCH_FIELD = re.compile(r"\$\{(\w+)\}")
_TORCH_FIELDS = {"role_name": "role", "rank": "rank", "local_rank": "local_rank"}
_STREAMS = re.compile(r"[0-3]")
_RANK_STREAMS = re.compile(r"(\d{1,6}):([0-3])", re.ASCII)


class Streams(NamedTuple):
    """Which streams of which local ranks: 0 none, 1 stdout, 2 stderr, 3 both."""

    of_all: int = 0
    of_rank: Mapping[int, int] = MappingProxyType({})

    def has(self, local_rank: int, stream: int) -> bool:
        """Return whether a stream of a local rank, STDOUT or STDERR, is selected."""
        return bool(self.of_rank.get(local_rank, self.of_all) >> stream & 1)

    def __bool__(self) -> bool:
        return bool(self.of_all or any(self.of_rank.values()))


class LogOptions(NamedTuple):
    """The values of the flags. ``prefix`` is a template (None: the default); None for ranks means all ranks."""

    directory: str = ""
    prefix: str | None = None
    redirects: Streams = Streams()
    tee: Streams = Streams()
    shown_ranks: frozenset[int] | None = None
    shown_local_ranks: frozenset[int] | None = None
    filters: tuple[tuple[str, ...], tuple[str, ...]] = ((), ())
    collapse: str = "auto"

    def shows(self, rank: int, local_rank: int, stream: int) -> bool:
        """Return whether a stream of a rank appears on the console."""
        is_chosen = self.shown_ranks is None or rank in self.shown_ranks
        is_chosen = is_chosen and (self.shown_local_ranks is None or local_rank in self.shown_local_ranks)
        return is_chosen and (self.tee.has(local_rank, stream) or not self.redirects.has(local_rank, stream))

    def keeps(self, local_rank: int, stream: int) -> bool:
        """Return whether a stream of a rank is written to a file: with a log directory every stream is."""
        asked = self.tee.has(local_rank, stream) or self.redirects.has(local_rank, stream)
        return bool(self.directory) or asked


def streams(text: str) -> Streams:
    """Read "3" for all ranks, or "0:1,10:3" by local rank: 0 none, 1 stdout, 2 stderr, 3 both."""
    if _STREAMS.fullmatch(text):
        return Streams(int(text))
    of_rank: dict[int, int] = {}
    for part in text.split(","):
        match = _RANK_STREAMS.fullmatch(part.strip())
        if match is None:
            raise ValueError(f"expected 0 (none), 1 (stdout), 2 (stderr), 3 (both), or 0:1,10:3, got {text!r}")
        if int(match[1]) in of_rank:
            raise ValueError(f"local rank {int(match[1])} is given twice in {text!r}")
        of_rank[int(match[1])] = int(match[2])
    return Streams(0, of_rank)


def filters(text: str) -> tuple[str, ...]:
    """Read words separated by commas; two commas mean one comma in a word."""
    words = text.replace(",,", "\0").split(",") if text else []
    found = tuple(word.replace("\0", ",") for word in words)
    if not all(found):
        raise ValueError(f"expected words separated by commas, got an empty one in {text!r}")
    return found


def prefix(text: str) -> str:
    """Read a template such as "[r{rank} {host}]"; a space follows it, unless it ends with one or is empty."""
    for name in _FIELD.findall(text):
        if name not in _FIELDS:
            known = ", ".join(f"{{{known}}}" for known in _FIELDS)
            raise ValueError(f"expected {known} in the template, got {{{name}}} in {text!r}")
    if not text.isprintable():
        raise ValueError(f"expected one line of printable text, got {text!r}")
    return text if not text or text.endswith(" ") else text + " "


def prefix_template(given: str | None, nodes: int) -> str:
    """Return the template to use: the flag's, else that of torch's variable, else the default.

    Raises ValueError when the variable names a field that does not exist.
    """
    of_torch = TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE.get()
    if given is not None:
        return given
    if not of_torch:
        return ONE_NODE_PREFIX if nodes == 1 else SEVERAL_NODES_PREFIX
    try:
        return from_torch_template(of_torch)
    except ValueError as error:
        raise ValueError(f"environment variable {TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE.name}: {error}") from None


def from_torch_template(text: str) -> str:
    """Convert torch's template, such as "[${role_name}${local_rank}]:", to the form of ``--log-prefix``.

    Raises ValueError for a field that does not exist.
    """
    for name in _TORCH_FIELD.findall(text):
        if name not in _TORCH_FIELDS:
            known = ", ".join(f"${{{known}}}" for known in _TORCH_FIELDS)
            raise ValueError(f"expected {known}, got ${{{name}}}")
    return _TORCH_FIELD.sub(lambda match: f"{{{_TORCH_FIELDS[match[1]]}}}", text)


def fill_prefix(template: str, **values: object) -> str:
    """Return a rank's prefix: the template with the values of rank, local_rank, node_rank, host and role."""
    return _FIELD.sub(lambda match: str(values[match[1]]) if match[1] in values else match[0], template)


def chosen_ranks(text: str) -> frozenset[int] | None:
    """Read ranks such as "0,3-5"; an empty text means all of them, and gives None."""
    return parse_ranks(text) if text else None


def collapse(text: str) -> str:
    """Read auto, always or never."""
    if text not in ("auto", "always", "never"):
        raise ValueError(f"expected auto, always or never, got {text!r}")
    return text


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
