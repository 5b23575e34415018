"""The table of a report: drawn by rich where it is installed, and the same in plain text where it is not."""

from __future__ import annotations

import sys

import pytest

from procgroup.diagnostics.bench.report import Report, plain, show
from procgroup.diagnostics.bench.rounds import BenchRound, SizeResult

RESULTS = [
    SizeResult(8, {"procgroup": [BenchRound(600.0, 500.0)] * 4, "gloo": [BenchRound(6000.0, 5000.0)] * 4}),
    SizeResult(1 << 20, {"procgroup": [BenchRound(2e6, 1e6)] * 4, "gloo": [BenchRound(1e6, 1e6)] * 4}),
]


@pytest.fixture
def report() -> Report:
    return Report("all_reduce", 2, "procgroup", {}, RESULTS, {}, {})


def test_plain_text_has_every_row_in_columns(report: Report) -> None:
    lines = plain(report).splitlines()
    assert lines[0].startswith("all_reduce, float32, 2 ranks on ")
    assert [line.split()[:2] for line in lines if line and line.split()[0] in ("8", "1M")] == [
        ["8", "procgroup"],
        ["8", "gloo"],
        ["1M", "procgroup"],
        ["1M", "gloo"],
    ]
    heading = next(line for line in lines if "median" in line)
    row = next(line for line in lines if line.split()[:2] == ["8", "gloo"])
    assert row[: heading.index("median µs") + len("median µs")].endswith(" 6.00")
    assert lines[-1] == "ratio: time of the peer / time of procgroup, per round"
    assert not any(line.endswith(" ") for line in lines)


def test_without_rich_the_table_is_plain(
    report: Report, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "rich.console", None)
    show(report)
    assert capsys.readouterr().out == plain(report) + "\n"


def test_rich_draws_the_same_cells(report: Report, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("rich")
    show(report)
    drawn = capsys.readouterr().out
    assert "│" in drawn
    for section in report.sections():
        assert all(cell in drawn for row in section for cell in row)
