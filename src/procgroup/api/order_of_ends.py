"""Delays this rank's end until its launcher has seen the rank that caused the failure.

torchrun, mpiexec, torch's spawn and similar launchers report the first rank that ends as the cause. procgroup's own
launchers read the cause from the ranks' records.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from procgroup.cluster import task_launcher
from procgroup.process.environ import PROCGROUP_NOTICE, TORCHELASTIC_RUN_ID
from procgroup.process.process_end import FAILED_SECONDS, Lost, wait_for_others

# How long the launcher is given to see that a process has ended, if it does not collect it.
_COLLECTION_SECONDS = 0.5
_LOOK_SECONDS = 0.01


def let_end_first(cause: Lost) -> None:
    """Wait until the launcher has collected the process of the rank that caused this rank's failure.

    It waits only for a process of this host with the same launcher: until 0.5 s after that process has ended, and for
    at most FAILED_SECONDS, which all waits at the end of a failed process share.
    """
    if cause.pid == 0 or cause.host or not _is_started_by_a_foreign_launcher():
        return
    ended: list[float] = []

    def is_seen() -> bool:
        state = _state_of_sibling(cause.pid)
        if state == "Z" and not ended:
            ended.append(time.monotonic())
        return not state or (bool(ended) and time.monotonic() - ended[0] >= _COLLECTION_SECONDS)

    wait_for_others(is_seen, FAILED_SECONDS, lambda: "", pause=_LOOK_SECONDS)


def _is_started_by_a_foreign_launcher() -> bool:
    if PROCGROUP_NOTICE.is_set():
        return False
    process = sys.modules.get("multiprocessing.process")
    is_child = process is not None and process.parent_process() is not None
    return is_child or TORCHELASTIC_RUN_ID.is_set() or task_launcher.detect() is not None


def _state_of_sibling(pid: int) -> str:
    """Return the state of a process that has this one's parent, as in "S"; "" where there is none."""
    try:
        state, parent = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()[:2]
    except (OSError, ValueError):
        return ""
    return state if int(parent) == os.getppid() else ""
