"""The agent of one host, as ``procgroup run --hosts`` starts it over ssh; its stdin is the channel to the command.

Run as ``python -m procgroup.launch.remote_agent FLAGS SCRIPT ARGUMENTS``, with the flags of ``procgroup run``.
It does what ``procgroup run`` does on one of several nodes, and ends when its stdin ends, that is with the command or
the connection (see hosts/agent_channel.py)::

    stdin ends ──> SIGHUP ──1.5 s──> SIGINT, which kills ranks that resist ──1 s──> SIGKILL
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from procgroup import __version__
from procgroup.launch import flags, run
from procgroup.launch.entry_point import run_command
from procgroup.launch.hosted_store import ReservedPort
from procgroup.launch.hosts.agent_channel import Assignment, LineReader, Ready
from procgroup.launch.output.sinks import say

_LAST_STEPS = ((signal.SIGHUP, 1.5), (signal.SIGINT, 1.0), (signal.SIGKILL, 0.0))


def main(arguments: Sequence[str]) -> int:
    """Run an agent that the command at the other end of stdin directs; return the exit status."""
    channel = LineReader(_take_stdin())
    line = channel.read()
    if line is None:
        say("this program is started by procgroup run --hosts, which writes to its stdin; start that command instead")
        return 2
    assignment = Assignment.from_line(line)
    os.environ.update(assignment.environment)
    try:
        os.chdir(assignment.directory)
        reserved = None if assignment.port is None else ReservedPort("0.0.0.0", assignment.port)
    except OSError as error:
        say(_describe(error, assignment))
        return 2
    options = flags.parse("procgroup run", arguments)
    command = [*run.program_command(options), *options.script_arguments]
    _write(Ready(__version__, None if reserved is None else reserved.port).to_line())
    endpoint = channel.read()
    if endpoint is None:
        return 1
    return _take_part(options, command, assignment, endpoint.decode(), channel)


def _take_part(
    options: argparse.Namespace, command: Sequence[str], assignment: Assignment, endpoint: str, channel: LineReader
) -> int:
    """Run this host's ranks, once all agents are ready; return the job's exit status."""
    options.rdzv_endpoint = endpoint
    job, meeting = run.plan_job(options)
    job = job._replace(host=assignment.host)
    if meeting is not None:
        is_host = assignment.port is not None
        meeting = meeting._replace(job=job, node_rank=assignment.node_rank, is_host=is_host)
    threading.Thread(target=_follow, args=(channel,), name="procgroup-command", daemon=True).start()
    return run.run_node(options, command, job, meeting, shares_console=True)


def _describe(error: OSError, assignment: Assignment) -> str:
    if error.filename is not None:
        return f"cannot go to the directory {assignment.directory}: {error.strerror}; make it, or name one by --chdir"
    return f"cannot use port {assignment.port} of --rdzv-endpoint: {error.strerror}; choose another, or none"


def _take_stdin() -> int:
    """Return the channel's descriptor; replace stdin by an empty one, which the ranks inherit."""
    channel = os.dup(0)
    with Path(os.devnull).open("rb") as empty:
        os.dup2(empty.fileno(), 0)
    return channel


def _write(line: bytes) -> None:
    with suppress(OSError):  # the command has ended; so has stdin
        os.write(1, line)


def _follow(channel: LineReader) -> None:
    """Forward the command's signals; end this process when the command or the connection has ended."""
    while (line := channel.read()) is not None:
        with suppress(KeyError):
            os.kill(os.getpid(), signal.Signals[line.decode(errors="replace")])
    for number, pause in _LAST_STEPS:
        os.kill(os.getpid(), number)
        time.sleep(pause)


if __name__ == "__main__":
    # A Ctrl-C that the command forwards may come before the agent handles signals.
    sys.exit(run_command(lambda: main(sys.argv[1:])))
