"""The report as text, and as a JSON document."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TextIO

from procgroup.diagnostics.doctor.findings import Finding, Level, Section, count
from procgroup.environ import NO_COLOR, TERM

FORMAT = 1
"""The version of the JSON document: raised when a field changes its meaning or is removed."""

_COLOURS = {Level.OK: "32", Level.NOTE: "2", Level.WARNING: "33", Level.PROBLEM: "31"}
_WIDTH = max(map(len, Level))


class HostReport(NamedTuple):
    """The findings about one host: its name, its ranks in the job, its sections."""

    name: str
    ranks: Sequence[int]
    sections: Sequence[Section]


class Report(NamedTuple):
    """The findings about all hosts, about the hosts against each other, and the measured values behind these."""

    hosts: Sequence[HostReport]
    between: Sequence[Section] = ()
    measured: Mapping[str, Any] = {}

    def count(self, level: Level) -> int:
        """Return the number of findings of this level."""
        return sum(count(host.sections, level) for host in self.hosts) + count(self.between, level)

    def exit_status(self, *, strict: bool) -> int:
        """Return 1 when there are problems, or, if ``strict``, warnings; else 0."""
        return 1 if self.count(Level.PROBLEM) or (strict and self.count(Level.WARNING)) else 0


def document(report: Report, *, strict: bool) -> dict[str, Any]:
    """Return the report as JSON values."""
    return {
        "format": FORMAT,
        "exit_status": report.exit_status(strict=strict),
        "problems": report.count(Level.PROBLEM),
        "warnings": report.count(Level.WARNING),
        "hosts": [
            {"name": host.name, "ranks": list(host.ranks), "sections": [one.as_dict() for one in host.sections]}
            for host in report.hosts
        ],
        "between_hosts": [section.as_dict() for section in report.between],
        "measured": dict(report.measured),
    }


def text(report: Report, *, has_colours: bool = False, verbose: bool = False) -> str:
    """Return the report as lines of text.

    Of several hosts, only warnings and problems are shown unless ``verbose``; one of several hosts is shown once.
    """
    lines: list[str] = []
    if verbose or len(report.hosts) == 1:
        for host in report.hosts:
            lines += _block(host.name, host.sections, has_colours)
    else:
        for names, sections in _bad_ones(report.hosts):
            lines += _block(names, sections, has_colours)
    if report.between:
        heading = "all hosts, against each other" if len(report.hosts) > 1 else "the job"
        lines += _block(heading, report.between, has_colours)
    return "\n".join([*lines, _summary(report)])


def wants_colours(stream: TextIO = sys.stdout) -> bool:
    """Return whether to write colours: on a terminal that has them, unless NO_COLOR is set."""
    return stream.isatty() and not NO_COLOR.is_set() and TERM.get() not in ("", "dumb") and os.name == "posix"


def _block(heading: str, sections: Sequence[Section], has_colours: bool) -> Iterator[str]:
    yield heading
    for section in sections:
        yield f"  {section.name}"
        for finding in section.findings:
            yield from _lines(finding, has_colours)
    yield ""


def _lines(finding: Finding, has_colours: bool) -> Iterator[str]:
    word = finding.level.ljust(_WIDTH)
    shown = f"\033[{_COLOURS[finding.level]}m{word}\033[0m" if has_colours else word
    yield f"    {shown}  {finding.text}"
    if finding.advice:
        yield f"    {' ' * _WIDTH}  -> {finding.advice}"


def _bad_ones(hosts: Sequence[HostReport]) -> Iterator[tuple[str, list[Section]]]:
    """Yield the warnings and problems by the hosts that have them, as (the hosts' names, sections)."""
    having: dict[tuple[str, Finding], list[str]] = {}
    for host in hosts:
        for section in host.sections:
            for finding in section.findings:
                if finding.level in (Level.WARNING, Level.PROBLEM):
                    having.setdefault((section.name, finding), []).append(host.name)
    by_hosts: dict[tuple[str, ...], dict[str, list[Finding]]] = {}
    for (section_name, finding), names in having.items():
        by_hosts.setdefault(tuple(names), {}).setdefault(section_name, []).append(finding)
    for listed, found in by_hosts.items():
        yield ", ".join(listed), [Section(name, findings) for name, findings in found.items()]


def _summary(report: Report) -> str:
    problems, warnings = report.count(Level.PROBLEM), report.count(Level.WARNING)
    if not problems and not warnings:
        return "nothing is wrong"
    return f"{_counted(problems, 'problem')}, {_counted(warnings, 'warning')}"


def _counted(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"
