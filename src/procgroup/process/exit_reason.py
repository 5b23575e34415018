"""What others are given of the exception for which this rank ends: its text, and where the failure began.

The text is the exception's type, its message and its line: one line of printable ASCII characters of bounded length,
because other processes print it. The origin is data, by which launchers and ``procgroup explain`` tell the rank that
failed first from those that only followed: nobody has to read that out of the text.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import NamedTuple

from procgroup.process import state

_TYPE_CHARACTERS = 80
_TEXT_CHARACTERS = 3900
_PLACE_CHARACTERS = 80

# Of procgroup and of Python itself. (sysconfig would say the latter, too; but an exception that another thread raises
# in this one, in the middle of importing it, leaves the import lock held.)
_LIBRARIES = (str(Path(__file__).parents[1]), str(Path(os.__file__).parent))

OWN, CALL, PEER = ORIGINS = ("own", "call", "peer")

# The operating system's errors for a connection that ended; PeerLost and the like are raised while handling them.
_OF_CONNECTIONS = (ConnectionError, EOFError)


class Origin(NamedTuple):
    """Where the failure of a rank began.

    ``kind`` is "own": with this rank; "call": with a call that the ranks did not complete together, as their flight
    records of it tell; "peer": with the end of another rank, of which ``peer`` is the global rank, or with the end of
    a rank or a store that is not known, where ``peer`` is None.
    """

    kind: str = OWN
    peer: int | None = None


class ExitReason(NamedTuple):
    """The reason for which a rank ends."""

    text: str
    origin: Origin = Origin()


def reason_of(error: BaseException) -> ExitReason:
    """Return the text of an exception and where the failure began."""
    return ExitReason(describe(error), origin_of(error))


def note_translated(error: BaseException) -> None:
    """Remember the origin of an error that a library will raise again as its own type, with a text that quotes this."""
    state.translated.append((text_of(error), origin_of(error)))


def origin_of(error: BaseException) -> Origin:
    """Return where the failure began that ends a rank with this exception.

    In a chain of exceptions the first one raised decides: an error raised while the loss of a peer is handled was
    caused by that peer, and a peer that is lost while an error of this rank is handled is not the cause.
    """
    from procgroup import errors  # which imports this module

    first = next((one for one in _in_order(error) if not isinstance(one, _OF_CONNECTIONS)), error)
    if isinstance(first, errors.OperationError | errors.ObjectError) and first.ended_by is not None:
        return Origin(PEER, first.ended_by) if first.ended_by != first.global_rank else Origin()
    if isinstance(first, errors.GroupBroken | errors.StoreLost | errors.BackwardFailed):
        return Origin(PEER)
    if isinstance(first, errors.OperationError):
        return Origin(CALL)
    if isinstance(first, errors.DistError):
        return Origin()
    text = text_of(first)
    return next((origin for part, origin in state.translated if part in text), Origin())


def _in_order(error: BaseException) -> list[BaseException]:
    """Return the exceptions that a traceback of this one shows, in the order raised."""
    chain = [error]
    while True:
        last = chain[-1]
        earlier = last.__cause__ or (None if last.__suppress_context__ else last.__context__)
        if earlier is None or earlier in chain:
            return chain[::-1]
        chain.append(earlier)


def describe(error: BaseException, most: int = _TEXT_CHARACTERS) -> str:
    """Return "ValueError: no such file (train.py:12)", with at most ``most`` characters of the exception's text.

    The line is the innermost one of the user's code in the traceback; where there is none, as in a call that handles
    the exception, the line of the user's code that calls procgroup now.
    """
    name = _ascii_line(type(error).__name__, _TYPE_CHARACTERS)
    text = _ascii_line(text_of(error), most)
    place = _place(error)
    return name + (f": {text}" if text else "") + (f" ({place})" if place else "")


def text_of(error: BaseException) -> str:
    """Return the text of an exception; "" where its class fails to give one."""
    try:
        return str(error)
    except Exception:  # a user's class may fail in __str__
        return ""


def _place(error: BaseException) -> str:
    # Not by the module traceback: a process that has no free file descriptor cannot import it any more.
    frames, step = [], error.__traceback__
    while step is not None:
        frames.append((step.tb_frame.f_code.co_filename, step.tb_lineno))
        step = step.tb_next
    if not frames:
        return ""
    users = [entry for entry in frames if _is_users(entry[0])]
    frame = None if users else sys._getframe()
    while frame is not None and not users:
        users = [(frame.f_code.co_filename, frame.f_lineno)] if _is_users(frame.f_code.co_filename) else []
        frame = frame.f_back
    file, line = (users or frames)[-1]
    return f"{_ascii_line(Path(file).name, _PLACE_CHARACTERS)}:{line}"


def _is_users(file: str) -> bool:
    is_installed = {"site-packages", "dist-packages"} & set(Path(file).parts)
    return not is_installed and not file.startswith(_LIBRARIES) and not file.startswith("<frozen")


def printable(text: str) -> str:
    """Replace each character that is not printable with "?": a terminal shows the text, and obeys nothing in it."""
    return "".join(character if character.isprintable() else "?" for character in text)


def _ascii_line(text: str, most: int) -> str:
    """Return the text on one line, in ASCII characters; of a long one the beginning."""
    line = printable(" ".join(text.split()).encode("ascii", "backslashreplace").decode())
    return line if len(line) <= most else line[: most - 3] + "..."
