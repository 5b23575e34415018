"""Start ranks in a Ray cluster, an actor for each, and end them together; the program of a Ray job.

``python -m procgroup.submit.ray_ranks --ranks 4 -- python train.py``. Each rank is a process of its own, which
ends with its actor, and has the variables of env://. The job's key goes to the actors in Ray's own messages.
"""

from __future__ import annotations

import argparse
import os
import secrets
import shlex
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from procgroup.launch.deadlines import RAY_PLACE_SECONDS, RAY_START_SECONDS
from procgroup.launch.hosted_store import ReservedPort
from procgroup.launch.ranks.rank_process import dying_with_this_process

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
    command = ["python", "-m", "procgroup.submit.ray_ranks"]
    command += [f"--ranks={options.ranks}", f"--cpus-per-rank={options.cpus_per_rank:g}"]
    command += [f"--gpus-per-rank={options.gpus_per_rank:g}", f"--start-timeout={options.start_timeout:g}"]
    return _SCRIPT.format(
        name=shlex.quote(options.name),
        ranks=options.ranks,
        address=f"--address {shlex.quote(options.address)} " if options.address else "",
        directory=shlex.quote(options.working_dir),
        command=shlex.join([*command, "--", *options.program]),
    )


class _RayRank:
    """One rank, in the process of its actor."""

    def __init__(self) -> None:
        self._port: ReservedPort | None = None

    def place(self) -> tuple[str, int]:
        """Return this node's address, and a port there that is reserved for rank 0."""
        import ray

        address = str(ray.util.get_node_ip_address())
        self._port = ReservedPort(address, 0)
        return address, self._port.port

    def run(self, command: Sequence[str], environment: Mapping[str, str]) -> int:
        """Run the program to its end; return its exit status."""
        tied = dying_with_this_process(command)
        with subprocess.Popen(tied, env={**os.environ, **environment}, stdin=subprocess.DEVNULL) as process:
            return process.wait()


def main(arguments: Sequence[str] | None = None) -> int:
    """Start the ranks; return 0, or the exit status of the first one that failed."""
    parser = argparse.ArgumentParser("python -m procgroup.submit.ray_ranks", description=__doc__)
    add_rank_flags(parser)
    parser.add_argument("command", nargs="+", help="the program of a rank, and its arguments")
    options = parser.parse_args(arguments)
    try:
        check_rank_flags(options)
    except ValueError as error:
        parser.error(str(error))
    os.environ.setdefault("RAY_DEDUP_LOGS", "0")  # by default Ray prints a line of several ranks once
    import ray

    ray.init()
    actors = _start_actors(options)
    environments = _environments(ray.get([actor.place.remote() for actor in actors], timeout=RAY_PLACE_SECONDS))
    running = {
        actor.run.remote(options.command, environment): rank
        for rank, (actor, environment) in enumerate(zip(actors, environments, strict=True))
    }
    return _await_ranks(running)


def _start_actors(options: argparse.Namespace) -> list[Any]:
    """Start an actor for each rank, all or none. Exits with the reason where the cluster lacks the resources."""
    import ray
    from ray.util.placement_group import placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    given = {"CPU": options.cpus_per_rank, "GPU": options.gpus_per_rank}
    group = placement_group([{name: amount for name, amount in given.items() if amount}] * options.ranks)
    if not group.wait(options.start_timeout):
        sys.exit(
            f"procgroup: the cluster had no free resources for {options.ranks} ranks with {given} each after "
            f"{options.start_timeout:g} s; it has {ray.cluster_resources()} in all"
        )
    remote = ray.remote(_RayRank)
    return [
        remote.options(
            num_cpus=options.cpus_per_rank,
            num_gpus=options.gpus_per_rank,
            scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=rank),
        ).remote()
        for rank in range(options.ranks)
    ]


def _environments(places: Sequence[tuple[str, int]]) -> list[dict[str, str]]:
    """Return the variables of each rank, given each rank's address and port."""
    address, port = places[0]
    on_host = Counter(host for host, _ in places)
    before: Counter[str] = Counter()
    job = {
        "WORLD_SIZE": str(len(places)),
        "MASTER_ADDR": address,
        "MASTER_PORT": str(port),
        "PROCGROUP_JOB_KEY": secrets.token_hex(32),
    }
    environments = []
    for rank, (host, _) in enumerate(places):
        local = {"LOCAL_RANK": str(before[host]), "LOCAL_WORLD_SIZE": str(on_host[host])}
        environments.append({**job, "RANK": str(rank), **local})
        before[host] += 1
    return environments


def _await_ranks(running: dict[Any, int]) -> int:
    """Wait for all ranks, or the first failure; the actors and their ranks end with this program."""
    import ray

    while running:
        (done,), _ = ray.wait(list(running), num_returns=1)
        rank = running.pop(done)
        try:
            status = int(ray.get(done))
        except ray.exceptions.RayError as error:
            print(f"procgroup: rank {rank} is lost: {error}", file=sys.stderr)
            return 1
        if status != 0:
            print(f"procgroup: rank {rank} ended with exit status {status}; ending the others", file=sys.stderr)
            return status if 0 < status < 256 else 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
