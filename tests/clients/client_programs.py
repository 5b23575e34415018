"""The clients' programs: what there is, how each is started, and what became of it.

A client is a folder here with

    requirements.txt   pinned, torch==2.13.0 among them: the client's environment is made from it
    *.py               programs (or none, where the client has its own)
    client.toml        what is run:

        title = "PyTorch Ignite"
        package = "pytorch-ignite"         # whose version the table shows

        [[program]]
        name = "collectives"               # of the test, and of the results
        what = "idist.all_reduce, ..."     # for the table
        command = ["{python}", "{folder}/collectives.py"]                   # its stock launcher
        run = ["--nproc-per-node", "2", "{folder}/collectives.py"]          # after `procgroup run --replace-gloo`;
                                                                            # without it the column is empty
        named = true                       # whether it can use the backend by the name "procgroup"
        gpus = true                        # whether it is played on stand-in GPUs, too
        reports = true                     # whether it calls client_report.report (default: true)
        tolerance = 1e-6                   # relative, of floats that are reported (default)
        seconds = 240                      # what one run may take (default)
        own_gloo = false                   # whether it makes groups of its own by the name "gloo", whatever it is given
        remarks = "..."                    # for the table (default: "")

In commands {python} is the Python of the client's environment, {folder} the client's folder, {scratch} an empty folder
of this run, {port} a free port. In the environment of a program stand

    CLIENT_BACKEND     the backend that it is to name: "gloo", "procgroup" or "nccl" (client_report.BACKEND)
    CLIENT_DEVICE      what it is to compute on: "cpu" or "cuda" (client_report.DEVICE)
    CLIENT_RESULTS     the folder to which client_report.report and client_watch write
    PROCGROUP_REPLACE_GLOO=1 in the way "replaced", and this and PROCGROUP_REPLACE_NCCL=1 in the way "gpus"

A program is played in up to five ways. On Gloo it runs without procgroup. In the others every process group that is
made, in any process, must be procgroup's (client_watch.py looks at its class), and what is reported must equal Gloo's.
"""

from __future__ import annotations

import json
import math
import os
import tempfile
import time
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from clients.environment import CLIENTS, installed_procgroup, python_of
from torch_gpus import stand_in_torch

from world import free_port, run_command

WAYS = {
    "gloo": "its launcher, Gloo",
    "replaced": "its launcher, `PROCGROUP_REPLACE_GLOO=1`",
    "run": "`procgroup run --replace-gloo`",
    "named": 'its launcher, by the name "procgroup"',
    "gpus": "its launcher, `PROCGROUP_REPLACE_NCCL=1`, on stand-in GPUs",
}
"""The ways to play a program, and what the table calls them."""


ON_GPUS = 1e-4
"""The least tolerance on GPUs, where torch composes some operations of others."""


@dataclass(frozen=True)
class Program:
    """One program of a client, as client.toml has it."""

    client: str
    name: str
    what: str
    command: Sequence[str]
    run: Sequence[str] | None = None
    named: bool = False
    gpus: bool = False
    reports: bool = True
    tolerance: float = 1e-6
    seconds: float = 240.0
    own_gloo: bool = False
    remarks: str = ""

    def __str__(self) -> str:
        return f"{self.client}-{self.name}"

    @property
    def ways(self) -> list[str]:
        """The ways in which this one can be played, Gloo's first."""
        possible = {"gloo": True, "replaced": True, "run": self.run is not None, "named": self.named, "gpus": self.gpus}
        return [way for way in WAYS if possible[way]]


@dataclass
class Played:
    """What became of a program that was played in one way."""

    way: str
    seconds: float
    exit_code: int
    output: str
    groups: list[str] = field(default_factory=list)
    """The classes of all process groups that were made, in all processes."""
    values: dict[str, Any] = field(default_factory=dict)
    """What was reported, by rank and name."""


def clients() -> list[str]:
    """Return the names of the clients: those of their folders."""
    return sorted(path.parent.name for path in CLIENTS.glob("*/client.toml"))


def facts_of(client: str) -> dict[str, Any]:
    return tomllib.loads((CLIENTS / client / "client.toml").read_text())


def programs(client: str) -> list[Program]:
    return [Program(client=client, **entry) for entry in facts_of(client)["program"]]


