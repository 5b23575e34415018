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
    "OPEN_MPI": task_launcher.OPEN_MPI,
    "OPEN_MPI_IN_SLURM": task_launcher.OPEN_MPI,
    "MPICH": task_launcher.HYDRA,
    "MPICH_ON_TWO_HOSTS": task_launcher.HYDRA,
    "PALS": task_launcher.PALS,
    "PMI_ALONE": task_launcher.PMI,
    "KUBERNETES": task_launcher.KUBERNETES,
    "RAY": task_launcher.RAY,
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
    ("name", "known"), [("MPICH", True), ("MPICH_ON_TWO_HOSTS", False), ("PMI_ALONE", False), ("KUBERNETES", False)]
)
def test_tasks_on_one_host_are_known_by_their_number_there(name: str, known: bool) -> None:
    task = detect(getattr(recorded, name))
    assert task is not None
    assert task.is_on_one_host is known


@pytest.mark.parametrize("launcher", task_launcher.ALL, ids=lambda launcher: launcher.name)
def test_a_launcher_that_numbers_its_tasks_is_recognised_by_that_number(launcher: TaskLauncher) -> None:
    if launcher.rank and launcher is not task_launcher.SLURM_BATCH:
        assert launcher.rank in launcher.marks
