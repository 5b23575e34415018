"""Every operation in a form that waits for one absent rank, and how long an error may take to arrive."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import operation_table
from operation_table import OPERATIONS, Part

import procgroup as dist

TRANSPORTS = ["shm", "tcp", "spanning"]

ABSENT = 1
"""The rank that does not come."""

LARGE = 1_000_000
"""Elements of a message that does not go before it is asked for."""

ROOTED = 10_000
"""Elements of a call with a root for which all ranks wait: see test_rooted_calls.py."""


@dataclass(frozen=True)
class Form:
    """A form of an operation: how many elements its arrays have, and which rank is the root, or gets the message."""

    name: str
    root: int = 0
    count: int = 8


def _forms() -> dict[str, Form]:
    forms = {}
    # One with a single array instead of a list is the same call, by whose name errors go.
    for name in (name for name in operation_table.COLLECTIVES if not name.endswith("_single")):
        if root := OPERATIONS[name].root:
            side = "to" if root == "destination" else "from"
            forms[f"{name} {side} a rank that waits"] = Form(name, count=ROOTED)
            forms[f"{name} {side} the absent rank"] = Form(name, ABSENT, ROOTED)
        else:
            forms[name] = Form(name)
    return forms


COLLECTIVES = _forms() | {"all_reduce of a large array": Form("all_reduce", count=LARGE)}
MESSAGES = {"send": Form("send", ABSENT, LARGE), "recv": Form("recv", ABSENT)}
FORMS = COLLECTIVES | MESSAGES


def perform(name: str, async_op: bool = False, **how: Any) -> None:
    """Make one call and wait for its end."""
    form = FORMS[name]
    part = Part(form.name, dist.get_rank(), dist.get_world_size(), root=form.root, count=form.count)
    part.start(dist, async_op, **how)
    part.wait()


def on(transport: str) -> dict[str, str]:
    return {"PROCGROUP_TRANSPORT": transport}


def allowance(seconds: float) -> float:
    """How long may pass where it takes ``seconds`` at most when nothing else runs.

    Programs that hold the cores add half a second, and make all of it take four times as long, or as many times as the
    load average of the last minute says. What waits for a deadline instead takes 20 s and more.
    """
    return seconds * max(4.0, 2 * os.getloadavg()[0] / (os.cpu_count() or 1)) + 0.5
