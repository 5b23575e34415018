"""The batch script of ``procgroup submit slurm``: one srun starts a task for each rank."""

from __future__ import annotations

import argparse
import re
import shlex

_SCRIPT = """#!/bin/bash
{directives}

# The job's key: written to no file. srun passes it to the tasks in their environment.
PROCGROUP_JOB_KEY=$(od -An -N32 -tx1 /dev/urandom | tr -d ' \\n')
export PROCGROUP_JOB_KEY
export OMP_NUM_THREADS="${{SLURM_CPUS_PER_TASK:-1}}"

srun --kill-on-bad-exit=1 --label {cpus}{program}
"""

_FLAGS = {
    "--time": ("time", "how long the job may run: HH:MM:SS"),
    "--partition": ("partition", "the partition"),
    "--account": ("account", "the account that is charged"),
    "--gpus-per-node": ("gpus_per_node", "GPUs of each node"),
    "--mem": ("mem", "memory of each node"),
}
"""Flags of sbatch, passed unchanged."""

_TIME = re.compile(r"(\d+-)?\d+(:\d+){0,2}|unlimited|infinite", re.ASCII | re.IGNORECASE)


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of ``procgroup submit slurm``."""
    parser.add_argument("--nodes", type=int, default=1, help="nodes of the job (default: 1)")
    parser.add_argument("--ntasks-per-node", type=int, default=1, help="ranks on each node (default: 1)")
    parser.add_argument("--cpus-per-task", type=int, default=1, help="cores of each rank (default: 1)")
    for flag, (_, meaning) in _FLAGS.items():
        parser.add_argument(flag, default="", help=f"{meaning}; as sbatch's")
    parser.add_argument(
        "--sbatch", action="append", default=[], metavar="FLAG", help="another flag of sbatch; repeatable"
    )


def batch_script(options: argparse.Namespace) -> str:
    """Return the batch script. Raises ValueError for a number below 1, or a text that sbatch refuses."""
    for flag in ("nodes", "ntasks_per_node", "cpus_per_task"):
        if getattr(options, flag) < 1:
            raise ValueError(f"expected --{flag.replace('_', '-')} to be at least 1, got {getattr(options, flag)}")
    flags = [
        f"--job-name={options.name}",
        f"--nodes={options.nodes}",
        f"--ntasks-per-node={options.ntasks_per_node}",
        f"--cpus-per-task={options.cpus_per_task}",
        f"--output={options.name}.%j.log",
        *(f"{flag}={value}" for flag, (name, _) in _FLAGS.items() if (value := getattr(options, name))),
        *options.sbatch,
    ]
    for flag in flags:
        if not re.fullmatch(r"-[!-~]+", flag):
            raise ValueError(f"expected a flag of sbatch without blanks, such as --constraint=a100, got {flag!r}")
    if options.time and not _TIME.fullmatch(options.time):
        raise ValueError(f"expected --time as minutes, HH:MM:SS, DAYS-HH or unlimited, got {options.time!r}")
    directives = "\n".join(f"#SBATCH {flag}" for flag in flags)
    # srun inherits the number of cores from the job only in some versions of Slurm.
    cpus = f"--cpus-per-task={options.cpus_per_task} "
    return _SCRIPT.format(directives=directives, cpus=cpus, program=shlex.join(options.program))
