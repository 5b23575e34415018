"""The parts of a page's commands that count seconds, for a machine where a start may take long.

``patience.py job`` returns when a job runs whose ranks have all made a call: ``sleep`` begins then.
``patience.py interrupt COMMAND ...`` sends Ctrl-C to a command that has printed a line, and then nothing for 2 s.
"""

from __future__ import annotations

import select
import signal
import subprocess
import sys
import time
from pathlib import Path

from procgroup.diagnostics.recorded_job import reading

_START_SECONDS = 90.0
_QUIET_SECONDS = 2.0


def await_job() -> None:
    deadline = time.monotonic() + _START_SECONDS
    while not any(_has_begun(path) for path in reading.jobs()):
        if time.monotonic() > deadline:
            sys.exit(f"no job has begun in {_START_SECONDS:g} s")
        time.sleep(0.05)


def _has_begun(path: Path) -> bool:
    if not reading.is_running(path):
        return False
    ranks = reading.load(path, with_stacks=False).ranks
    return bool(ranks) and all(rank.recorded for rank in ranks)


def interrupt(command: list[str]) -> None:
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        shown, patience = b"", _START_SECONDS
        while select.select([process.stdout], [], [], patience)[0] and (more := process.stdout.read1()):
            shown += more
            patience = _QUIET_SECONDS if shown.endswith(b"\n") else _START_SECONDS
        process.send_signal(signal.SIGINT)
        sys.stdout.buffer.write(shown + process.stdout.read())


if __name__ == "__main__":
    await_job() if sys.argv[1] == "job" else interrupt(sys.argv[2:])
