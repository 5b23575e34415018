"""The error file of a rank: torch's JSON, which its ``@record`` and ours write, at TORCHELASTIC_ERROR_FILE.

::

    {"message": {"message": "ValueError: boom", "errorCode": 1,
                 "extraInfo": {"py_callstack": "Traceback ...", "timestamp": "1795215725",
                               "procgroup": {"origin": "own", "peer": null}}}}

A launcher that copies the file adds ``errorCode``. In an older form, which is read too, "message" is a plain text.
``procgroup`` says where the failure began (see exit_reason.Origin). Only ranks of procgroup write it; they add it to
the file of torch's ``@record``, too. A process with a process group leaves such a file by itself; ``procgroup.record``
lets every program leave one.
"""

from __future__ import annotations

import contextlib
import errno
import faulthandler
import functools
import os
import re
import stat
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from traceback import format_exception
from types import MappingProxyType
from typing import Any, NamedTuple, ParamSpec, TypeVar

from procgroup.process.environ import TORCHELASTIC_ERROR_FILE
from procgroup.process.exit_reason import ORIGINS, Origin, origin_of, text_of

P = ParamSpec("P")
T = TypeVar("T")

MAX_FILE_BYTES = 1 << 20
"""The largest error file that is read."""

MAX_TEXT_BYTES = 64 * 1024
"""The largest message, and the largest traceback, that is written."""

# The frames of the launcher, which calls a rank's function, and that of `record`.
_OWN_FILES = rf"{re.escape(str(Path(__file__).parents[1]))}/(?:launch/[^\"]*|process/error_file\.py)"
_OWN_FRAME = re.compile(rf'^  File "{_OWN_FILES}", .*\n(?:    .*\n)*', re.MULTILINE)


class ErrorRecord(NamedTuple):
    """The content of an error file: ``message`` is such as "ValueError: boom", ``content`` the whole file.

    ``origin`` says where the failure began; None in what a program without procgroup wrote.
    """

    message: str
    traceback: str = ""
    content: Mapping[str, Any] = MappingProxyType({})
    origin: Origin | None = None


def record_of(error: BaseException, most_bytes: int = MAX_TEXT_BYTES) -> ErrorRecord:
    """Describe an exception that ends a rank's program or function.

    Its message and its traceback have at most about ``most_bytes`` each in UTF-8.
    """
    message = f"{type(error).__name__}: {text_of(error)}"
    traceback = cut_middle(traceback_of(error), most_bytes)
    return ErrorRecord(cut_middle(message, most_bytes), traceback, origin=origin_of(error))


def traceback_of(error: BaseException) -> str:
    """Return the formatted traceback without the frames of the launcher."""
    return without_own_frames("".join(format_exception(error)))


def without_own_frames(traceback: str) -> str:
    """Return a traceback without the launcher's frames."""
    return _OWN_FRAME.sub("", traceback)


def cut_middle(text: str, most: int) -> str:
    """Shorten a text to about ``most`` bytes of UTF-8: its beginning, a line with the number of bytes cut, its end."""
    data = text.encode(errors="replace")
    if len(data) <= most:
        return text
    half = most // 2
    begin, end = data[:half].decode(errors="ignore"), data[-half:].decode(errors="ignore")
    # Indented, so that it cannot be taken for the exception's line.
    return f"{begin}\n    ... {len(data) - 2 * half} bytes are left out here ...\n{end}"


def read_error_file(path: Path) -> ErrorRecord | None:
    """Return the content of a rank's error file; None where there is no file of the form above."""
    content = _content(path)
    message = content.get("message")
    details: Any = None
    if isinstance(message, dict):
        details, message = message.get("extraInfo"), message.get("message")
    if not isinstance(message, str) or not message:
        return None
    details = details if isinstance(details, dict) else {}
    traceback = details.get("py_callstack")
    return ErrorRecord(
        message, traceback if isinstance(traceback, str) else "", content, read_origin(details.get("procgroup"))
    )


def read_origin(found: object) -> Origin | None:
    """Return the origin that ``origin_as_json`` gave; None for anything else."""
    if not isinstance(found, dict) or found.get("origin") not in ORIGINS:
        return None
    peer = found.get("peer")
    is_rank = isinstance(peer, int) and not isinstance(peer, bool) and 0 <= peer < 1 << 31
    return Origin(found["origin"], peer if is_rank else None)


def origin_as_json(origin: Origin | None) -> dict[str, Any] | None:
    """Return what is written of an origin."""
    return None if origin is None else {"origin": origin.kind, "peer": origin.peer}


def write_error_file(path: Path, record: ErrorRecord) -> None:
    """Write an error file atomically; what else was in the file that was read stays. Raises OSError."""
    given = record.content.get("message")
    message = given if isinstance(given, dict) else {}
    earlier = message.get("extraInfo")
    info = {"timestamp": str(int(time.time())), **(earlier if isinstance(earlier, dict) else {})}
    info["py_callstack"] = record.traceback
    if record.origin is not None:
        info["procgroup"] = origin_as_json(record.origin)
    _write(path, {**record.content, "message": {**message, "message": record.message, "extraInfo": info}})


def pass_on(path: Path, record: ErrorRecord | None, *, message: str, traceback: str, exit_code: int) -> None:
    """Write the first failing rank's error to the launcher's own error file, with its exit code.

    ``record`` is the content of the rank's own file; without one, ``message`` and ``traceback`` are written.
    Raises OSError when the file cannot be written.
    """
    if record is None or not record.content:
        write_error_file(path, ErrorRecord(message, traceback, origin=record and record.origin))
        record = read_error_file(path)
    content = dict(record.content) if record else {}
    if isinstance(content.get("message"), dict):
        content["message"] = {**content["message"], "errorCode": exit_code}
    _write(path, content)


def _content(path: Path) -> dict[str, Any]:
    import json  # needed after a failure only

    try:
        content = json.loads(_read_regular_file(path))
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def _read_regular_file(path: Path) -> bytes:
    """Return the bytes of a regular file of limited size. Raises OSError, and ValueError for another file."""
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode) or status.st_size > MAX_FILE_BYTES:
            raise ValueError(f"{path} is not an error file")
        return file.read(MAX_FILE_BYTES)


def _write(path: Path, content: dict[str, Any]) -> None:
    import json

    if path.exists() and not path.is_file():  # a device, which must not be replaced
        raise OSError(errno.EINVAL, "the error file is not a regular file", str(path))
    unfinished = path.with_name(f"{path.name}.{os.getpid()}.unfinished")
    try:
        unfinished.write_text(json.dumps(content))
        unfinished.replace(path)
    finally:
        with contextlib.suppress(OSError):
            unfinished.unlink(missing_ok=True)


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
    _leave(record_of(error))


def leave_text(message: str, origin: Origin) -> None:
    """Write the record of a process that ends with an error's status and without an exception."""
    _leave(ErrorRecord(message, origin=origin))


def _leave(record: ErrorRecord) -> None:
    name = TORCHELASTIC_ERROR_FILE.get()
    if not name:
        return
    path = Path(name)
    there = read_error_file(path)
    is_there = there is not None and there.message == record.message  # torch's @record has written it
    with contextlib.suppress(OSError):
        write_error_file(path, there._replace(origin=record.origin) if there is not None and is_there else record)
