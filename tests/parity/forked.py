"""Ranks that are forked from a process which has imported torch once: importing it takes longer than most programs."""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, NoReturn

_context: Any = multiprocessing.get_context("fork")
_GRACE = 2.0
"""Seconds that the others have to end when one rank has failed."""


def run(target: Callable[..., None], size: int, place: Path, seconds: float, arguments: Sequence[Any]) -> list[int]:
    """Run ``target(rank, place, *arguments)`` on forked ranks, and return their exit codes.

    What a rank prints goes to a file in ``place``. One that takes longer than ``seconds`` shows its stacks and ends.
    """
    processes = []
    for rank in range(size):
        Path(place, f"{rank}.output").touch()
        process = _context.Process(target=_be_rank, args=(target, rank, place, seconds, tuple(arguments)))
        process.start()
        processes.append(process)
    deadline = time.monotonic() + seconds + _GRACE
    while running := [process for process in processes if process.exitcode is None]:
        if not wait([process.sentinel for process in running], max(0.0, deadline - time.monotonic())):
            for process in running:
                process.kill()
        if any(process.exitcode not in (0, None) for process in processes):
            deadline = min(deadline, time.monotonic() + _GRACE)
    return [process.exitcode for process in processes]


def output(place: Path, size: int) -> str:
    """Return what all ranks have printed."""
    texts = [Path(place, f"{rank}.output").read_text("utf-8", "replace") for rank in range(size)]
    return "".join(f"--- rank {rank}\n{text}" for rank, text in enumerate(texts))


def meet(place: Path, rank: int, size: int) -> None:
    """Wait as a barrier does, without the group."""
    Path(place, f"{rank}.met").touch()
    while not all(Path(place, f"{other}.met").exists() for other in range(size)):
        time.sleep(0.002)


def leave(code: int) -> NoReturn:
    """End this rank at once."""
    os._exit(code)


def _be_rank(target: Callable[..., None], rank: int, place: Path, seconds: float, arguments: tuple[Any, ...]) -> None:
    written = os.open(Path(place, f"{rank}.output"), os.O_WRONLY | os.O_APPEND)
    os.dup2(written, 1)
    os.dup2(written, 2)
    sys.stdout = open(1, "w", buffering=1, closefd=False)
    sys.stderr = open(2, "w", buffering=1, closefd=False)
    faulthandler.dump_traceback_later(seconds, exit=True)
    target(rank, place, *arguments)
