"""Where the tasks of srun and the pods of an Indexed Job meet, by variables and names that all of them have."""

from __future__ import annotations

from pathlib import Path

import pytest

from cluster import recorded_environments as recorded
from procgroup.cluster import kubernetes, slurm
from procgroup.types import Endpoint


def of_step(job: int, step: int, nodes: str = "n[1-2]", number: int = 2) -> Endpoint:
    numbers = {"SLURM_JOB_ID": str(job), "SLURM_STEP_ID": str(step), "SLURM_STEP_NUM_NODES": str(number)}
    return slurm.meeting_point({**recorded.SRUN, **numbers, "SLURM_STEP_NODELIST": nodes})


def test_the_first_node_of_the_step_is_the_host() -> None:
    assert of_step(17, 0, "gpu[07-09],n1", 4).host == "gpu07"


def test_a_step_of_one_node_meets_at_the_loopback_address() -> None:
    assert of_step(17, 0, "n1", 1).host == "127.0.0.1"


def test_steps_and_neighbouring_jobs_differ_in_the_port() -> None:
    ports = [of_step(job, step).port for job in range(100, 150) for step in range(30)]
    assert len(set(ports)) == len(ports)
    assert all(10_000 < port < 32_768 for port in ports)


@pytest.mark.parametrize("name", ["SLURM_STEP_NODELIST", "SLURM_STEP_NUM_NODES", "SLURM_STEP_ID"])
def test_a_variable_that_is_missing_is_named(name: str) -> None:
    with pytest.raises(ValueError, match=name):
        slurm.meeting_point({key: value for key, value in recorded.SRUN.items() if key != name})


HOSTS = """# Kubernetes-managed hosts file.
127.0.0.1\tlocalhost
10.244.1.7\ttrain-3.train.default.svc.cluster.local\ttrain-3
"""


def test_pods_meet_at_the_pod_with_index_0(tmp_path: Path) -> None:
    hosts = tmp_path / "hosts"
    hosts.write_text(HOSTS)
    assert kubernetes.meeting_point("train-3", hosts) == Endpoint("train-0.train.default.svc.cluster.local", 29500)


@pytest.mark.parametrize(("pod", "text"), [("train", "which ends with -INDEX"), ("train-4", "no name in a subdomain")])
def test_a_pod_without_a_number_or_a_subdomain_is_refused(pod: str, text: str, tmp_path: Path) -> None:
    hosts = tmp_path / "hosts"
    hosts.write_text(HOSTS)
    with pytest.raises(ValueError, match=text):
        kubernetes.meeting_point(pod, hosts)
    with pytest.raises(ValueError):
        kubernetes.meeting_point(pod, tmp_path / "missing")
