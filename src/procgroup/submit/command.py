"""``procgroup submit``: write a job for Slurm, Kubernetes or Ray, and submit it with the scheduler's client."""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from procgroup.launch.deadlines import SUBMIT_SECONDS
from procgroup.submit import kubernetes as submit_kubernetes
from procgroup.submit import ray_ranks as submit_ray
from procgroup.submit import slurm as submit_slurm

_MARK = "# Written by procgroup submit, which overwrites this file.\n"
_BYTES_BEFORE_MARK = 4096


class Scheduler(NamedTuple):
    """How to submit a job to a scheduler: the flags, the job's text, and the client's command for the written file."""

    summary: str
    suffix: str
    add_flags: Callable[[argparse.ArgumentParser], None]
    text: Callable[[argparse.Namespace], str]
    client: tuple[str, ...]


SCHEDULERS = {
    "slurm": Scheduler(
        "a batch script for sbatch", ".sbatch", submit_slurm.add_flags, submit_slurm.batch_script, ("sbatch",)
    ),
    "k8s": Scheduler(
        "a manifest of a JobSet or an Indexed Job",
        ".yaml",
        submit_kubernetes.add_flags,
        submit_kubernetes.manifest,
        ("kubectl", "create", "-f"),
    ),
    "ray": Scheduler("a Ray job", ".sh", submit_ray.add_flags, submit_ray.job_script, ("sh",)),
}


def main(arguments: Sequence[str]) -> int:
    """Write the job that the command line describes; submit it if the client is installed. Return the exit status."""
    options = _parser().parse_args(arguments)
    scheduler = SCHEDULERS[options.scheduler]
    words = options.program[1:] if options.program[:1] == ["--"] else options.program
    options.program = ["python", *words] if words and words[0].endswith(".py") else words
    if not options.program:
        options.parser.error("expected a program at the end, such as: procgroup submit ... train.py --its-flag 1")
    options.name = options.name or _name_of(options.program)
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", options.name):  # it is a file name, too
        options.parser.error(
            f"expected --name to be letters, digits, dots, hyphens and underscores, got {options.name!r}"
        )
    try:
        text = scheduler.text(options)
    except ValueError as error:
        options.parser.error(str(error))
    path = Path(options.output or f"{options.name}{scheduler.suffix}")
    try:
        _write(path, text)
    except FileExistsError:
        options.parser.error(
            f"{path} exists, and procgroup submit did not write it: name another file by --output, or remove this one"
        )
    except OSError as error:
        options.parser.error(f"cannot write {path}: {error.strerror}; name another file by --output")
    print(f"procgroup submit: wrote {path}", file=sys.stderr)
    return 0 if options.write_only else _submit(scheduler, path)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("procgroup submit", description=__doc__)
    commands = parser.add_subparsers(dest="scheduler", required=True, metavar="SCHEDULER")
    for name, scheduler in SCHEDULERS.items():
        command = commands.add_parser(
            name, help=scheduler.summary, description=f"Write and submit {scheduler.summary}."
        )
        command.set_defaults(parser=command)
        command.add_argument("--name", default="", help="the job's name; by default the program's")
        command.add_argument("--output", default="", metavar="FILE", help="where the job is written")
        command.add_argument("--write-only", action="store_true", help="do not submit the job")
        scheduler.add_flags(command)
        command.add_argument(
            "program",
            nargs=argparse.REMAINDER,
            help="the ranks' program and its arguments; python runs one that ends in .py",
        )
    return parser


def _name_of(program: Sequence[str]) -> str:
    """Return a name for the job: the script's, with characters that every scheduler accepts."""
    script = next((word for word in program if word.endswith(".py")), program[0])
    return re.sub(r"[^a-z0-9]+", "-", Path(script).stem.lower())[:40].strip("-") or "job"


def _write(path: Path, text: str) -> None:
    """Write the file, readable by its owner alone: a manifest holds the job's key.

    Raises FileExistsError rather than overwriting a file that this command has not written.
    """
    if _is_own(path):
        path.unlink()
    # The mark is the first line, or the second one after ``#!``.
    first, end, rest = text.partition("\n")
    marked = f"{first}{end}{_MARK}{rest}" if first.startswith("#!") else _MARK + text
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(marked)


def _is_own(path: Path) -> bool:
    """Return whether the file is one that this command wrote."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return _MARK.encode() in file.read(_BYTES_BEFORE_MARK)


def _submit(scheduler: Scheduler, path: Path) -> int:
    command = [*scheduler.client, str(path)]
    needed = submit_ray.CLIENT if scheduler is SCHEDULERS["ray"] else command[0]
    if shutil.which(needed) is None:
        print(f"procgroup submit: {needed} is not installed here; submit with: {' '.join(command)}", file=sys.stderr)
        return 0
    try:
        return subprocess.run(command, timeout=SUBMIT_SECONDS, check=False).returncode
    except subprocess.TimeoutExpired:
        print(f"procgroup submit: {' '.join(command)} was not done after {SUBMIT_SECONDS:g} s", file=sys.stderr)
        return 1
