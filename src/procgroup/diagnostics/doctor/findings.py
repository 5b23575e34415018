"""Findings: what a check found, how bad it is, and what to change."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import StrEnum
from typing import Any, NamedTuple


class Level(StrEnum):
    """How bad a finding is, from the best to the worst."""

    OK = "ok"
    NOTE = "note"
    """A fact that is neither good nor bad, such as a host without GPUs."""
    WARNING = "warning"
    """Programs work, but slowly, or not in every case."""
    PROBLEM = "problem"
    """Something does not work."""


class Finding(NamedTuple):
    """One line about one fact. ``advice`` says what to change; only warnings and problems have it."""

    level: Level
    text: str
    advice: str = ""


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


def count(sections: Iterable[Section], level: Level) -> int:
    """Return the number of findings of this level."""
    return sum(finding.level is level for section in sections for finding in section.findings)
