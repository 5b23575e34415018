"""Where the ranks of a test write, and what is kept of it when the test has failed.

Each world has a directory of its own below ``build/failed``, named for the test. It goes with its test, unless that
fails: then it is kept, until many other failures have come. Of a test with many worlds those that ended last count.
"""

from __future__ import annotations

import re
import shutil
import tempfile
from pathlib import Path

FAILED = Path(__file__).parents[1] / "build" / "failed"
ENDED, KEPT = 3, 200
"""How many directories of worlds that have ended are kept for the running test, and how many of tests that failed."""

_test = ""
_running: list[Path] = []
_ended: list[Path] = []
_kept: set[Path] = set()


def begin_test(name: str) -> None:
    """Name the test, in the process that runs it: what it starts has directories that go with their worlds."""
    global _test
    _test = re.sub(r"[^\w.\[\]-]+", "-", name.removeprefix("tests/"))[-150:]


def new_directory() -> Path:
    """Make the directory of a world."""
    if not _test:
        return Path(tempfile.mkdtemp(prefix="world-"))
    FAILED.mkdir(parents=True, exist_ok=True)
    _running.append(Path(tempfile.mkdtemp(prefix=f"{_test}-", dir=FAILED)))
    return _running[-1]


def end(directory: Path) -> None:
    """Keep what the ranks of a world have printed until its test has ended."""
    if directory not in _running:
        _remove(directory)
        return
    _running.remove(directory)
    _ended.append(directory)
    for file in directory.iterdir():
        if file.suffix != ".output":
            file.unlink(missing_ok=True)
    while len(_ended) > ENDED:
        _remove(_ended.pop(0))


def of_this_test() -> list[Path]:
    """Return the files with what the ranks have printed so far."""
    return [file for directory in [*_ended, *_running] for file in sorted(directory.glob("*.output"))]


def end_test(*, has_failed: bool) -> None:
    """Remove what the worlds of the test have left, or see that it is not too much with that of other tests."""
    if has_failed:
        _kept.update(_ended, _running)  # a world may last for several tests
    for directory in _ended:
        _remove(directory)
    _ended.clear()
    if has_failed:
        for old in sorted(FAILED.glob("*"), key=_time, reverse=True)[KEPT:]:
            shutil.rmtree(old, ignore_errors=True)


def _remove(directory: Path) -> None:
    if directory not in _kept:
        shutil.rmtree(directory, ignore_errors=True)


def _time(directory: Path) -> float:
    try:
        return directory.stat().st_mtime
    except FileNotFoundError:  # of another process, which has just ended its test
        return 0.0
