"""What to do where env:// lacks something: for the launcher that started this process, or in general."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping

from procgroup.cluster import task_launcher
from procgroup.cluster.task_launcher import LauncherTask
from procgroup.process import environ

_LONGEST_COMMAND = 300

_ALONE = "A program of one process passes rank=0 and world_size=1"
_ON_ONE_HOST = "start the ranks of one host with `procgroup run --nproc-per-node N script.py`, which sets them all"

_SIZE_OF_JOB = "WORLD_SIZE, in the environment of the pod's template, to the number of pods (.spec.completions)"


def advice(task: LauncherTask | None, found: Mapping[str, str]) -> str:
    """Return what to do where some of env://'s variables are missing.

    ``task`` is what is known about the launcher; ``found`` are env://'s variables that are set, and arguments that were
    passed in their place.
    """
    if task is not None and task.launcher is task_launcher.RAY:
        return _ray()
    if task is not None:
        return _under(task, found)
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
        return f"{known} is set, but {unknown} is not: set both of them."
    if "ipykernel" in sys.modules or hasattr(sys, "ps1"):
        return (
            "This is an interactive session, which is one process; procgroup.testing.run_ranks(function, N) calls a "
            "function on N ranks in it."
        )
    return "No launcher was detected."


def _under(task: LauncherTask, found: Mapping[str, str]) -> str:
    if task.launcher is task_launcher.SLURM_BATCH:
        return (
            f"This process runs in a Slurm job, but is not one of srun's tasks ({task.described()}). Start the ranks "
            f"with\n  srun {_command()}\n{_ALONE}."
        )
    where = f"This process was started by {task.launcher.name}, which sets other variables: {task.described()}. "
    if task.world_size is None and environ.WORLD_SIZE.name not in found:
        return f"{where}Set {_SIZE_OF_JOB}. {_ALONE}."
    return f"{where}They do not say where these ranks meet: {_address(task)} {_ALONE}."


def _address(task: LauncherTask) -> str:
    """Return what sets the address that a launcher's variables lack."""
    if task.launcher is task_launcher.KUBERNETES:
        return (
            "set .spec.template.spec.subdomain of the Job to the name of a headless service, as `procgroup submit k8s` "
            "does, or MASTER_ADDR to the name or address of the pod with index 0 and MASTER_PORT to a port there."
        )
    host = "127.0.0.1" if task.is_on_one_host else "the name or address of rank 0's host"
    return f"set MASTER_ADDR to {host} and MASTER_PORT to a port that is free there, the same on every rank."


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
