"""Numbers of the environment and of arguments are compared with the launcher's before anything is connected."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

import procgroup as dist
from cluster import recorded_environments as recorded
from procgroup.rendezvous.handlers import rendezvous


def conflict(monkeypatch: pytest.MonkeyPatch, environment: Mapping[str, str], url: str = "env://") -> str:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(dist.RendezvousConflict) as caught:
        next(rendezvous(url, timeout=5))
    return str(caught.value)


@pytest.mark.parametrize(
    ("name", "variable"), [("SRUN", "SLURM_PROCID"), ("MPICH", "PMI_RANK"), ("OPEN_MPI", "OMPI_COMM_WORLD_RANK")]
)
@pytest.mark.parametrize(
    "more", [{}, {"WORLD_SIZE": "2"}, {"WORLD_SIZE": "2", "MASTER_ADDR": "n1", "MASTER_PORT": "1"}]
)
def test_another_rank_than_the_launcher_s_is_refused(
    name: str, variable: str, more: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    text = conflict(monkeypatch, {**getattr(recorded, name), "RANK": "0", **more})
    assert text.startswith(f"RANK=0 contradicts {variable}=1, which ")
    assert "Unset RANK and WORLD_SIZE to use the launcher's numbers; or pass rank= and world_size=" in text


def test_another_world_size_than_the_launcher_s_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    text = conflict(monkeypatch, {**recorded.SRUN, "WORLD_SIZE": "4"})
    assert text.startswith("WORLD_SIZE=4 contradicts SLURM_STEP_NUM_TASKS=2, which srun (Slurm) set")


@pytest.mark.parametrize("query", ["?rank=0", "?world_size=4"])
def test_a_url_of_the_launcher_takes_no_other_numbers(query: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "contradicts SLURM_" in conflict(monkeypatch, recorded.SRUN, f"slurm://{query}")


def test_ranks_that_a_task_started_by_itself_have_numbers_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Task 1 of 2 starts the ranks 4 to 7 of 8."""
    for name, value in {**recorded.SRUN, "RANK": "4", "WORLD_SIZE": "8"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(dist.IncompleteEnvironment) as caught:
        next(rendezvous("env://"))
    assert caught.value.missing == ("MASTER_ADDR", "MASTER_PORT")


def test_a_launcher_of_env_s_variables_is_nearer_than_srun(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {**recorded.SRUN, "RANK": "0", "WORLD_SIZE": "1", "TORCHELASTIC_RUN_ID": "x"}.items():
        monkeypatch.setenv(name, value)
    assert next(rendezvous("env://"))[1:] == (0, 1)


def test_arguments_win_over_the_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in recorded.SRUN.items():
        monkeypatch.setenv(name, value)
    assert next(rendezvous("env://", rank=0, world_size=1))[1:] == (0, 1)


def test_a_task_that_is_alone_needs_no_address(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {**recorded.SRUN, "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"}.items():
        monkeypatch.setenv(name, value)
    for url in ("env://", "slurm://", "mpi://"):
        assert next(rendezvous(url))[1:] == (0, 1)


def test_a_url_of_another_launcher_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in recorded.OPEN_MPI_IN_SLURM.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(dist.RendezvousError, match=r"slurm:// is for tasks of srun.*started by mpiexec \(Open MPI\)"):
        next(rendezvous("slurm://"))
    with pytest.raises(dist.RendezvousError, match="slurm:// is for tasks of srun"):
        dist.SlurmStore()


@pytest.mark.parametrize("url", ["slurm://host:1", "mpi://host", "slurm:///path"])
def test_a_url_of_a_launcher_takes_no_address(url: str) -> None:
    with pytest.raises(ValueError, match="finds the address itself"):
        next(rendezvous(url))
