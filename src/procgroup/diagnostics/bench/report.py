"""The result: a table and a picture for people, JSON for programs."""

from __future__ import annotations

import os
import platform
import re
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from procgroup.diagnostics.bench.rounds import SizeResult

_UNITS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


@dataclass(frozen=True)
class Report:
    """One interleaved run: ``descriptions`` and ``idle_ns`` by peer, ``left_out`` with the reasons."""

    operation: str
    ranks: int
    reference: str
    descriptions: dict[str, str]
    results: Sequence[SizeResult]
    left_out: dict[str, str]
    idle_ns: dict[str, int]
    dtype: str = "float32"

    @property
    def title(self) -> str:
        cores = len(os.sched_getaffinity(0))
        return f"{self.operation}, {self.dtype}, {self.ranks} ranks on {cores} core{'' if cores == 1 else 's'}"

    @property
    def caption(self) -> str:
        return f"ratio: time of the peer / time of {self.reference}, per round" if self.compares else ""

    @property
    def compares(self) -> bool:
        """Whether several peers were measured; of one alone there are no ratios."""
        return len({name for result in self.results for name in result.rounds}) > 1

    @property
    def headings(self) -> list[str]:
        times = ["bytes", "peer", "median µs", "minimum µs"]
        return [*times, "ratio", "95 % interval", f"{self.reference} is"] if self.compares else times

    def sections(self) -> list[list[list[str]]]:
        """Return the rows of the table, as texts, by size."""
        columns = len(self.headings)
        return [[self._row(result, name)[:columns] for name in result.rounds] for result in self.results]

    def _row(self, result: SizeResult, name: str) -> list[str]:
        cells = [
            size_text(result.size),
            name,
            _microseconds(result.median_ns(name)),
            _microseconds(result.minimum_ns(name)),
        ]
        ratio = None if name == self.reference else result.ratio(name, self.reference)
        if ratio is None:
            return [*cells, "", "", ""]
        return [*cells, _digits(ratio.mean), f"{_digits(ratio.low)} to {_digits(ratio.high)}", ratio.verdict]

    def as_dict(self) -> dict[str, Any]:
        """Return everything as JSON values; times in nanoseconds per call."""
        return {
            "operation": self.operation,
            "dtype": self.dtype,
            "ranks": self.ranks,
            "reference": self.reference,
            "machine": machine(),
            "peers": self.descriptions,
            "left_out": self.left_out,
            "idle_processor_ns": self.idle_ns,
            "sizes": [{"bytes": result.size, "peers": self._peers_as_dict(result)} for result in self.results],
        }

    def _peers_as_dict(self, result: SizeResult) -> dict[str, Any]:
        peers = {}
        for name, rounds in result.rounds.items():
            ratio = result.ratio(name, self.reference)
            peers[name] = {
                "median_ns": result.median_ns(name),
                "minimum_ns": result.minimum_ns(name),
                "rounds": [asdict(one) for one in rounds],
                "ratio": None if ratio is None else {**asdict(ratio), "verdict": ratio.verdict},
            }
        return peers


def machine() -> dict[str, Any]:
    """Return what the times depend on: processor, usable cores, system, load when asked."""
    model = re.search(r"model name\s*:\s*(.+)", Path("/proc/cpuinfo").read_text())
    return {
        "processor": model.group(1) if model else platform.processor(),
        "usable_cores": len(os.sched_getaffinity(0)),
        "system": platform.platform(),
        "python": platform.python_version(),
        "load_average": os.getloadavg()[0],
    }


def size_text(size: int) -> str:
    """Return a size as people write it: 8, 64K, 1M."""
    for unit in ("G", "M", "K"):
        if size and size % _UNITS[unit] == 0:
            return f"{size // _UNITS[unit]}{unit}"
    return str(size)


def parse_size(text: str, itemsize: int = 4) -> int:
    """Return the bytes that ``8``, ``64K`` or ``1M`` stand for; a multiple of the element's size, else ValueError."""
    match = re.fullmatch(r"(\d+)([KMG]?)", text.strip().upper())
    size = int(match.group(1)) * _UNITS.get(match.group(2), 1) if match else 0
    if size < itemsize or size % itemsize:
        raise ValueError(f"expected a size like 8, 64K or 1M, whole elements of {itemsize} bytes; got {text!r}")
    return size


def _microseconds(nanoseconds: float) -> str:
    return _digits(nanoseconds / 1000)


def _digits(value: float) -> str:
    """Return a positive number with about three digits, never in powers of ten."""
    decimals = 0 if value >= 1000 else 1 if value >= 10 else 2 if value >= 1 else 3
    return f"{value:,.{decimals}f}"


_WIDTH_OF_FILES = 110
_TEXT_COLUMNS = (1, 6)
"""The columns that are aligned to the left: the peer, and the verdict."""


def show(report: Report) -> None:
    """Print the table on stdout."""
    try:
        import rich.console
        import rich.table
    except ImportError:
        print(plain(report))
        return
    table = rich.table.Table(title=report.title, caption=report.caption or None)
    for column, heading in enumerate(report.headings):
        table.add_column(heading, justify="left" if column in _TEXT_COLUMNS else "right")
    for section in report.sections():
        for row in section:
            table.add_row(*row)
        table.add_section()
    width = None if sys.stdout.isatty() else _WIDTH_OF_FILES
    rich.console.Console(width=width, highlight=False).print(table)


def plain(report: Report) -> str:
    """Return the table as text: its title, the headings, the rows with an empty line after each size, its caption."""
    sections = [[report.headings], *report.sections()]
    widths = [max(map(len, cells)) for cells in zip(*(row for section in sections for row in section), strict=True)]
    lines = [report.title, ""]
    for section in sections:
        lines += ["  ".join(map(_aligned, enumerate(row), widths)).rstrip() for row in section] + [""]
    return "\n".join([*lines, report.caption]).rstrip()


def _aligned(cell: tuple[int, str], width: int) -> str:
    column, text = cell
    return text.ljust(width) if column in _TEXT_COLUMNS else text.rjust(width)


def require_matplotlib() -> None:
    """Raise ValueError, which says what to install, where there is no matplotlib."""
    if find_spec("matplotlib") is None:
        raise ValueError("--plot draws with matplotlib, which is not installed: pip install matplotlib")


def draw(reports: Sequence[Report], path: Path) -> None:
    """Draw, for each operation, every peer's median time over the size; the shade begins at its fastest sample."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.5 * len(reports), 4.5), layout="constrained")
    panels = figure.subplots(1, len(reports), squeeze=False)[0]
    for report, panel in zip(reports, panels, strict=True):
        for name in report.descriptions:
            points = [
                (result.size, result.median_ns(name) / 1000, result.minimum_ns(name) / 1000)
                for result in report.results
                if name in result.rounds
            ]
            if points:
                sizes, medians, minima = zip(*points, strict=True)
                (line,) = panel.plot(sizes, medians, marker="o", label=name)
                panel.fill_between(sizes, minima, medians, color=line.get_color(), alpha=0.2, linewidth=0)
        ticks = [result.size for result in report.results]
        panel.set(xscale="log", yscale="log", title=f"{report.operation}, {report.dtype}, {report.ranks} ranks")
        panel.set(xlabel="bytes", ylabel="\u00b5s per call: median, shaded to the minimum")
        panel.set_xticks(ticks, [size_text(size) for size in ticks], minor=False)
        panel.set_xticks([], minor=True)
        panel.grid(visible=True, alpha=0.3)
        panel.legend()
    figure.savefig(path, dpi=150)
