"""Describe an exception that ends a rank's program or function, for its error file."""

from __future__ import annotations

import traceback

from procgroup.launch.failures.error_file import MAX_TEXT_BYTES, ErrorRecord
from procgroup.launch.failures.evidence import cut_middle, without_own_frames


def record_of(error: BaseException, most_bytes: int = MAX_TEXT_BYTES) -> ErrorRecord:
    """Describe an exception; its message and its traceback have at most about ``most_bytes`` each in UTF-8."""
    message = f"{type(error).__name__}: {_text_of(error)}"
    return ErrorRecord(cut_middle(message, most_bytes), cut_middle(traceback_of(error), most_bytes))


def traceback_of(error: BaseException) -> str:
    """Return the formatted traceback without the frames of the launcher."""
    return without_own_frames("".join(traceback.format_exception(error)))


def _text_of(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:  # a user's class may fail in __str__
        return ""
