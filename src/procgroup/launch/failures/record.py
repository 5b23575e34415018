"""``procgroup.record``: write the exception that ends a program's main function to the error file."""

from __future__ import annotations

import contextlib
import faulthandler
import functools
from collections.abc import Callable
from pathlib import Path
from typing import ParamSpec, TypeVar

from procgroup.environ import TORCHELASTIC_ERROR_FILE
from procgroup.launch.failures.error_file import record_of, write_error_file

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
            _keep(error)
            raise

    return recorded


def _keep(error: Exception) -> None:
    path = TORCHELASTIC_ERROR_FILE.get()
    if not path:
        return
    kept = record_of(error)
    with contextlib.suppress(OSError):
        write_error_file(Path(path), kept.message, kept.traceback)
