"""Systems that do not exist: files below a folder, as Linux would show them, and findings by level."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from procgroup.diagnostics.doctor.findings import Finding, Level


def write(root: Path, name: str, text: str) -> None:
    """Write one file below the folder."""
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{text}\n")


def write_group(root: Path, version: int, controller: str, files: dict[str, str], group: str = "job") -> None:
    """Write a control group of this process, in a hierarchy of version 1 or 2, whose mount is below the folder."""
    mount = root / "cgroup"
    kind = "cgroup2 cgroup2 rw" if version == 2 else f"cgroup cgroup rw,{controller}"
    write(root, "proc/self/cgroup", f"0::/{group}" if version == 2 else f"4:{controller}:/{group}")
    write(root, "proc/self/mountinfo", f"41 31 0:38 / {mount} rw - {kind}")
    for name, text in files.items():
        write(mount, f"{group}/{name}", text)


def texts(findings: Iterable[Finding], level: Level) -> list[str]:
    """Return the texts of the findings of one level; those that need advice have it, and others have none."""
    listed = list(findings)
    for finding in listed:
        assert bool(finding.advice) == (finding.level in (Level.WARNING, Level.PROBLEM)), finding
    return [finding.text for finding in listed if finding.level is level]


def one(findings: Iterable[Finding], level: Level) -> Finding:
    """Return the only finding of a level."""
    (found,) = [finding for finding in findings if finding.level is level]
    return found
