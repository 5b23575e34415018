"""The counters of out-of-memory kills, of both versions of control groups, and a real group that runs out of memory."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from launch.agents import wait_until
from procgroup.cluster.control_group import OutOfMemoryKills, directories
from world import run_command


def read(tmp_path: Path, kind: str, options: str, cgroup: str) -> OutOfMemoryKills:
    """Read the counters of a process whose memory group is ``tmp_path``/mount/job."""
    (tmp_path / "cgroup").write_text(cgroup)
    (tmp_path / "mountinfo").write_text(f"32 31 0:29 / {tmp_path}/mount rw - {kind} {kind} {options}\n")
    return OutOfMemoryKills.so_far(tmp_path, tmp_path / "vmstat")


@pytest.fixture
def group(tmp_path: Path) -> Path:
    path = tmp_path / "mount" / "job"
    path.mkdir(parents=True)
    return path


def test_version_1_counts_in_memory_oom_control(tmp_path: Path, group: Path) -> None:
    (group / "memory.oom_control").write_text("oom_kill_disable 0\nunder_oom 0\noom_kill 3\n")
    assert read(tmp_path, "cgroup", "rw,memory", "4:memory:/job\n0::/\n") == OutOfMemoryKills(3, None)


def test_version_2_counts_in_memory_events(tmp_path: Path, group: Path) -> None:
    (group / "memory.events").write_text("low 0\nhigh 0\nmax 12\noom 5\noom_kill 2\noom_group_kill 1\n")
    (tmp_path / "vmstat").write_text("nr_free_pages 7\noom_kill 9\n")
    assert read(tmp_path, "cgroup2", "rw", "0::/job\n") == OutOfMemoryKills(2, 9)


def test_counters_that_are_not_shown_are_unknown_and_not_zero(tmp_path: Path, group: Path) -> None:
    unknown = read(tmp_path, "cgroup2", "rw", "0::/job\n")
    assert unknown == OutOfMemoryKills(None, None)
    assert unknown.verdict == "this system does not show whether memory ran out"
    (group / "memory.events").write_text("oom_kill many\n")
    assert read(tmp_path, "cgroup2", "rw", "0::/job\n").group is None


def test_the_verdict_says_where_memory_ran_out() -> None:
    assert "of this control group" in OutOfMemoryKills(1, 1).verdict
    assert "2 process(es) of this host" in OutOfMemoryKills(0, 2).verdict
    assert OutOfMemoryKills(0, None).verdict == "no out-of-memory kill was seen, so somebody sent the signal"


def test_a_kill_elsewhere_on_the_host_counts_only_where_the_group_s_own_are_not_shown() -> None:
    assert OutOfMemoryKills(1, 1).any_of_group
    assert not OutOfMemoryKills(0, 2).any_of_group
    assert OutOfMemoryKills(None, 2).any_of_group
    assert not OutOfMemoryKills(None, None).any_of_group


LIMIT_FILES = ("memory.max", "memory.limit_in_bytes")


@pytest.fixture
def small_group() -> Iterator[Path]:
    """Make a real control group in which 96 MiB are all the memory that there is."""
    found = directories("memory")
    if not found or not os.access(found[0], os.W_OK):
        pytest.skip("this process may not make control groups here")
    group = found[0] / f"procgroup-test-{os.getpid()}"
    try:
        group.mkdir()
        limit = next(group / name for name in LIMIT_FILES if (group / name).exists())
        limit.write_text(str(96 << 20))
        for swap in ("memory.swap.max", "memory.memsw.limit_in_bytes"):
            with contextlib.suppress(OSError):
                (group / swap).write_text("0" if "max" in swap else str(96 << 20))
    except (OSError, StopIteration) as error:
        with contextlib.suppress(OSError):
            group.rmdir()
        pytest.skip(f"no control group with little memory can be made here: {error}")
    yield group
    # multiprocessing's resource tracker ends a moment after the program.
    wait_until(lambda: not (group / "cgroup.procs").read_text(), timeout=20)
    group.rmdir()


def run_inside(group: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run Python in the control group."""
    inside = f"import os; open('{group}/cgroup.procs', 'w').write(str(os.getpid()));"
    start = f"os.execv('{sys.executable}', {[sys.executable, *arguments]})"
    return run_command([sys.executable, "-c", f"{inside} {start}"])


def test_a_rank_that_runs_out_of_a_real_group_s_memory_is_said_to_have_done_so(
    tmp_path: Path, small_group: Path
) -> None:
    script = tmp_path / "greedy.py"
    script.write_text("import os\nif os.environ['RANK'] == '1':\n    held = bytearray(os.urandom(1 << 20) * 400)\n")
    done = run_inside(small_group, "-m", "procgroup", "run", "-n", "2", str(script))
    assert done.returncode == 137, done.stderr
    last = done.stderr.splitlines()[-1]
    assert "failed first: killed by SIGKILL; its peak memory was " in last
    assert "the kernel killed 1 process(es) of this control group for want of memory" in last


def test_a_spawned_process_that_runs_out_of_a_real_group_s_memory_is_said_to_have_done_so(
    tmp_path: Path, small_group: Path
) -> None:
    script = tmp_path / "greedy.py"
    script.write_text(
        "import os, time, procgroup\n"
        "def work(index):\n"
        "    held = bytearray(os.urandom(1 << 20) * 400) if index == 1 else time.sleep(30)\n"
        "if __name__ == '__main__':\n"
        "    procgroup.spawn(work, nprocs=2)\n"
    )
    done = run_inside(small_group, str(script))
    assert done.returncode == 1, done.stderr
    assert done.stderr.splitlines()[-1].endswith(
        "ProcessExitedException: process 1 terminated with signal SIGKILL; "
        "the kernel killed 1 process(es) of this control group for want of memory"
    )
