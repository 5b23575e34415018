"""Findings, and the report of them as text and as a JSON document: what was found, how bad it is, what to change."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from enum import StrEnum
from typing import Any, NamedTuple, TextIO

from procgroup.process.environ import NO_COLOR, TERM

FORMAT = 1
"""The version of the JSON document: raised when a field changes its meaning or is removed."""


class Level(StrEnum):
    """How bad a finding is, from the best to the worst."""

    OK = "ok"
    NOTE = "note"
    """A fact that is neither good nor bad, such as a host without GPUs."""
    WARNING = "warning"
    """Programs work, but slowly, or not in every case."""
    PROBLEM = "problem"
    """Something does not work."""


_COLOURS = {Level.OK: "32", Level.NOTE: "2", Level.WARNING: "33", Level.PROBLEM: "31"}
_WIDTH = max(map(len, Level))


class Finding(NamedTuple):
    """One line about one fact. ``advice`` says what to change; only warnings and problems have it."""

    level: Level
    text: str
    advice: str = ""


def ok(text: str) -> Finding:
    """Return a finding that something is as it should be."""
    return Finding(Level.OK, text)


def note(text: str) -> Finding:
    """Return a finding that is neither good nor bad."""
    return Finding(Level.NOTE, text)


def warning(text: str, advice: str) -> Finding:
    """Return a finding that something is slow, or does not work in every case."""
    return Finding(Level.WARNING, text, advice)


def problem(text: str, advice: str) -> Finding:
    """Return a finding that something does not work."""
    return Finding(Level.PROBLEM, text, advice)


class Section(NamedTuple):
    """The findings about one subject."""

    name: str
    findings: Sequence[Finding]

    def as_dict(self) -> dict[str, Any]:
        """Return the section as JSON values."""
        return {"name": self.name, "findings": [finding._asdict() for finding in self.findings]}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Section:
        """Return the section that ``as_dict`` described."""
        findings = [Finding(Level(one["level"]), one["text"], one["advice"]) for one in values["findings"]]
        return cls(values["name"], findings)


class HostReport(NamedTuple):
    """The findings about one host: its name, its ranks in the job, its sections."""

    name: str
    ranks: Sequence[int]
    sections: Sequence[Section]


class DoctorReport(NamedTuple):
    """The findings about all hosts, about the hosts against each other, and the measured values behind these."""

    hosts: Sequence[HostReport]
    between: Sequence[Section] = ()
    measured: Mapping[str, Any] = {}

    def count(self, level: Level) -> int:
        """Return the number of findings of this level."""
        sections = [section for host in self.hosts for section in host.sections] + [*self.between]
        return sum(finding.level is level for section in sections for finding in section.findings)

    def exit_status(self, *, strict: bool) -> int:
        """Return 1 when there are problems, or, if ``strict``, warnings; else 0."""
        return 1 if self.count(Level.PROBLEM) or (strict and self.count(Level.WARNING)) else 0

    def document(self, *, strict: bool) -> dict[str, Any]:
        """Return the report as JSON values."""
        return {
            "format": FORMAT,
            "exit_status": self.exit_status(strict=strict),
            "problems": self.count(Level.PROBLEM),
            "warnings": self.count(Level.WARNING),
            "hosts": [
                {"name": host.name, "ranks": list(host.ranks), "sections": [one.as_dict() for one in host.sections]}
                for host in self.hosts
            ],
            "between_hosts": [section.as_dict() for section in self.between],
            "measured": dict(self.measured),
        }

    def text(self, *, has_colours: bool = False, verbose: bool = False) -> str:
        """Return the report as lines of text.

        Of several hosts, only warnings and problems are shown unless ``verbose``; one of several hosts is shown once.
        """
        blocks: list[tuple[str, Sequence[Section]]]
        if verbose or len(self.hosts) == 1:
            blocks = [(host.name, host.sections) for host in self.hosts]
        else:
            blocks = list(_warnings_and_problems(self.hosts))
        if self.between:
            blocks.append(("all hosts, against each other" if len(self.hosts) > 1 else "the job", self.between))
        counts = {"problem": self.count(Level.PROBLEM), "warning": self.count(Level.WARNING)}
        counted = ", ".join(f"{number} {what}{'' if number == 1 else 's'}" for what, number in counts.items())
        lines = [line for heading, sections in blocks for line in _lines(heading, sections, has_colours)]
        return "\n".join([*lines, counted if any(counts.values()) else "nothing is wrong"])


def wants_colours(stream: TextIO = sys.stdout) -> bool:
    """Return whether to write colours: on a terminal that has them, unless NO_COLOR is set."""
    return stream.isatty() and not NO_COLOR.is_set() and TERM.get() not in ("", "dumb") and os.name == "posix"


def _lines(heading: str, sections: Sequence[Section], has_colours: bool) -> Iterator[str]:
    yield heading
    for section in sections:
        yield f"  {section.name}"
        for finding in section.findings:
            word = finding.level.ljust(_WIDTH)
            shown = f"\033[{_COLOURS[finding.level]}m{word}\033[0m" if has_colours else word
            yield f"    {shown}  {finding.text}"
            if finding.advice:
                yield f"    {' ' * _WIDTH}  -> {finding.advice}"
    yield ""


def _warnings_and_problems(hosts: Sequence[HostReport]) -> Iterator[tuple[str, list[Section]]]:
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
