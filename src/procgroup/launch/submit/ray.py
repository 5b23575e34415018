"""The job of ``procgroup submit ray``: ``ray job submit`` of a program that starts the ranks as actors (ray_ranks)."""

from __future__ import annotations

import argparse
import shlex

from procgroup.launch.deadlines import RAY_START_SECONDS

CLIENT = "ray"


_SCRIPT = """#!/bin/sh
# {name}: {ranks} ranks. The cluster's Python needs procgroup; the working directory is copied to it.
exec ray job submit {address}--submission-id {name}-$$ --working-dir {directory} -- {command}
"""


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of ``procgroup submit ray``."""
    add_rank_flags(parser)
    parser.add_argument(
        "--address", default="", help="the cluster's dashboard, http://host:8265; by default RAY_ADDRESS"
    )
    parser.add_argument("--working-dir", default=".", help="the directory that the ranks run in (default: this one)")


def add_rank_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags for the number of ranks and the resources of each."""
    parser.add_argument("--ranks", type=int, default=1, help="how many ranks (default: 1)")
    parser.add_argument("--cpus-per-rank", type=float, default=1.0, help="Ray's CPUs for each rank (default: 1)")
    parser.add_argument("--gpus-per-rank", type=float, default=0.0, help="Ray's GPUs for each rank (default: 0)")
    parser.add_argument(
        "--start-timeout",
        type=float,
        default=RAY_START_SECONDS,
        help=f"seconds to wait for free resources in the cluster (default: {RAY_START_SECONDS:g})",
    )


def check_rank_flags(options: argparse.Namespace) -> None:
    """Raise ValueError for an unusable number of ranks, CPUs, GPUs or seconds."""
    if options.ranks < 1 or options.start_timeout <= 0:
        raise ValueError(
            f"expected --ranks of at least 1, --start-timeout above 0, got {options.ranks}, {options.start_timeout:g}"
        )
    if options.cpus_per_rank < 0 or options.gpus_per_rank < 0 or options.cpus_per_rank + options.gpus_per_rank == 0:
        raise ValueError(
            "expected --cpus-per-rank and --gpus-per-rank of at least 0, and one of them above, "
            f"got {options.cpus_per_rank:g}, {options.gpus_per_rank:g}"
        )


def job_script(options: argparse.Namespace) -> str:
    """Return the shell script that submits the job. Raises ValueError as check_rank_flags does."""
    check_rank_flags(options)
    command = ["python", "-m", "procgroup.launch.submit.ray_ranks"]
    command += [f"--ranks={options.ranks}", f"--cpus-per-rank={options.cpus_per_rank:g}"]
    command += [f"--gpus-per-rank={options.gpus_per_rank:g}", f"--start-timeout={options.start_timeout:g}"]
    return _SCRIPT.format(
        name=shlex.quote(options.name),
        ranks=options.ranks,
        address=f"--address {shlex.quote(options.address)} " if options.address else "",
        directory=shlex.quote(options.working_dir),
        command=shlex.join([*command, "--", *options.program]),
    )
