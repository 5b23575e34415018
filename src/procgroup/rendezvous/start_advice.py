"""What to write where env:// finds no ranks: the lines for the launcher that started this process, or in general."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping

from procgroup import environ
from procgroup.cluster import task_launcher
from procgroup.cluster.task_launcher import Task

_LONGEST_COMMAND = 300

_ALONE = "A program of one process passes rank=0 and world_size=1"
_ON_ONE_HOST = "start the ranks of one host with `procgroup run --nproc-per-node N script.py`, which sets them all"


def advice(task: Task | None, found: Mapping[str, str]) -> str:
    """Return what to do where some of env://'s variables are missing.

    ``task`` is what is known about the launcher; ``found`` are env://'s variables that are set, and arguments that were
    passed in their place.
    """
    if task is not None and task.launcher is task_launcher.RAY:
        return _ray()
    if task is not None:
        return _under(task)
    return (
        f"{_cause(found)} {_ALONE}; {_ON_ONE_HOST}; or set the variables yourself, or pass rank=, world_size= and "
        "init_method='tcp://host:port'."
    )


def _cause(found: Mapping[str, str]) -> str:
    """Say what the variables that are set mean without the others."""
    has_rank, has_size = (name in found for name in (environ.RANK.name, environ.WORLD_SIZE.name))
    if has_rank and has_size:
        return (
            "The rank and the world size are known, but not where the ranks meet: set MASTER_ADDR to the address of "
            "rank 0's host (127.0.0.1 when all ranks are on one host) and MASTER_PORT to a port that is free there "
            "(29500, say), the same on every rank."
        )
    if has_rank or has_size:
        known, unknown = ("RANK", "WORLD_SIZE") if has_rank else ("WORLD_SIZE", "RANK")
        return f"{known} is set, but {unknown} is not: what sets one of them has to set both."
    if "ipykernel" in sys.modules or hasattr(sys, "ps1"):
        return (
            "This is an interactive session, which is one process; procgroup.testing.run_ranks(function, N) calls a "
            "function on N ranks in it."
        )
    return "No launcher was detected."


def _under(task: Task) -> str:
    launcher = task.launcher
    seen = ", ".join(f"{name}={value}" for name, value in task.variables.items())
    command, line = _command(), shlex.quote(_script(task))
    if launcher is task_launcher.SLURM_BATCH:
        where = f"This process runs in a Slurm job, but is not one of srun's tasks ({seen}). Start the ranks with\n"
        how = f"  srun sh -c {line}\n"
    else:
        where = f"This process was started by {launcher.name}, which sets other variables: {seen}. "
        where += f"In place of `{command}`, let that launcher start\n"
        how = f"  sh -c {line}\n"
    return f"{where}{how}{_placeholders(line)}{_ALONE}."


def _script(task: Task) -> str:
    """Return the shell's program that turns the launcher's variables into env://'s and starts this program."""
    launcher = task.launcher
    settings = {
        "RANK": f"${launcher.rank}",
        "WORLD_SIZE": f"${launcher.world_size}" if launcher.world_size else "NUMBER_OF_RANKS",
        "LOCAL_RANK": f"${launcher.local_rank}" if launcher.local_rank else "",
        "MASTER_ADDR": launcher.master_addr or ("127.0.0.1" if task.is_on_one_host else "HOST_OF_RANK_0"),
        "MASTER_PORT": launcher.master_port,
    }
    assignments = " ".join(f"{name}={value}" for name, value in settings.items() if value)
    return f"export {assignments}; exec {_command()}"


def _placeholders(line: str) -> str:
    meanings = {
        "NUMBER_OF_RANKS": "the Job's .spec.completions",
        ".SERVICE": "the headless service that .spec.template.spec.subdomain names",
        "HOST_OF_RANK_0": "the name or address of the first host, which every host can reach",
        "=127.0.0.1 ": "enough while all ranks are on one host; on several, write the name or address of the first",
    }
    there = [f"{word.strip('.= ')} is {meaning}" for word, meaning in meanings.items() if word in line]
    return "; ".join(there) + ".\n" if there else ""


def _ray() -> str:
    return (
        "This process was started by Ray, which gives its actors no ranks. Number the actors yourself, let the actor "
        "of rank 0 return ray.util.get_node_ip_address(), and call in each, with that address,\n"
        "  dist.init_process_group(init_method=f'tcp://{address}:29500', rank=rank, world_size=world_size)\n"
        f"{_ALONE}."
    )


def _command() -> str:
    """Return the command line of this process, to be written again; an example in place of a long one."""
    command = shlex.join(sys.orig_argv)
    is_program_text = "-c" in sys.orig_argv[1:3]
    return "python script.py" if is_program_text or not 0 < len(command) <= _LONGEST_COMMAND else command
