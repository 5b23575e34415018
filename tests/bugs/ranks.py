"""The ranks of bug programs: whole programs, which the interpreter ends as it ends a user's.

::

    python ranks.py serve preloaded          # reads a world from each line of stdin, and forks its ranks
    python ranks.py join DIRECTORY           # is one rank of the world in this directory, under mpiexec

Each rank has a keeper, the process that has forked it. The keeper writes down when and how the rank has ended, and what
it has left running, and kills that. In the world's directory there are for each rank R:

    R.pid       the rank's process
    R.moments   lines "start SECONDS" and "fault SECONDS", by time.monotonic(); a fault is the guilty line's first run
    R.ready     made when the rank is about to start the program
    R.seen      JSON: the error that has left the program, when it came, and which arrays have changed
    R.end       JSON: exit status, moment, and the commands that were still running a second later
    R.output    what it has printed
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import signal
import sys
import threading
import time
from pathlib import Path
from types import FrameType
from typing import Any

from forked_ranks import adopt_orphans, be_a_program, die_with_parent, kill_leftovers

PRELOADED = {
    "procgroup": ["numpy", "procgroup", "procgroup.backends.peer_network", "procgroup.backends.native"],
    "torch": ["numpy", "torch", "torch.nn.parallel", "torch.distributed", "procgroup", "procgroup.torch_plugin"],
    "gloo": ["numpy", "torch", "torch.nn.parallel", "torch.distributed"],
}
"""What the server has imported: an import of torch takes more than a second, of which no program is to wait."""


def serve(preloaded: str) -> tuple[dict[str, Any], int]:
    """Fork the ranks of the worlds that come on stdin. Returns in the ranks, with the world and the rank."""
    for name in PRELOADED[preloaded]:
        importlib.import_module(name)
    gc.freeze()  # otherwise each rank copies all of the memory at its end, which takes a second
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for keepers
    for line in sys.stdin:
        world = json.loads(line)
        for rank in range(world["size"]):
            if os.fork() == 0:
                die_with_parent()
                keep(Path(world["directory"]), rank)
                return world, rank
    sys.exit()


def join(directory: str) -> tuple[dict[str, Any], int]:
    """Be a rank that mpiexec has started. Returns in the process of the rank itself."""
    # By which MPICH's mpiexec notifies of a rank that has ended.
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    rank = next(int(os.environ[name]) for name in ("PMI_RANK", "OMPI_COMM_WORLD_RANK") if name in os.environ)
    keep(Path(directory), rank)
    world = json.loads(Path(directory, "world").read_text())
    world["environments"] = [{**os.environ, **environment} for environment in world["environments"]]
    return world, rank


def keep(directory: Path, rank: int) -> None:
    """Fork the rank, in which this returns; wait for its end, write it down, and exit."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    adopt_orphans()  # of the rank
    pid = os.fork()
    if pid == 0:
        die_with_parent()
        return
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    write(directory / f"{rank}.pid", str(pid))
    _, status = os.waitpid(pid, 0)
    moment = time.monotonic()
    end = {"status": os.waitstatus_to_exitcode(status), "moment": moment, "left": kill_leftovers()}
    write(directory / f"{rank}.end", json.dumps(end))
    os._exit(0)


def write(file: Path, text: str) -> None:
    """Make a file that has all of its text from the start."""
    partial = file.with_name(f"{file.name}.partial")
    partial.write_text(text)
    partial.rename(file)


def play(world: dict[str, Any], rank: int) -> None:
    """Run the program as one rank of its world; what it raises, this raises."""
    directory = Path(world["directory"])
    environment = world["environments"][rank]
    be_a_program(environment, directory / f"{rank}.output", environment.get("WORLD_NAMESPACE", ""))
    module = importlib.import_module(world["module"])
    library = importlib.import_module("bugs.library")
    if rank in world["guilty"]:
        _note_the_fault(directory / f"{rank}.moments", module.__file__ or "", world["line"])
    _start_together(directory, rank, world["size"])
    try:
        getattr(module, world["program"])()
    except BaseException as error:
        _write_what_was_seen(directory, rank, error, library)
        raise
    _write_what_was_seen(directory, rank, None, library)


def _start_together(directory: Path, rank: int, size: int) -> None:
    """Wait until all ranks are here: those of a late process would see other errors."""
    (directory / f"{rank}.ready").touch()
    while not all((directory / f"{other}.ready").exists() for other in range(size)):
        time.sleep(0.002)
    _note(directory / f"{rank}.moments", "start")


def _note(file: Path, what: str) -> None:
    with file.open("a") as moments:
        moments.write(f"{what} {time.monotonic()}\n")


def _note_the_fault(moments: Path, program: str, line: int) -> None:
    """Write down when the guilty line is about to run for the first time, on whatever thread."""

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        if frame.f_code.co_filename != program:
            return None
        if event == "line" and frame.f_lineno == line:
            _note(moments, "fault")
            sys.settrace(None)
            threading.settrace(None)
            return None
        return trace

    sys.settrace(trace)
    threading.settrace(trace)


def _write_what_was_seen(directory: Path, rank: int, error: BaseException | None, library: Any) -> None:
    seen = {"moment": time.monotonic(), "kind": "", "text": "", "attributes": {}}
    seen |= {"changed": library.changed(), "watched": library.number_watched()}
    if error is not None:
        attributes = {name: value for name, value in vars(error).items() if _is_data(value)}
        seen |= {"kind": type(error).__name__, "text": str(error), "attributes": attributes}
    write(directory / f"{rank}.seen", json.dumps(seen))


def _is_data(value: Any) -> bool:
    try:
        json.dumps(value)
    except (TypeError, ValueError):
        return False
    return True


if __name__ == "__main__":
    play(*{"serve": serve, "join": join}[sys.argv[1]](sys.argv[2]))
