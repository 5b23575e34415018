"""Where flight records are kept, and for how long."""

from __future__ import annotations

import os
import signal
import stat
from pathlib import Path

import numpy as np
import pytest

import procgroup as dist
from procgroup.process import flight_records
from world import run, start


def make_a_group(rank: int, size: int) -> None:
    dist.init_process_group()
    dist.all_reduce(np.ones(1))
    dist.destroy_process_group()


def make_many_groups(rank: int, size: int) -> None:
    for _ in range(12):
        make_a_group(rank, size)


def wait_to_be_killed(rank: int, size: int) -> None:
    dist.init_process_group()
    print("here", flush=True)
    signal.pause()


def test_each_rank_of_a_job_has_a_file_that_only_its_user_can_read(tmp_path: Path) -> None:
    root = tmp_path / "records"
    run(make_a_group, 3, environment={"PROCGROUP_RECORD_DIR": str(root)})
    (job,) = root.iterdir()
    assert sorted(path.name for path in job.iterdir()) == ["0-1.record", "1-1.record", "2-1.record"]
    for path, mode in [(root, 0o700), (job, 0o700), *((path, 0o600) for path in job.iterdir())]:
        assert stat.S_IMODE(path.stat().st_mode) == mode


def test_a_process_keeps_the_records_of_its_last_groups(tmp_path: Path) -> None:
    run(make_many_groups, 2, environment={"PROCGROUP_RECORD_DIR": str(tmp_path)})
    (job,) = tmp_path.iterdir()
    assert sorted(int(path.stem.split("-")[1]) for path in job.glob("0-*.record")) == list(range(5, 13))


def test_the_records_of_the_last_jobs_are_kept(tmp_path: Path) -> None:
    for number in range(20):
        old = tmp_path / f"old{number}"
        old.mkdir()
        (old / "0-1.record").write_bytes(b"")
        os.utime(old, (number, number))
    (tmp_path / "a file").write_text("of the user")
    run(make_a_group, 2, environment={"PROCGROUP_RECORD_DIR": str(tmp_path)})
    old = {f"old{number}" for number in range(20 - (flight_records.KEPT_JOBS - 1), 20)}
    names = {path.name for path in tmp_path.iterdir()}
    assert {name for name in names if name.startswith("old")} == old and "a file" in names


def test_the_records_of_a_running_job_are_kept_however_old_they_are(tmp_path: Path) -> None:
    environment = {"PROCGROUP_RECORD_DIR": str(tmp_path)}
    with start(wait_to_be_killed, 1, environment=environment) as world:
        world.wait_for_output(0, "here", 20)
        (running,) = tmp_path.iterdir()
        os.utime(running, (1, 1))
        for number in range(20):
            (tmp_path / f"old{number}").mkdir()
        run(make_a_group, 2, environment=environment)
        assert running.exists() and flight_records.is_in_use(running / "0-1.record")
        world.kill(0)
        world.wait(10)
    assert not flight_records.is_in_use(running / "0-1.record")


@pytest.mark.parametrize("kind", ["none", "a file", "another user's link", "missing parents"])
def test_where_no_record_can_be_kept_the_job_runs_all_the_same(tmp_path: Path, kind: str) -> None:
    place = tmp_path / "records"
    if kind == "a file":
        place.write_text("")
    elif kind == "another user's link":
        place.symlink_to("/etc")
    elif kind == "missing parents":
        place = tmp_path / "no" / "such"
    run(make_a_group, 2, environment={"PROCGROUP_RECORD_DIR": "none" if kind == "none" else str(place)})
    assert not place.is_dir() or place.is_symlink()
    assert not list(Path("/etc").glob("*/*.record"))


def test_a_full_file_system_leaves_the_record_in_memory(tmp_path: Path) -> None:
    # A limit on the size of files takes the place of a full one; the launcher's own files are smaller.
    outcome = run(make_a_group_with_small_files, 1, environment={"PROCGROUP_RECORD_DIR": str(tmp_path)})
    assert outcome == ["no record"]


def make_a_group_with_small_files(rank: int, size: int) -> str:
    import resource

    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (65536, 65536))
    make_a_group(rank, size)
    root = Path(os.environ["PROCGROUP_RECORD_DIR"])
    return "a record" if list(root.glob("*/*.record")) else "no record"
