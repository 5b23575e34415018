"""The result as a picture, where matplotlib is installed."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from procgroup.diagnostics.bench.report import Report, size_text


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
