"""The record that a rank leaves of the failure that ends it; ``procgroup.record`` lets every program leave one.

It goes to the error file that the launcher has named. A process with a process group leaves one by itself.
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
from collections.abc import Callable
from pathlib import Path
from typing import ParamSpec, TypeVar

from procgroup.environ import TORCHELASTIC_ERROR_FILE
from procgroup.launch.failures.error_file import ErrorRecord, read_error_file, record_of, write_error_file
from procgroup.process.exit_reason import Origin

P = ParamSpec("P")
T = TypeVar("T")


def record(function: Callable[P, T]) -> Callable[P, T]:
    """Decorate a main function: write an exception that ends it to the error file, and raise it again.

    TORCHELASTIC_ERROR_FILE names the file, which has torch's format (JSON). Nothing is written where the variable is
    not set, and for SystemExit and KeyboardInterrupt; an error of writing is ignored. A crash in C code prints the
    Python stack on stderr (faulthandler).
    """

    @functools.wraps(function)
    def recorded(*arguments: P.args, **named: P.kwargs) -> T:
        if not faulthandler.is_enabled():
            with contextlib.suppress(OSError, RuntimeError, ValueError):  # a stderr that is no file
                faulthandler.enable()
        try:
            return function(*arguments, **named)
        except Exception as error:
            leave(error)
            raise

    return recorded


def leave(error: Exception) -> None:
    """Write the record of the exception that ends this process, where a launcher wants one; never raises OSError."""
    _write(record_of(error))


def leave_text(message: str, origin: Origin) -> None:
    """Write the record of a process that ends with an error's status and without an exception."""
    _write(ErrorRecord(message, origin=origin))


def _write(record: ErrorRecord) -> None:
    name = TORCHELASTIC_ERROR_FILE.get()
    if not name:
        return
    path = Path(name)
    there = read_error_file(path)
    is_there = there is not None and there.message == record.message  # torch's @record has written it
    with contextlib.suppress(OSError):
        write_error_file(path, there._replace(origin=record.origin) if there is not None and is_there else record)
