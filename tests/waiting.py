"""How processes of one test wait for each other: for words that they reach, for ends, and for calls that have begun."""

from __future__ import annotations

import contextlib
import inspect
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable
from glob import iglob
from pathlib import Path
from typing import Any

import procgroup as dist
from procgroup import _native

SECONDS = 60.0
"""How long anything is waited for: long on a busy machine, too."""


class Meeting:
    """Files by which processes wait for each other: one for each word, with the pid of the process that reached it."""

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self._directory = Path(directory)

    def reach(self, word: str) -> None:
        written = self._directory / f"{word}.{os.getpid()}"
        written.write_text(str(os.getpid()))
        written.rename(self._directory / word)

    def wait_for(self, word: str) -> None:
        wait_until((self._directory / word).exists, otherwise=f"nobody has reached {word!r}")

    def wait_until_collected(self, word: str) -> None:
        """Wait until the process that reached the word has ended, and its parent has collected it."""
        self.wait_for(word)
        process = Path("/proc", (self._directory / word).read_text())
        wait_until(lambda: not process.exists(), otherwise=f"{process} is still there")


class MeetingOfThreads:
    """Where ``size`` ranks meet that are threads: for calls that fail, and for those in them. One object for all."""

    def __init__(self, size: int) -> None:
        self._groups: list[Any] = [None] * size
        self._everybody = threading.Barrier(size)

    def meet(self) -> None:
        """Wait until all ranks are here."""
        self._groups[dist.get_rank()] = dist.group.WORLD
        self._everybody.wait(SECONDS)

    def wait_for_calls_of(self, *ranks: int) -> None:
        """Wait until these ranks, which have met, are in a call: one that starts late would be missing for it."""
        for rank in ranks:
            wait_until(lambda: "started" in [call["state"] for call in self._groups[rank].records()])  # noqa: B023


def stop(pid: int) -> None:
    """Stop a process; return when all of its threads have stopped, which the signal itself does not wait for.

    It may have ended meanwhile.
    """
    os.kill(pid, signal.SIGSTOP)
    wait_until(lambda: not _running_threads(pid), otherwise=f"process {pid} has not stopped")


def _running_threads(pid: int) -> list[str]:
    running = []
    for path in iglob(f"/proc/{pid}/task/*/stat"):
        with contextlib.suppress(OSError):  # the thread has ended
            state = Path(path).read_text().rpartition(")")[2].split()[0]
            running += [path] if state not in ("T", "t", "Z", "X") else []
    return running


def wait_until_in_a_call(pids: Iterable[int], of: int = 1, records: str | os.PathLike[str] = "") -> None:
    """Wait until each of these ranks has begun ``of`` calls and is in one of them, as its flight record says."""
    for pid in pids:
        wait_until(lambda pid=pid: started_calls(pid, of, records), otherwise=f"process {pid} is in no call")


def started_calls(pid: int, of: int = 1, records: str | os.PathLike[str] = "") -> list[str]:
    """Return the operations of the calls that a rank is in, as its flight record has them.

    ``records`` is the folder of the jobs; none are returned before the rank has begun ``of`` calls.
    """
    # iglob, unlike a Path's glob, takes folders that are removed meanwhile.
    for path in iglob(f"{records or os.environ['PROCGROUP_RECORD_DIR']}/*/*.record"):
        with contextlib.suppress(OSError, ValueError):  # a rank is making it, or it is removed
            record = _native.read_flight_record(path)
            if record["pid"] == pid and record["recorded"] >= of:
                return [call["op"] for call in record["calls"] if call["state"] == "started"]
    return []


def wait_until(
    condition: Callable[[], object], timeout: float = SECONDS, otherwise: str | Callable[[], str] = ""
) -> None:
    """Wait until ``condition`` returns what is true; raise TimeoutError, which says what is so otherwise."""
    deadline = time.monotonic() + timeout
    while not condition():
        if time.monotonic() > deadline:
            lack = otherwise() if callable(otherwise) else otherwise or inspect.getsource(condition).strip()
            raise TimeoutError(f"not so after {timeout:g} s: {lack}")
        time.sleep(0.005)
