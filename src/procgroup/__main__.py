"""The command line: ``procgroup COMMAND``, ``python -m procgroup COMMAND`` and ``pgrun`` (``procgroup run``)."""

from __future__ import annotations

import importlib
import shlex
import sys
from collections.abc import Sequence
from typing import NamedTuple

from procgroup.launch.entry_point import run_command


class Command(NamedTuple):
    """One command: the module whose ``main(arguments)`` runs it and returns the exit status, and what it does."""

    module: str
    summary: str


COMMANDS = {
    "run": Command("procgroup.launch.run", "start a program as N ranks, here or on several hosts"),
    "bench": Command(
        "procgroup.diagnostics.bench.command", "measure procgroup here, beside Gloo and MPI where installed"
    ),
    "explain": Command(
        "procgroup.diagnostics.explain.command", "report the state of a job's ranks, and who waits for whom"
    ),
    "top": Command("procgroup.diagnostics.top.command", "show the ranks of a running job, live"),
    "metrics": Command("procgroup.diagnostics.metrics.command", "serve metrics of the jobs of this host to Prometheus"),
    "doctor": Command(
        "procgroup.diagnostics.doctor.command", "check this machine, or all hosts of a job, and advise changes"
    ),
    "capabilities": Command("procgroup.backends.capability_table", "print which backend does what, on which arrays"),
    "launch": Command("procgroup.launch.__main__", "as run, by the older contract: each rank gets --local-rank=N"),
    "submit": Command("procgroup.submit.command", "write a job for Slurm, Kubernetes or Ray, and submit it"),
    "completion": Command(
        "procgroup.completion.command", "print a script with which bash, zsh or fish complete commands"
    ),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; return the exit status. Only the module of that command is imported."""
    return run_command(lambda: _main(arguments))


def _main(arguments: Sequence[str] | None) -> int:
    name, *rest = [*(sys.argv[1:] if arguments is None else arguments)] or ["--help"]
    if name in ("-h", "--help", "help"):
        print(_help())
        return 0
    if name in ("-V", "--version"):
        print(f"procgroup {_version()}")
        return 0
    if name not in COMMANDS:
        print(f"procgroup: {_unknown(name, rest)}", file=sys.stderr)
        return 2
    status: int = importlib.import_module(COMMANDS[name].module).main(rest)
    return status


def run() -> int:
    """Run ``procgroup run`` with this process's arguments (the program ``pgrun``)."""
    return main(["run", *sys.argv[1:]])


def _unknown(name: str, rest: Sequence[str]) -> str:
    """Return what to say of a command that does not exist: the closest one, or the whole line with "run"."""
    import difflib

    said = f"there is no command {name!r}"
    if name.startswith("-") or name.endswith(".py"):
        return f"{said}; did you mean: procgroup run {shlex.join([name, *rest])}"
    close = difflib.get_close_matches(name, COMMANDS, n=1)
    advice = f"did you mean {close[0]!r}? " if close else ""
    return f"{said}; {advice}the commands are: {', '.join(COMMANDS)}"


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("procgroup")
    except PackageNotFoundError:
        return "(run from its sources, not installed)"


def _help() -> str:
    lines = [f"  {name:<12} {command.summary}" for name, command in COMMANDS.items()]
    return "\n".join(
        [
            "usage: procgroup COMMAND ...",
            "",
            *lines,
            "",
            "procgroup COMMAND --help lists its flags; procgroup --version prints the version.",
        ]
    )


if __name__ == "__main__":
    sys.exit(main())
