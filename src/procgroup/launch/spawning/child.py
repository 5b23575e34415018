"""The main function of a process that ``spawn`` starts: end with the caller, run the function, report its exception.

The modules for the report are imported before the function runs, because a process without free file descriptors or
memory cannot import any more. Nothing else is imported, so that children start fast.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from typing import Any

from procgroup.launch.ranks.die_with_parent import die_with_parent, die_with_writer
from procgroup.launch.spawning.child_report import send_report
from procgroup.process_end import note_exception


def run(
    fn: Callable[..., object],
    index: int,
    args: tuple[Any, ...],
    report: Connection,
    parent_pid: int | None,
    environment: Mapping[str, str],
) -> None:
    """Call ``fn(index, *args)``; send an exception through ``report`` and exit with status 1.

    ``parent_pid`` is None where the parent is a fork server.
    """
    try:
        _die_with_caller(parent_pid)
        os.environ.update(environment)
        fn(index, *args)
    except KeyboardInterrupt:
        pass  # the parent ends all its children, and reports the interrupt once
    except SystemExit:
        raise
    except BaseException as error:
        note_exception(error)
        send_report(report, error)
        raise SystemExit(1) from None


def _die_with_caller(parent_pid: int | None) -> None:
    """Let the kernel end this process with the one that called ``spawn``: its parent, or a fork server's client."""
    caller = multiprocessing.parent_process()
    if parent_pid is not None:
        die_with_parent(parent_pid)
    elif caller is not None:
        die_with_writer(caller.sentinel)
