"""`procgroup submit` writes jobs that the schedulers take, and hands them over where their clients are installed."""

from __future__ import annotations

import re
import stat
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

import pytest
from clients.environment import installed_procgroup

import launcher_environments
import world

pytestmark = pytest.mark.timeout(300)  # the first test with a package of PyPI installs it

PROGRAM = """
import os, sys
import numpy as np
import procgroup as dist

dist.init_process_group(timeout=30)
number = np.array([dist.get_rank() + 1])
dist.all_reduce(number)
key = "with" if os.environ.get("PROCGROUP_JOB_KEY") else "without"
words = f"rank {dist.get_rank()} of {dist.get_world_size()}, local rank {dist.get_node_local_rank()}"
os.write(1, f"{words}, {key} a key: {number[0]} {sys.argv[1:]}\\n".encode())
if "fail" in sys.argv and dist.get_rank() == 2:
    sys.exit(7)
dist.barrier()
"""

JOBSET_MODEL = Path(__file__).parents[1] / "jobset_model.py"
EXPECTED = [f"rank {rank} of 4, local rank {rank}, with a key: 10 ['a b']" for rank in range(4)]


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    (tmp_path / "train.py").write_text(PROGRAM)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    (tmp_path / "bin" / "python").chmod(0o755)
    return tmp_path


