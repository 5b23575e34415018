"""The command line: ``procgroup COMMAND``, ``python -m procgroup COMMAND`` and ``pgrun`` (``procgroup run``)."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from typing import NamedTuple


class Command(NamedTuple):
    """One command: the module whose ``main(arguments)`` runs it and returns the exit status, and what it does."""

    module: str
    summary: str


COMMANDS = {
    "run": Command("procgroup.launch.run", "start a program as N ranks on this host and end them together"),
    "launch": Command("procgroup.launch.launch", "the same by the old contract: each rank gets --local-rank=N"),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; return the exit status. Only the module of that command is imported."""
    name, *rest = [*(sys.argv[1:] if arguments is None else arguments)] or ["--help"]
    if name in ("-h", "--help"):
        print(_help())
        return 0
    if name == "--version":
        print(f"procgroup {_version()}")
        return 0
    if name not in COMMANDS:
        print(f"procgroup: there is no command {name!r}; the commands are: {', '.join(COMMANDS)}", file=sys.stderr)
        return 2
    try:
        status: int = importlib.import_module(COMMANDS[name].module).main(rest)
    except KeyboardInterrupt:
        return 130
    return status


def run() -> int:
    """Run ``procgroup run`` with this process's arguments (the program ``pgrun``)."""
    return main(["run", *sys.argv[1:]])


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("procgroup")
    except PackageNotFoundError:
        return "(run from its sources, not installed)"


def _help() -> str:
    lines = [f"  {name:<8} {command.summary}" for name, command in COMMANDS.items()]
    return "\n".join(["usage: procgroup COMMAND ...", "", *lines, "", "procgroup COMMAND --help tells more."])


if __name__ == "__main__":
    sys.exit(main())
