"""The launcher that started a task is recognised by the variables that it sets, the nearest one where several do."""

from __future__ import annotations

import pytest

from cluster import recorded_environments as recorded
from procgroup.cluster import task_launcher
from procgroup.cluster.task_launcher import TaskLauncher, detect

EXPECTED = {
    "SRUN": task_launcher.SLURM,
    "SRUN_WITH_PMI2": task_launcher.SLURM,
    "SLURM_BATCH_SCRIPT": task_launcher.SLURM_BATCH,
    "SLURM_INTERACTIVE_SHELL": task_launcher.SLURM_BATCH,
    "OPEN_MPI": task_launcher.OPEN_MPI,
    "OPEN_MPI_IN_SLURM": task_launcher.OPEN_MPI,
    "MPICH": task_launcher.HYDRA,
    "MPICH_ON_TWO_HOSTS": task_launcher.HYDRA,
    "PALS": task_launcher.PALS,
    "PMI_ALONE": task_launcher.PMI,
    "KUBERNETES": task_launcher.KUBERNETES,
    "RAY": task_launcher.RAY,
    "RAY_IN_SLURM": task_launcher.RAY,
}


@pytest.mark.parametrize("name", EXPECTED)
def test_the_launcher_is_recognised(name: str) -> None:
    environment = getattr(recorded, name)
    task = detect(environment)
    assert task is not None
    assert task.launcher is EXPECTED[name]
    assert task.variables.items() <= environment.items()
    assert set(task.launcher.marks) <= set(task.variables)


def test_every_launcher_has_a_recorded_environment() -> None:
    assert set(EXPECTED.values()) == set(task_launcher.ALL)


@pytest.mark.parametrize(
    "environment", [{}, {"SLURM_CONF": "/etc/slurm.conf"}, {"I_MPI_ROOT": "/opt"}, {"PMI_RANK": ""}]
)
def test_settings_of_a_launcher_that_started_nothing_here_are_none(environment: dict[str, str]) -> None:
    assert detect(environment) is None


@pytest.mark.parametrize(
    ("name", "place"),
    [
        ("SRUN", (1, 2, 0)),
        ("OPEN_MPI_IN_SLURM", (1, 2, 1)),
        ("MPICH_ON_TWO_HOSTS", (1, 2, 0)),
        ("PMI_ALONE", (1, 2, None)),
        ("KUBERNETES", (1, None, None)),
        ("RAY", (None, None, None)),
    ],
)
def test_a_task_s_place_is_its_launcher_s(name: str, place: tuple[int | None, int | None, int | None]) -> None:
    task = detect(getattr(recorded, name))
    assert task is not None
    assert (task.rank, task.world_size, task.local_rank) == place


def test_a_number_that_is_none_is_refused_by_the_variable_s_name() -> None:
    task = detect({**recorded.MPICH, "PMI_RANK": "one"})
    assert task is not None
    with pytest.raises(ValueError, match="PMI_RANK='one', which mpiexec .* sets, is not a number"):
        _ = task.rank


@pytest.mark.parametrize(
    ("name", "known"),
    [("SRUN", False), ("MPICH", True), ("MPICH_ON_TWO_HOSTS", False), ("PMI_ALONE", False), ("KUBERNETES", False)],
)
def test_tasks_on_one_host_are_known_by_their_number_there(name: str, known: bool) -> None:
    task = detect(getattr(recorded, name))
    assert task is not None
    assert task.is_on_one_host is known


@pytest.mark.parametrize("launcher", task_launcher.ALL, ids=lambda launcher: launcher.name)
def test_a_launcher_that_numbers_its_tasks_is_recognised_by_that_number(launcher: TaskLauncher) -> None:
    if launcher.rank:
        assert launcher.rank in launcher.marks
