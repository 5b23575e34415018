"""Every operation in a form that waits for one absent rank, and how long an error may take to arrive."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import numpy as np

import procgroup as dist

TRANSPORTS = ["shm", "tcp", "spanning"]

ABSENT = 1
"""The rank that does not come."""

LARGE = 1_000_000
"""Elements of a message that does not go before it is asked for."""

Operation = Callable[..., Any]

OPERATIONS: dict[str, Operation] = {
    "all_reduce": lambda **how: dist.all_reduce(np.ones(8), **how),
    "all_reduce of a large array": lambda **how: dist.all_reduce(np.ones(LARGE), **how),
    "reduce to a rank that waits": lambda **how: dist.reduce(np.ones(8), 0, **how),
    "reduce to the absent rank": lambda **how: dist.reduce(np.ones(8), ABSENT, **how),
    "broadcast from a rank that waits": lambda **how: dist.broadcast(np.ones(8), 0, **how),
    "broadcast from the absent rank": lambda **how: dist.broadcast(np.ones(8), ABSENT, **how),
    "all_gather": lambda **how: dist.all_gather([np.ones(8) for _ in range(dist.get_world_size())], np.ones(8), **how),
    "barrier": lambda **how: dist.barrier(**how),
    "send": lambda async_op, **how: (dist.isend if async_op else dist.send)(np.ones(LARGE), ABSENT, **how),
    "recv": lambda async_op, **how: (dist.irecv if async_op else dist.recv)(np.ones(8), ABSENT, **how),
}
COLLECTIVES = [name for name in OPERATIONS if name not in ("send", "recv")]


def perform(name: str, async_op: bool = False, **how: Any) -> None:
    """Make one call and wait for its end."""
    work = OPERATIONS[name](async_op=async_op, **how)
    if async_op:
        work.wait()


def on(transport: str) -> dict[str, str]:
    return {"PROCGROUP_TRANSPORT": transport}


def allowance(seconds: float) -> float:
    """How long ``seconds`` may take here and now: a machine with more to do than cores is late by that factor.

    Half a second is added, because the load average of a minute lags behind.
    """
    return seconds * max(1.0, 2 * os.getloadavg()[0] / (os.cpu_count() or 1)) + 0.5
