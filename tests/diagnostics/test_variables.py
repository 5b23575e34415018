"""Variables: the launcher, the rank that they give, and contradictions that another job may have left."""

from __future__ import annotations

import pytest

from diagnostics.made_up_system import one, texts
from procgroup.diagnostics.doctor.findings import Finding, Level
from procgroup.diagnostics.doctor.variables import VariablePlace, check, is_first_on_host, place

SLURM = {
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "3",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_LOCALID": "1",
}
RANK_1 = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}


def problems(environment: dict[str, str]) -> list[str]:
    return texts(check(environment), Level.PROBLEM)


def test_without_a_launcher_nothing_is_wrong() -> None:
    found = list(check({}))
    assert one(found, Level.NOTE).text == "started without a launcher"
    assert one(found, Level.OK).text == "no variables of a job are set"


@pytest.mark.parametrize(
    ("environment", "name"),
    [
        ({**RANK_1, "TORCHELASTIC_RUN_ID": "none", "PROCGROUP_STORE": "10.0.0.1:4000"}, "procgroup run"),
        ({**RANK_1, "TORCHELASTIC_RUN_ID": "none"}, "torchrun"),
        (SLURM, "srun (Slurm)"),
        ({"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2"}, "mpiexec (Open MPI)"),
        (RANK_1, "by hand"),
    ],
)
def test_the_launcher_is_named(environment: dict[str, str], name: str) -> None:
    found = list(check(environment))
    assert any(text.startswith("started") and name in text for text in texts(found, Level.OK))
    assert not texts(found, Level.PROBLEM) and not texts(found, Level.WARNING)


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, VariablePlace(None, None)),
        (RANK_1, VariablePlace(1, 2)),
        (SLURM, VariablePlace(3, 4)),
        ({"RANK": "x", "WORLD_SIZE": "2"}, VariablePlace(None, 2)),
        ({**SLURM, "SLURM_PROCID": "first"}, VariablePlace(None, None)),
    ],
)
def test_the_place_is_that_of_the_variables_or_of_the_launcher(
    environment: dict[str, str], expected: VariablePlace
) -> None:
    assert place(environment) == expected


@pytest.mark.parametrize(
    ("environment", "is_first"), [({}, True), ({"LOCAL_RANK": "0"}, True), ({"LOCAL_RANK": "1"}, False), (SLURM, False)]
)
def test_one_rank_of_a_host_is_the_first(environment: dict[str, str], is_first: bool) -> None:
    assert is_first_on_host(environment) is is_first


@pytest.mark.parametrize(
    ("environment", "text"),
    [
        ({"RANK": "1"}, "RANK=1 is set without WORLD_SIZE"),
        ({"WORLD_SIZE": "4"}, "WORLD_SIZE=4 is set without RANK"),
        ({**RANK_1, "RANK": "2"}, "RANK=2 is not below WORLD_SIZE=2"),
        ({**RANK_1, "RANK": "-1"}, "RANK=-1 is not below WORLD_SIZE=2"),
        ({**RANK_1, "RANK": "one"}, "RANK='one' is not usable"),
        ({**RANK_1, "LOCAL_RANK": "4", "LOCAL_WORLD_SIZE": "2"}, "LOCAL_RANK=4 is not below LOCAL_WORLD_SIZE=2"),
        ({**RANK_1, "LOCAL_WORLD_SIZE": "8"}, "LOCAL_WORLD_SIZE=8 is more than WORLD_SIZE=2"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "WORLD_SIZE=2 without MASTER_ADDR and MASTER_PORT"),
        ({**RANK_1, "MASTER_PORT": ""}, "WORLD_SIZE=2 without MASTER_PORT"),
        ({**RANK_1, "MASTER_ADDR": "localhost", "LOCAL_WORLD_SIZE": "1"}, "MASTER_ADDR=localhost is this host alone"),
        ({**SLURM, "RANK": "0"}, "RANK=0, but srun (Slurm) says 3"),
        ({**SLURM, "SLURM_PROCID": "first"}, "SLURM_PROCID='first'"),
        ({"PROCGROUP_TRANSPORT": "rdma"}, "PROCGROUP_TRANSPORT='rdma' is not usable"),
    ],
)
def test_a_contradiction_is_a_problem(environment: dict[str, str], text: str) -> None:
    assert any(text in found for found in problems(environment)), problems(environment)


def test_a_secret_is_not_shown() -> None:
    (text,) = problems({"PROCGROUP_JOB_KEY": "my password"})
    assert text.startswith("PROCGROUP_JOB_KEY is not usable") and "my password" not in text


@pytest.mark.parametrize("name", ["TORCHELASTIC_RUN_ID", "PROCGROUP_STORE", "LOCAL_RANK"])
def test_a_variable_that_another_job_has_left_is_a_warning(name: str) -> None:
    found: Finding = one(check({name: "1"}), Level.WARNING)
    assert found.text.startswith(f"{name} is set") and "unset" in found.advice


@pytest.mark.parametrize("environment", [{"PROCGROUP_TRANSPORT": "tcp"}, {"PROCGROUP_HOST_ID": "a"}])
def test_switching_shared_memory_off_is_a_warning(environment: dict[str, str]) -> None:
    assert "memory" in one(check(environment), Level.WARNING).text
