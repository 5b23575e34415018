"""``procgroup metrics`` serves what the jobs of this host do in the form that Prometheus reads."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import numpy as np
import pytest

import procgroup as dist
from world import start

pytest.importorskip("prometheus_client")

from prometheus_client.parser import text_string_to_metric_families

from procgroup.diagnostics.metrics import collector
from procgroup.diagnostics.metrics.collector import JobsCollector, reported_numbers


def train(rank: int, size: int) -> None:
    dist.init_process_group()
    for _ in range(5):
        dist.all_reduce(np.ones(1000))
    dist.report(step=4, loss=0.25, phase="warm-up")
    dist.barrier()
    dist.destroy_process_group()


def die(rank: int, size: int) -> None:
    dist.init_process_group()
    dist.barrier()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def record(directory: Path, function: Callable[[int, int], None] = train, **environment: str) -> None:
    """Run a job of two ranks."""
    with start(function, 2, environment={"PROCGROUP_RECORD_DIR": str(directory), **environment}) as world:
        world.wait()


@pytest.fixture(name="records")
def fixture_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PROCGROUP_RECORD_DIR", str(tmp_path))
    return tmp_path


@pytest.fixture(name="trained")
def fixture_trained(records: Path) -> Iterator[Path]:
    record(records, PROCGROUP_JOB="digits")
    return records


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "procgroup", "metrics", *arguments]


def values(families: Iterable[object], **labels: str) -> dict[str, dict[str, float]]:
    """Return the values of each metric that has these labels, by its other labels."""
    found: dict[str, dict[str, float]] = {}
    for family in families:
        for sample in family.samples:
            if labels.items() <= sample.labels.items():
                others = ",".join(sample.labels[name] for name in sorted(sample.labels.keys() - labels.keys()))
                found.setdefault(sample.name, {})[others] = sample.value
    return found


def test_counters_and_states_of_each_rank_have_the_form_that_prometheus_reads(trained: Path) -> None:
    done = subprocess.run(command("--once"), capture_output=True, text=True, timeout=50, check=True)
    found = values(text_string_to_metric_families(done.stdout), job_name="digits", rank="1")
    assert found["procgroup_calls_total"] == {"all_reduce": 5, "barrier": 1}
    assert found["procgroup_bytes_total"] == {"all_reduce": 5 * 8000, "barrier": 0}
    assert 0 < found["procgroup_call_seconds_total"]["all_reduce"] < 30
    states = {"running": 0, "stopped": 0, "left": 1, "failed": 0, "lost": 0}
    assert found["procgroup_rank_state"] == states
    assert found["procgroup_running_call_seconds"] == {"": 0}
    assert found["procgroup_reported"] == {"step": 4, "loss": 0.25}
    assert 0 <= found["procgroup_waiting_ratio"][""] <= 1
    assert values(text_string_to_metric_families(done.stdout))["procgroup_problems"] == {"digits": 0}


def test_a_lost_rank_is_a_problem(records: Path) -> None:
    record(records, die)
    families = list(JobsCollector().collect())
    assert [*values(families)["procgroup_problems"].values()] == [1]
    assert values(families, rank="1", state="lost")["procgroup_rank_state"] == {next(records.iterdir()).name: 1}


def test_counters_go_on_from_look_to_look_and_count_no_call_twice(trained: Path) -> None:
    jobs = JobsCollector()
    before, after = ([*values(jobs.collect())["procgroup_calls_total"].values()] for _ in range(2))
    assert before == after == [5, 1, 5, 1]


def test_of_jobs_with_one_name_the_newest_counts(trained: Path) -> None:
    record(trained, die, PROCGROUP_JOB="digits")
    assert len(list(trained.iterdir())) == 2
    found = values(JobsCollector().collect(), job_name="digits", rank="0")
    assert found["procgroup_calls_total"] == {"barrier": 2}


def test_jobs_that_ended_long_ago_are_left_out(trained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collector, "KEPT_SECONDS", 0.0)
    assert values(JobsCollector().collect()) == {}


def test_without_any_record_there_are_no_values(records: Path) -> None:
    assert values(JobsCollector().collect()) == {}


@pytest.mark.parametrize(
    ("report", "numbers"),
    [
        ("", {}),
        ("step 3, loss 0.25, phase warm-up", {"step": 3, "loss": 0.25}),
        ("learning rate 1e-05, 7", {"learning rate": 1e-5}),
    ],
)
def test_the_numbers_of_a_report_are_values(report: str, numbers: dict[str, float]) -> None:
    assert reported_numbers(report) == numbers


def test_it_is_served_on_loopback_until_ctrl_c(trained: Path) -> None:
    with subprocess.Popen(command("--port", "0"), stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        address = process.stdout.readline().strip()
        assert re.fullmatch(r"http://127\.0\.0\.1:\d+/metrics", address)
        with urllib.request.urlopen(address, timeout=20) as answer:
            assert b'procgroup_calls_total{job_name="digits",op="all_reduce",rank="0"} 5.0' in answer.read()
        taken = subprocess.run(
            command("--port", address.split(":")[2].partition("/")[0]),
            capture_output=True, text=True, timeout=50, check=False,
        )  # fmt: skip
        assert taken.returncode == 2 and "cannot listen on 127.0.0.1:" in taken.stderr
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 0


def test_what_to_install_is_said() -> None:
    program = (
        "import sys; sys.modules['prometheus_client'] = None; from procgroup.__main__ import main; sys.exit(main())"
    )
    done = subprocess.run([sys.executable, "-c", program, "metrics"], capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "pip install prometheus_client" in done.stderr
