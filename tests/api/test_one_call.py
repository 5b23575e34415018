"""A call goes through two functions of Python before it crosses into C++: docs/design/design.md lists all eleven."""

from __future__ import annotations

import gc
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np

import procgroup as dist
from procgroup.testing import run_ranks

PAGE = Path(__file__).resolve().parents[2] / "docs" / "design" / "design.md"


def functions_of_a_call() -> list[str]:
    array = np.ones(1)
    dist.all_reduce(array)
    entered: list[str] = []

    def profile(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call":
            entered.append(f"{frame.f_globals['__name__']}.{frame.f_code.co_qualname}")

    sys.setprofile(profile)
    try:
        dist.all_reduce(array)
    finally:
        sys.setprofile(None)
    return entered


def test_all_reduce_crosses_into_c_plus_plus_from_its_second_function() -> None:
    gc.disable()  # what it calls would be in between
    try:
        of_ranks = run_ranks(functions_of_a_call, 2)
    finally:
        gc.enable()
    for functions in of_ranks:
        assert functions == ["procgroup.api.reductions.all_reduce", "procgroup.groups.reductions.Reductions.all_reduce"]


def test_the_design_lists_the_path_of_a_call() -> None:
    listed = PAGE.read_text().partition("## The path of all_reduce(x)\n```\n")[2].partition("```")[0].splitlines()
    assert [line.split()[0] for line in listed] == [str(number) for number in range(1, 12)]
    assert len({word for line in listed for word in line.split() if "/" in word or word.endswith("pp")}) == 9
