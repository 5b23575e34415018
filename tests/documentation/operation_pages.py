"""The examples of docs/operations and docs/guide/mpi4py.md: what they print on each rank, and what the pages show.

All pages with the same number of ranks are played one after the other by one world, because to start a launcher for
each would take longer than all else in these tests.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import traceback
from dataclasses import dataclass
from pathlib import Path

from documentation.page_programs import ROOT, blocks

FOLDER = ROOT / "docs" / "operations"
FOR_MPI4PY = ROOT / "docs" / "guide" / "mpi4py.md"
COMMAND = re.compile(r"\$ (?:procgroup run (?:--nproc-per-node|-n) (\d+)|python) \w+\.py\n")


@dataclass(frozen=True)
class Example:
    """A program of a page: how many ranks it is shown with (0: plain Python), and the lines of their output."""

    page: str
    program: str
    ranks: int
    expected: tuple[str, ...]


def examples() -> list[Example]:
    """Return the examples of all pages."""
    return [example for page in [*sorted(FOLDER.glob("*.md")), FOR_MPI4PY] for example in _of_page(page)]


def _of_page(page: Path) -> list[Example]:
    found, program = [], ""
    for block in blocks(page):
        if block.language == "python":
            program = block.text
        elif command := COMMAND.match(block.text):
            lines = tuple(block.text.strip().splitlines()[1:])
            found.append(Example(page.name, program, int(command[1] or 0), lines))
    return found


def play(rank: int, size: int, programs: list[str], ports: list[int]) -> list[str]:
    """Return what each program prints on this rank, with the prefix that the launcher gives to each line."""
    printed = []
    for program, port in zip(programs, ports, strict=True):
        os.environ["MASTER_PORT"] = str(port)
        output = io.StringIO()
        with contextlib.redirect_stdout(output):
            try:
                exec(compile(program, program.split("\n", 1)[0], "exec"), {"__name__": "__main__"})
            except Exception:
                raise AssertionError(f"rank {rank} in {program}\n{traceback.format_exc()}") from None
        printed.append("".join(f"[rank {rank}] {line}\n" for line in output.getvalue().splitlines()))
    return printed