def play(program: Program, way: str) -> Played:
    """Run a program to its end in one of its ways. Raises WorldTimeout when it takes too long."""
    python = python_of(program.client)
    with tempfile.TemporaryDirectory(prefix="client-") as scratch:
        results = Path(scratch, "results")
        work = Path(scratch, "work")
        results.mkdir()
        work.mkdir()
        command = _command(program, way, python, work)
        start = time.perf_counter()
        done = run_command(
            command, timeout=program.seconds, environment=_environment(way, python, results), directory=work
        )
        seconds = time.perf_counter() - start
        groups = [json.loads(line) for path in results.glob("groups-*") for line in path.read_text().splitlines()]
        reported = [json.loads(line) for path in results.glob("values-*") for line in path.read_text().splitlines()]
    values = {f"{name} on rank {rank}": value for rank, name, value in reported}
    assert len(values) == len(reported), "a name is reported once on each rank"
    return Played(way, seconds, done.returncode, done.stdout + done.stderr, sorted(set(groups)), values)


def _command(program: Program, way: str, python: Path, scratch: Path) -> list[str]:
    command = list(program.command)
    if way == "run":
        assert program.run is not None
        command = ["{python}", "-m", "procgroup", "run", "--replace-gloo", *program.run]
    words = {"python": python, "folder": CLIENTS / program.client, "scratch": scratch, "port": free_port()}
    return [word.format(**words) for word in command]


def _environment(way: str, python: Path, results: Path) -> dict[str, str]:
    paths = [CLIENTS / "beside", *([] if way == "gloo" else [installed_procgroup()])]
    surroundings = {
        "PATH": os.pathsep.join([str(python.parent), os.environ.get("PATH", os.defpath)]),
        "PYTHONPATH": os.pathsep.join(map(str, paths)),
        # Otherwise each process would compile procgroup again where it is installed in place.
        "PYTHONDONTWRITEBYTECODE": "",
        "CLIENT_BACKEND": {"named": "procgroup", "gpus": "nccl"}.get(way, "gloo"),
        "CLIENT_DEVICE": "cuda" if way == "gpus" else "cpu",
        "CLIENT_RESULTS": str(results),
        "OMP_NUM_THREADS": "1",
    }
    if way == "gpus":
        gpus = stand_in_torch.environment(gpus=4)
        surroundings |= gpus | {"PYTHONPATH": os.pathsep.join([surroundings["PYTHONPATH"], gpus["PYTHONPATH"]])}
    replaced = {"replaced": ["GLOO"], "gpus": ["GLOO", "NCCL"]}.get(way, [])
    return surroundings | {f"PROCGROUP_REPLACE_{name}": "1" for name in replaced}


def wrong_in(program: Program, played: Played, on_gloo: Played | None = None) -> str:
    """Say what is wrong with a program's end, its groups, or its results beside those on Gloo; "" if nothing is."""
    if played.exit_code != 0:
        return f"exit status {played.exit_code}:\n{played.output[-6000:]}"
    if not played.groups:
        return f"no process group was made:\n{played.output[-6000:]}"
    if not _groups_are_right(program, played):
        return f"groups of the classes {played.groups}"
    if program.reports and not played.values:
        return f"nothing was reported:\n{played.output[-6000:]}"
    tolerance = max(program.tolerance, ON_GPUS if played.way == "gpus" else 0.0)
    return "" if on_gloo is None else _difference(played.values, on_gloo.values, tolerance)


def _groups_are_right(program: Program, played: Played) -> bool:
    """Return whether all groups are procgroup's, or none in the runs on Gloo."""
    ours = [kind for kind in played.groups if kind.startswith("procgroup.torch_plugin.")]
    if played.way == "gloo":
        return not ours
    others = set(played.groups) - set(ours)
    if played.way == "named" and program.own_gloo:
        others -= {"torch.distributed.distributed_c10d.ProcessGroupGloo"}
    return bool(ours) and not others


def _difference(ours: dict[str, Any], theirs: dict[str, Any], tolerance: float) -> str:
    if ours.keys() != theirs.keys():
        return f"reported on one of the two only: {sorted(ours.keys() ^ theirs.keys())}"
    wrong = [
        f"{name}: {ours[name]}; on Gloo {theirs[name]}"
        for name in ours
        if not same(ours[name], theirs[name], tolerance)
    ]
    return "\n".join(wrong)


def same(left: Any, right: Any, tolerance: float) -> bool:
    """Return whether two reported values are equal, floats within a relative tolerance; a NaN equals every NaN."""
    if isinstance(left, float) and isinstance(right, float):
        both_nan = math.isnan(left) and math.isnan(right)
        return both_nan or math.isclose(left, right, rel_tol=tolerance, abs_tol=tolerance)
    if isinstance(left, list) and isinstance(right, list):
        return len(left) == len(right) and all(same(*pair, tolerance) for pair in zip(left, right, strict=True))
    if isinstance(left, dict) and isinstance(right, dict):
        return left.keys() == right.keys() and all(same(left[key], right[key], tolerance) for key in left)
    return type(left) is type(right) and bool(left == right)