def submit(
    directory: Path, *arguments: str, environment: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run `procgroup submit`, with nothing but the directory's programs and the system's on PATH."""
    paths = {"PATH": f"{directory}/bin:/usr/sbin:/usr/bin:/bin", **(environment or {})}
    command = [sys.executable, "-m", "procgroup", "submit", *arguments]
    return world.run_command(command, directory=directory, environment=paths)


def packages_of(name: str) -> Path:
    try:
        return launcher_environments.commands_of(name)
    except launcher_environments.CannotInstall as error:
        pytest.skip(f"{name} cannot be installed here: {error}")


def test_a_batch_script_runs_under_slurm(slurm: Mapping[str, str], directory: Path) -> None:
    environment = {**slurm, "PATH": f"{directory}/bin:{slurm['PATH']}"}
    flags = ["--ntasks-per-node", "4", "--time", "00:05:00", "--sbatch=--exclusive"]
    done = submit(directory, "slurm", *flags, "train.py", "a b", environment=environment)
    assert done.returncode == 0, done.stderr
    submitted = re.fullmatch(r"Submitted batch job (\d+)\n", done.stdout)
    assert submitted
    awaited = ["srun", "--quiet", f"--dependency=afterany:{submitted[1]}", "true"]
    assert world.run_command(awaited, environment=environment).returncode == 0
    (log,) = directory.glob("train.*.log")
    assert sorted(log.read_text().splitlines()) == [f"{rank}: {line}" for rank, line in enumerate(EXPECTED)]


def test_without_the_client_the_script_is_written_and_the_command_shown(directory: Path) -> None:
    done = submit(directory, "slurm", "--nodes", "2", "--write-only", "train.py", "--epochs", "3")
    assert (done.returncode, done.stdout) == (0, "")
    script = (directory / "train.sbatch").read_text()
    assert "\n#SBATCH --nodes=2\n" in script
    assert script.endswith("--cpus-per-task=1 python train.py --epochs 3\n")
    done = submit(directory, "slurm", "train.py", environment={"PATH": f"{directory}/bin:/bin/nothing"})
    assert done.stderr.endswith("sbatch is not installed here; submit with: sbatch train.sbatch\n")


@pytest.mark.parametrize("kind", ["job", "jobset"])
def test_a_manifest_is_valid(kind: str, directory: Path) -> None:
    programs = packages_of("kubernetes")
    limits = ["--cpus", "2", "--memory", "8Gi", "--gpus", "1"]
    flags = ["--kind", kind, "--pods", "4", "--image", "example.org/train:1", *limits]
    assert submit(directory, "k8s", *flags, "--write-only", "train.py", "a: b", '"#').returncode == 0
    check = [str(programs / "kubernetes-validate"), "--strict", "train.yaml"]
    if kind == "jobset":
        check = [str(programs / "python"), str(JOBSET_MODEL), "train.yaml"]
    done = world.run_command(check, directory=directory, environment={"PYTHONPATH": ""})
    assert done.returncode == 0, done.stderr + done.stdout
    text = (directory / "train.yaml").read_text()
    assert 'command: ["python", "train.py", "a: b", "\\"#"]' in text
    assert f"value: train-{'ranks-0-' if kind == 'jobset' else ''}0.train\n" in text


def test_the_checks_find_what_is_wrong_in_a_manifest(directory: Path) -> None:
    programs = packages_of("kubernetes")
    flags = ["--pods", "2", "--image", "i", "--write-only", "train.py"]
    submit(directory, "k8s", *flags)
    path = directory / "train.yaml"
    path.write_text(path.read_text().replace("completionMode", "completionmode"))
    check = [str(programs / "python"), str(JOBSET_MODEL), "train.yaml"]
    done = world.run_command(check, directory=directory, environment={"PYTHONPATH": ""})
    assert done.returncode != 0 and "has no completionmode" in done.stderr


def test_a_manifest_keeps_its_key_from_others_and_makes_a_new_one_each_time(directory: Path) -> None:
    keys = set()
    for _ in range(2):
        submit(directory, "k8s", "--image", "i", "--write-only", "train.py")
        assert stat.S_IMODE((directory / "train.yaml").stat().st_mode) == 0o600
        keys.update(re.findall(r'job-key: "([0-9a-f]{64})"', (directory / "train.yaml").read_text()))
    assert len(keys) == 2


@pytest.mark.parametrize(
    ("line", "name"),
    [
        ("slurm --write-only train.py", "train.sbatch"),
        ("k8s --image i train.py", "train.yaml"),
        ("ray --output own train.py", "own"),
    ],
)
def test_a_file_of_the_user_is_not_overwritten(directory: Path, line: str, name: str) -> None:
    (directory / name).write_text("epochs: 3\n")
    done = submit(directory, *line.split())
    assert done.returncode == 2
    assert f"{name} exists, and procgroup submit did not write it: name another file by --output" in done.stderr
    assert (directory / name).read_text() == "epochs: 3\n"


@pytest.mark.parametrize("scheduler", ["slurm", "k8s --image i", "ray"])
def test_a_file_that_submit_wrote_is_written_anew(directory: Path, scheduler: str) -> None:
    for argument in ("old", "new"):
        assert submit(directory, *scheduler.split(), "--write-only", "train.py", argument).returncode == 0
    written = next(path for path in directory.iterdir() if path.stem == "train" and path.suffix != ".py")
    assert "new" in written.read_text() and "old" not in written.read_text()


def test_a_manifest_is_handed_to_kubectl(directory: Path) -> None:
    (directory / "bin" / "kubectl").write_text('#!/bin/sh\necho "$@"\nexit 3\n')
    (directory / "bin" / "kubectl").chmod(0o755)
    done = submit(directory, "k8s", "--image", "i", "train.py")
    assert (done.returncode, done.stdout) == (3, "create -f train.yaml\n")


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["slurm"], "expected a program"),
        (["slurm", "--nodes", "0", "train.py"], "expected --nodes to be at least 1, got 0"),
        (["slurm", "--time", "1\n#SBATCH -x", "train.py"], "expected a flag of sbatch without blanks"),
        (
            ["slurm", "--time", "junk", "train.py"],
            "expected --time as minutes, HH:MM:SS, DAYS-HH or unlimited, got 'junk'",
        ),
        (["k8s", "--image", " ", "train.py"], "expected --image to be a container image, got ' '"),
        (["slurm", "--name", "../x", "train.py"], "expected --name to be letters"),
        (["k8s", "--image", "i", "--name", "Train", "train.py"], "expected --name to be at most 40 small letters"),
        (["k8s", "--image", "i", "--pods", "0", "train.py"], "expected --pods of at least 1"),
        (["k8s", "train.py"], "--image"),
        (["ray", "--ranks", "0", "train.py"], "expected --ranks of at least 1"),
        (["ray", "--cpus-per-rank", "0", "train.py"], "one of them above, got 0, 0"),
        (["pbs", "train.py"], "invalid choice: 'pbs'"),
    ],
)
def test_what_no_scheduler_takes_is_refused(arguments: list[str], text: str, directory: Path) -> None:
    done = submit(directory, *arguments)
    assert done.returncode == 2
    assert text in done.stderr
    assert sorted(path.name for path in directory.iterdir()) == ["bin", "train.py"]


def run_with_ray(directory: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run what the Ray job runs, with a Ray of its own on this machine."""
    python = packages_of("ray") / "python"
    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp") as short:  # paths of sockets have a limit
        environment = {
            "PYTHONPATH": str(installed_procgroup()),
            "RAY_TMPDIR": short,
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_AUTH_MODE": "disabled",
        }
        command = [str(python), "-m", "procgroup.submit.ray_ranks", "--ranks", "4", "--cpus-per-rank", "0.25"]
        program = ["--", str(python), str(directory / "train.py"), *arguments]
        return world.run_command([*command, *program], directory=directory, environment=environment, timeout=250)


@pytest.mark.slow
def test_a_ray_job_starts_four_ranks(directory: Path) -> None:
    done = run_with_ray(directory, "a b")
    assert done.returncode == 0, done.stderr
    lines = re.findall(r"rank \d of 4, .*\]", done.stdout + done.stderr)
    assert sorted(lines) == EXPECTED, done.stderr


@pytest.mark.slow
def test_a_rank_that_fails_ends_the_ray_job(directory: Path) -> None:
    done = run_with_ray(directory, "fail")
    assert done.returncode != 0
    assert re.search(r"procgroup: rank \d ended with exit status \d+; ending the others", done.stderr)


def test_a_ray_job_is_a_line_of_ray_job_submit(directory: Path) -> None:
    (directory / "bin" / "ray").write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    (directory / "bin" / "ray").chmod(0o755)
    done = submit(directory, "ray", "--ranks", "4", "--address", "http://head:8265", "train.py", "a b")
    assert done.returncode == 0, done.stderr
    words = done.stdout.splitlines()
    assert words[:4] == ["job", "submit", "--address", "http://head:8265"]
    assert words[words.index("--") :][:5] == ["--", "python", "-m", "procgroup.submit.ray_ranks", "--ranks=4"]
    assert words[-4:] == ["--", "python", "train.py", "a b"]
