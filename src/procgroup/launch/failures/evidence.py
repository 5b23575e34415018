"""Find the part of a failed rank's stderr that shows why it failed, and the exceptions that a traceback names.

The functions work on the last output of any program, which needs no change for that. They parse Python's own formats
only: tracebacks, chained tracebacks, and the stacks that faulthandler writes.

Ranks of procgroup leave a record, which has the cause of procgroup's own errors (see error_file.py). Gloo, NCCL and
torch's TCPStore have no type of exception for a lost peer, and torch's error file has no field for it: only their texts
show one. ``is_consequence`` and the functions below it read them; no other module does.
"""

from __future__ import annotations

import re

from procgroup.process.error_file import without_own_frames

TAIL_LINES = 15
"""How many last lines of stderr are shown when there is no traceback."""

TRACEBACK_HEADER = "Traceback (most recent call last):"
RANK_PREFIX = re.compile(r"^\[rank\d+\]: ", re.MULTILINE)
"""The prefix that a rank in a process group writes before each line of an uncaught exception, as torch does."""

# Lone surrogates cannot be encoded.
_UNPRINTABLE = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")
_HEADER_LINE = re.compile(rf"^{re.escape(TRACEBACK_HEADER)}$", re.MULTILINE)
# An ExceptionGroup's traceback, in which Python puts a bar before each line.
_GROUP_HEADER = f"  + Exception Group {TRACEBACK_HEADER}"
_GROUP_LINE = re.compile(r"^  \| (?=\w)(.*)$", re.MULTILINE)
_CRASH_HEADER = "Fatal Python error: "
# The lines that C++ writes before abort(): "terminate called ...", and the reason, "  what():  ...".
_TERMINATE = re.compile(r"^terminate called .*\n(?:  what\(\):  .*\n)?", re.MULTILINE)
_WHAT = re.compile(r"^  what\(\):  (.*)", re.MULTILINE)
# The lines between the tracebacks of chained exceptions.
_CHAINS = (
    "\nDuring handling of the above exception, another exception occurred:\n\n",
    "\nThe above exception was the direct cause of the following exception:\n\n",
)


def last_traceback(text: str) -> str:
    """Return the text from the last traceback on, with those chained to it; "" without a traceback."""
    headers = [match.start() for match in _HEADER_LINE.finditer(text)]
    group = text.rfind(_GROUP_HEADER)
    if group > max(headers, default=-1):
        return without_own_frames(text[group:])
    if not headers:
        return ""
    start = headers.pop()
    while headers and any(text.endswith(chain, 0, start) for chain in _CHAINS):
        start = headers.pop()
    return without_own_frames(text[start:])


def exceptions(traceback: str) -> list[str]:
    """Return "Type: message" of each exception in a chain of tracebacks, in the order raised."""
    for chain in _CHAINS:
        traceback = traceback.replace(chain, "\0")
    found = (_after_frames(part.rstrip()) for part in traceback.split("\0"))
    return [message for message in found if message]


def crash_stack(text: str) -> str:
    """Return the last output of faulthandler: the reason and the crashed thread's stack; "" without one."""
    start = text.rfind(_CRASH_HEADER)
    if start < 0:
        return ""
    header, *paragraphs = text[start:].rstrip("\n").split("\n\n")
    crashed = [part for part in paragraphs if part.startswith("Current thread 0x")]
    kept = crashed or [part for part in paragraphs if not part.startswith("Extension modules:")]
    termination: str = (_TERMINATE.findall(text[:start]) or [""])[-1]
    return termination + "\n\n".join([header, *kept]) + "\n"


def abort_reason(text: str) -> str:
    """Return the text of the uncaught C++ exception; "" without one."""
    found = _WHAT.findall(text)
    return found[-1].strip() if found else ""


def last_lines(text: str) -> str:
    """Return the last TAIL_LINES lines of a text."""
    return "".join(text.splitlines(keepends=True)[-TAIL_LINES:])


def printable(text: str) -> str:
    """Replace control characters, except newlines and tabs, with "?"."""
    return _UNPRINTABLE.sub("?", text)


def _after_frames(traceback: str) -> str:
    """Return the text after the last traceback's frames: ``Type: message``, which may have several lines."""
    if traceback.startswith(_GROUP_HEADER):
        group = _GROUP_LINE.search(traceback)
        return group[1] if group else ""
    headers = list(_HEADER_LINE.finditer(traceback))
    if not headers:
        return ""
    lines = traceback[headers[-1].end() :].splitlines()
    for number, line in enumerate(lines):
        if line and not line[0].isspace():
            return "\n".join(lines[number:])
    return ""


EXCEPTION_LINE = re.compile(r"^(?:[A-Za-z_][\w.]*\.)?(?P<name>[A-Za-z_]\w*)(?:: .*)?$")

_OF_TORCH = frozenset({"RuntimeError", "DistBackendError", "DistNetworkError", "DistStoreError", "DistError"})
_LOST_CONNECTION = re.compile(
    "connection closed by (?:remote )?peer|connection reset by peer|broken pipe|remote process exit"
    "|connection was likely closed",
    re.IGNORECASE,
)
# The operating system's errors for a connection that ended; torch's may be raised while handling them.
_OF_CONNECTIONS = frozenset({"ConnectionResetError", "BrokenPipeError", "ConnectionAbortedError", "EOFError"})


def exception_name(message: str) -> str:
    """Return the class of ``Type: message``, without its module; "" for another text."""
    match = EXCEPTION_LINE.match(message.partition("\n")[0])
    return match["name"] if match else ""


def is_consequence(chain: list[str]) -> bool:
    """Return whether the chained exceptions of one rank, in the order raised, follow from another rank's end.

    The first exception decides: an error raised while a lost peer is handled is a consequence, too; a peer that is lost
    while an error of this rank is handled is not the cause.
    """
    causes = [message for message in chain if exception_name(message) not in _OF_CONNECTIONS]
    return bool(causes) and says_peer_lost(causes[0])


def says_peer_lost(message: str) -> bool:
    """Return whether ``Type: message`` is one of torch's, and says that a connection to another process has ended."""
    return exception_name(message) in _OF_TORCH and says_connection_lost(message)


def says_connection_lost(text: str) -> bool:
    """Return whether a text contains an error of Gloo, NCCL or torch's store for a peer that has ended."""
    return _LOST_CONNECTION.search(text) is not None
