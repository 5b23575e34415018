"""What the other ranks are given of the exception for which this rank ends: its type, its text and its line.

It is one line of printable ASCII characters of bounded length, because other processes print it.
"""

from __future__ import annotations

import os
import traceback
from pathlib import Path

_TYPE_CHARACTERS = 80
_TEXT_CHARACTERS = 3900
_PLACE_CHARACTERS = 80

# Of procgroup and of Python itself. (sysconfig would say the latter, too; but an exception that another thread raises
# in this one, in the middle of importing it, leaves the import lock held.)
_LIBRARIES = (str(Path(__file__).parent), str(Path(os.__file__).parent))


def describe(error: BaseException, most: int = _TEXT_CHARACTERS) -> str:
    """Return "ValueError: no such file (train.py:12)", with at most ``most`` characters of the exception's text.

    The line is the innermost one of the user's code in the traceback; where there is none, as in a call that handles
    the exception, the line of the user's code that calls procgroup now.
    """
    name = _printable(type(error).__name__, _TYPE_CHARACTERS)
    text = _printable(text_of(error), most)
    place = _place(error)
    return name + (f": {text}" if text else "") + (f" ({place})" if place else "")


def text_of(error: BaseException) -> str:
    """Return the text of an exception; "" where its class fails to give one."""
    try:
        return str(error)
    except Exception:  # a user's class may fail in __str__
        return ""


def _place(error: BaseException) -> str:
    frames = [(frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(error.__traceback__)]
    if not frames:
        return ""
    users = [entry for entry in frames if _is_users(entry[0])]
    if not users:
        stack = ((frame.f_code.co_filename, line) for frame, line in traceback.walk_stack(None))
        users = [entry for entry in stack if _is_users(entry[0])][:1]
    file, line = (users or frames)[-1]
    return f"{_printable(Path(file).name, _PLACE_CHARACTERS)}:{line}"


def _is_users(file: str) -> bool:
    is_installed = {"site-packages", "dist-packages"} & set(Path(file).parts)
    return not is_installed and not file.startswith(_LIBRARIES) and not file.startswith("<frozen")


def _printable(text: str, most: int) -> str:
    """Return the text on one line, in ASCII characters; of a long one the beginning."""
    line = " ".join(text.split()).encode("ascii", "backslashreplace").decode()
    line = "".join(character if character.isprintable() else "?" for character in line)
    return line if len(line) <= most else line[: most - 3] + "..."
