"""Read facts from files of Linux below /proc and /sys, and show numbers of bytes."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from procgroup.cluster import control_group

_UNITS = ("bytes", "KiB", "MiB", "GiB", "TiB")


def read_text(path: Path) -> str:
    """Return a file's text without blanks at its ends; "" where it cannot be read."""
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""


def read_number(path: Path) -> int | None:
    """Return the number in a file; None where there is none, and for ``max``, which means no limit."""
    text = read_text(path)
    return int(text) if text.isascii() and text.isdigit() else None


def read_entry(path: Path, name: str) -> int | None:
    """Return the number in the line ``name number`` or ``name: number unit`` of a file; None without such a line."""
    for line in read_text(path).splitlines():
        words = line.replace(":", " ").split()
        if len(words) > 1 and words[0] == name and words[1].isdigit():
            return int(words[1])
    return None


def first_number(paths: Iterable[Path]) -> int | None:
    """Return the number in the first of these files that has one."""
    return next((number for path in paths if (number := read_number(path)) is not None), None)


def control_groups(controller: str, root: Path) -> list[Path]:
    """Return the directories of this process's control groups for a controller; none where their list is malformed."""
    try:
        return control_group.directories(controller, root / "proc/self")
    except ValueError:
        return []


def show_bytes(size: float) -> str:
    """Return a number of bytes with its unit, such as ``64 MiB``."""
    unit = 0
    while size >= 1024 and unit < len(_UNITS) - 1:
        size /= 1024
        unit += 1
    return f"{size:.0f} {_UNITS[unit]}" if size >= 10 or size == int(size) else f"{size:.1f} {_UNITS[unit]}"
