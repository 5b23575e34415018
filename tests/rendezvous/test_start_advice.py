"""Where env:// finds no ranks, or no place to meet, the error says what was detected, and what to do."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Mapping

import pytest

import procgroup as dist
from cluster import recorded_environments as recorded
from procgroup.rendezvous.handlers import rendezvous

COMMAND = ["python", "train.py", "--name", "it's"]


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
    ("name", "lacking", "launcher", "rank"),
    [
        ("SRUN", "SLURM_STEP_NODELIST", "srun (Slurm)", "SLURM_PROCID=1"),
        ("OPEN_MPI", "PMIX_NAMESPACE", "mpiexec (Open MPI)", "OMPI_COMM_WORLD_RANK=1"),
        ("MPICH", "PMI_FD", "mpiexec (MPICH or Intel MPI)", "PMI_RANK=1"),
        ("PALS", "", "mpiexec (PALS on HPE Cray)", "PMI_RANK=1"),
        ("PMI_ALONE", "PMI_FD", "an MPI launcher (PMI)", "PMI_RANK=1"),
    ],
)
def test_tasks_that_have_numbers_but_no_place_to_meet_are_told_what_sets_one(
    name: str, lacking: str, launcher: str, rank: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment = {name: value for name, value in getattr(recorded, name).items() if name != lacking}
    text = refused(monkeypatch, environment)
    assert "environment variable MASTER_ADDR expected, but not set (also missing: MASTER_PORT)" in text
    assert "already set: RANK=1, WORLD_SIZE=2" in text
    assert f"This process was started by {launcher}, which sets other variables: " in text
    assert rank in text
    assert "They do not say where these ranks meet: set MASTER_ADDR to " in text
    assert "A program of one process passes rank=0 and world_size=1." in text


def test_the_error_keeps_what_it_says(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {**recorded.MPICH, "MASTER_ADDR": "127.0.0.1"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(dist.IncompleteEnvironment) as caught:
        next(rendezvous("env://", world_size=2))
    assert caught.value.missing == ("MASTER_PORT",)
    assert caught.value.found == {"MASTER_ADDR": "127.0.0.1", "RANK": "1", "WORLD_SIZE": "2"}
    assert caught.value.launcher == "mpiexec (MPICH or Intel MPI)"


def test_tasks_on_one_host_are_told_its_loopback_address(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "set MASTER_ADDR to 127.0.0.1 and MASTER_PORT to a port that is free" in refused(monkeypatch, recorded.PALS)


def test_a_pod_is_told_to_set_the_number_of_pods(monkeypatch: pytest.MonkeyPatch) -> None:
    text = refused(monkeypatch, recorded.KUBERNETES)
    assert "environment variable WORLD_SIZE expected" in text
    assert "Set WORLD_SIZE, in the environment of the pod's template, to the number of pods (.spec.completions)" in text


def test_a_pod_without_a_subdomain_is_told_to_set_one(monkeypatch: pytest.MonkeyPatch) -> None:
    text = refused(monkeypatch, {**recorded.KUBERNETES, "WORLD_SIZE": "2"})
    assert "set .spec.template.spec.subdomain of the Job to the name of a headless service" in text


@pytest.mark.parametrize("name", ["SLURM_BATCH_SCRIPT", "SLURM_INTERACTIVE_SHELL"])
def test_a_process_of_a_job_that_srun_did_not_start_is_told_of_srun(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    text = refused(monkeypatch, getattr(recorded, name))
    assert "This process runs in a Slurm job, but is not one of srun's tasks (SLURM_JOB_ID=17)" in text
    assert line_of(text) == f"srun {shlex.join(COMMAND)}"


def test_an_actor_of_ray_is_told_which_arguments_to_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    text = refused(monkeypatch, recorded.RAY)
    assert "This process was started by Ray, which gives its actors no ranks." in text
    compile(line_of(text), "line", "exec")


def test_a_program_text_or_a_long_command_is_not_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    for command in (["python", "-c", "a program"], ["python", "train.py", "x" * 400], []):
        monkeypatch.setattr(sys, "orig_argv", command)
        assert line_of(refused(monkeypatch, recorded.SLURM_BATCH_SCRIPT)) == "srun python script.py"


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
