"""The command ``procgroup top``: what the ranks of a running job do now, twice a second, until a key ends it."""

from __future__ import annotations

import argparse
import os
import select
import signal
import sys
import termios
import time
import tty
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from procgroup.diagnostics.recorded_job import reading
from procgroup.diagnostics.recorded_job.text import as_text
from procgroup.diagnostics.top.watch import JobWatch, Look, plain
from procgroup.process.environ import TERM

FLAGS = {
    "--once": "print one table as text, and end",
    "--web": "serve a page with the table and a timeline to the browsers of this host, and print its address",
    "--port": "with --web: the port; by default a free one",
    "--open": "with --web: open the page in a browser",
}

_LIVE_SECONDS = 0.5
_PLAIN_SECONDS = 2.0
# Of many ranks a look takes longer, and comes less often: so it takes a twentieth of a core at most.
_PAUSES_PER_LOOK = 20


QUIT = b"qQ"


class KeyboardInput:
    """Use as a context manager: meanwhile keys are read one by one, and are not shown."""

    def __init__(self) -> None:
        self._descriptor = sys.stdin.fileno() if sys.stdin.isatty() else None
        self._before: list[Any] = []

    def __enter__(self) -> KeyboardInput:
        if self._descriptor is not None:
            self._before = termios.tcgetattr(self._descriptor)
            tty.setcbreak(self._descriptor)  # Ctrl-C is a signal as before
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._descriptor is not None:
            termios.tcsetattr(self._descriptor, termios.TCSADRAIN, self._before)

    def wait(self, seconds: float) -> bool:
        """Wait so long, or until a key is pressed that ends the view; return whether one was."""
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            if self._descriptor is None:
                time.sleep(left)
            elif select.select([self._descriptor], [], [], left)[0]:
                pressed = os.read(self._descriptor, 64)
                if not pressed or any(key in QUIT for key in pressed):
                    return True
        return False


def main(arguments: Sequence[str]) -> int:
    """Run the command; return 0, or 2 if the job does not exist."""
    parser = _parser()
    options = parser.parse_args(arguments)
    if not options.web and (options.port is not None or options.open):
        parser.error("--port and --open go with --web")
    signal.signal(signal.SIGTERM, _end)  # the terminal is left as it was
    try:
        directory = _find(options.job)
        if options.web:
            return _serve(directory, options)
        watch = JobWatch(directory)
        if options.once:
            with KeyboardInput() as keys:
                _look_first(watch, keys)
            print(plain(watch.look(study=True)))
        else:
            _follow(watch)
    except LookupError as error:
        print(f"procgroup top: {error.args[0]}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 0
    except BrokenPipeError:  # the reader of the output has ended, such as head
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="procgroup top",
        description="Show the ranks of a running job of this host, from their flight records: twice a second on "
        "a terminal where rich is installed, and otherwise as a table every 2 s. q or Ctrl-C ends it. Exit status: 0, "
        "or 2 if the job does not exist.",
    )
    parser.add_argument(
        "job",
        nargs="?",
        default="",
        metavar="JOB",
        help="a job: the beginning of its name, its run id, or a directory of records; by default the newest that runs",
    )
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument("--once", action="store_true", help=FLAGS["--once"])
    kind.add_argument("--web", action="store_true", help=FLAGS["--web"])
    parser.add_argument("--port", type=_port, metavar="N", help=FLAGS["--port"])
    parser.add_argument("--open", action="store_true", help=FLAGS["--open"])
    return parser


def _port(text: str) -> int:
    if not (text.isdecimal() and int(text) < 1 << 16):
        raise argparse.ArgumentTypeError(f"{text!r} is not a port: 0 (a free one) to 65535")
    return int(text)


def _serve(directory: Path, options: argparse.Namespace) -> int:
    from procgroup.diagnostics.top.job_page import serve  # which needs a web server's modules

    return serve(directory, port=options.port or 0, in_browser=options.open)


def _end(number: int, _: object) -> None:
    sys.exit(128 + number)


def _find(which: str) -> Path:
    running = () if which else (path for path in reading.jobs() if reading.is_running(path))
    return next(iter(running), None) or reading.find(which)


def _follow(watch: JobWatch) -> None:
    """Show looks until the job or the user ends it; print at the end of a job what has become of it."""
    with KeyboardInput() as keys:
        last = _follow_live(watch, keys) if _is_terminal() else None
        if not last:
            _look_first(watch, keys)
            last = _repeat(watch, keys, lambda look: print(plain(look), end="\n\n", flush=True), _PLAIN_SECONDS)
    if last.has_ended:
        print(f"the job has ended\n{as_text(last.job, last.found)}", flush=True)


def _is_terminal() -> bool:
    return sys.stdout.isatty() and TERM.get() != "dumb"


def _follow_live(watch: JobWatch, keys: KeyboardInput) -> Look | None:
    try:
        from procgroup.diagnostics.top import live
    except ImportError:  # rich is not installed
        return None
    with live.view() as view:
        return _repeat(watch, keys, view.show, _LIVE_SECONDS)


def _look_first(watch: JobWatch, keys: KeyboardInput) -> None:
    """Look once, so that the first table has rates."""
    if not watch.look().has_ended:
        keys.wait(_LIVE_SECONDS)


def _repeat(watch: JobWatch, keys: KeyboardInput, show: Callable[[Look], None], seconds: float) -> Look:
    """Look and show until the job has ended or a key ends it; return the last look."""
    while True:
        began = time.process_time()
        look = watch.look()
        if look.has_ended:
            return look
        show(look)
        if keys.wait(max(seconds, _PAUSES_PER_LOOK * (time.process_time() - began))):
            return look
