"""The functions on the way of a start are those that docs/design/design.md lists."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import procgroup as dist
import world

PAGE = Path(__file__).resolve().parents[2] / "docs" / "design" / "design.md"
SOURCE = Path(dist.__file__).parent
REQUESTS = {"get", "set", "add", "append", "compare_set", "check", "multi_get", "get_unless", "set_on_disconnect"}
LINE = re.compile(r"^(?P<names>[\w.]+(?:, [\w.]+)*) .* (?P<file>\S+\.py)$", re.MULTILINE)

Function = tuple[str, str]

LOOKS = {("stores/start_up.py", f"StartUp.raise_if_{name}") for name in ("failed", "lost")}
"""Taken only by a rank that waits for 0.2 s."""


def functions_of_a_start(rank: int, size: int) -> set[Function]:
    """Start a group; return the functions of procgroup on the stack at each request and each call of a socket."""
    import procgroup.api.lifecycle
    import procgroup.backends.native  # noqa: F401  # imports would be on the stack

    found: set[Function] = set()

    def keep_stack(frame: FrameType | None) -> None:
        while frame is not None:
            path = Path(frame.f_code.co_filename)
            if path.is_relative_to(SOURCE):
                file, name = str(path.relative_to(SOURCE)), frame.f_code.co_qualname
                if not (file.startswith("stores/") and name.rpartition(".")[2] in REQUESTS) and "<" not in name:
                    found.add((file, name))
            frame = frame.f_back

    def profile(frame: FrameType, event: str, called: Any) -> None:
        if event == "c_call":
            owner = f"{getattr(called, '__module__', '')} {type(getattr(called, '__self__', None)).__module__}"
            if "socket" in owner or "select" in owner:
                keep_stack(frame)
        elif event == "call" and frame.f_code.co_name in REQUESTS and "/stores/" in frame.f_code.co_filename:
            keep_stack(frame.f_back)

    sys.setprofile(profile)
    dist.init_process_group("gloo", init_method="env://")
    sys.setprofile(None)
    dist.destroy_process_group()
    return found


def listed() -> set[Function]:
    """Return the functions in the list of the design."""
    section = PAGE.read_text().partition("## The path of init_process_group")[2].split("```")[1]
    lines = list(LINE.finditer(section))
    assert len(lines) == len(section.strip().splitlines())
    return {(line["file"], name) for line in lines for name in line["names"].split(", ")}


def test_a_start_takes_the_functions_that_the_design_lists() -> None:
    first, second = world.run(functions_of_a_start, 2)
    assert listed() <= first | second
    assert first | second <= listed() | LOOKS
