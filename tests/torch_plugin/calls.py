"""Make what a PyTorch program may call, all of it in one world, and tell what went wrong."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
from torch_plugin import calls_of_operations, calls_of_works_and_groups  # noqa: F401 - both enter their calls
from torch_plugin.call_table import CALLS


def make(
    rank: int,
    size: int,
    left_out: frozenset[str] = frozenset(),
    surroundings: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> dict[str, str]:
    """Make the calls, one after the other, until one fails; return what went wrong, "" for nothing, by their names."""
    became = {}
    for name, function in CALLS.items():
        if name in left_out:
            continue
        try:
            with surroundings():
                function(rank, size)
            became[name] = ""
        except (Exception, pytest.fail.Exception):
            became[name] = traceback.format_exc()
            break  # the ranks may be out of step
    return became


def require_success(name: str, of_ranks: list[dict[str, str]]) -> None:
    """Fail where a call went wrong on any rank, and where it was not made because of an earlier one."""
    failed = {rank: became.get(name, "not made: an earlier call failed") for rank, became in enumerate(of_ranks)}
    texts = [f"\nrank {rank}: {text}" for rank, text in failed.items() if text]
    assert not texts, "".join(texts)
