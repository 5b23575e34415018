"""A launcher among others, without standard streams, or with a hostile client."""

from __future__ import annotations

import contextlib
import socket
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from launch.agents import WITHIN, Job, wait_until
from launch.conftest import Launcher
from world import free_port

PRINTS = """
    print("kept")
"""

# What PyTorch's clients say first, and the requests for which their protocol has the numbers 1 and 10.
VALIDATION = b"\x00\xce\xf7\x85\x3c"
SET, MULTI_GET = b"\x01", b"\x0a"
MOST_KEYS = 65_536

LEASE = "keep_alive_interval=0.5"
"""For --rdzv-conf: a silent node is lost after 2.5 s."""
LONGER_THAN_A_LEASE = 3


def test_logs_that_were_kept_without_a_log_directory_outlive_the_next_job(launcher: Launcher, tmp_path: Path) -> None:
    for flags in (("-r", "3"), ()):
        done = launcher.run(PRINTS, *flags, environment={"TMPDIR": str(tmp_path)})
        assert done.returncode == 0, done.stderr
    logs = list(tmp_path.glob("procgroup_*/*/attempt_0/0/stdout.log"))
    assert [log.read_text() for log in logs] == ["kept\n"]


def test_a_rank_may_print_where_the_launcher_has_no_standard_streams(launcher: Launcher) -> None:
    command = f'exec "{sys.executable}" -m procgroup run "{launcher.script(PRINTS)}" <&- >&-'
    done = subprocess.run(["sh", "-c", command], stderr=subprocess.PIPE, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")


def test_elastic_launch_writes_to_no_file_that_has_the_number_of_a_closed_stream(launcher: Launcher) -> None:
    program = launcher.script("""
        import sys
        from pathlib import Path
        from procgroup.launch import LaunchConfig, elastic_launch

        def print_and_return() -> int:
            print("lost")
            return 7

        if __name__ == "__main__":
            files = [Path(sys.argv[0]).with_name(name).open("w") for name in ("first", "second")]
            assert [file.fileno() for file in files] == [0, 1]
            assert elastic_launch(LaunchConfig(), print_and_return)() == {0: 7}
    """)
    command = f'exec "{sys.executable}" "{program}" <&- >&-'
    done = subprocess.run(["sh", "-c", command], stderr=subprocess.PIPE, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
    assert [(launcher.directory / name).read_text() for name in ("first", "second")] == ["", ""]


FULL = "procgroup run: cannot write to stdout: No space left on device\n"


def run_on_a_full_disk(launcher: Launcher, source: str, *flags: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "procgroup", "run", *flags, str(launcher.script(source))]
    with Path("/dev/full").open("wb") as full:
        return subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=120)


@pytest.mark.parametrize("flags", [(), ("--hosts", "localhost:1")])
def test_a_full_disk_as_stdout_is_said_once_and_is_the_status_of_a_job_that_went_on_to_its_end(
    launcher: Launcher, flags: tuple[str, ...]
) -> None:
    source = """
        import pathlib, sys
        for number in range(2000):
            print(number, "x" * 400)
        pathlib.Path(sys.argv[0]).with_name("end").touch()
    """
    done = run_on_a_full_disk(launcher, source, *flags)
    assert (done.returncode, done.stderr) == (1, FULL)
    assert (launcher.directory / "end").exists()


def test_a_failure_on_a_full_disk_keeps_its_status_and_its_report(launcher: Launcher) -> None:
    done = run_on_a_full_disk(launcher, "import sys; print('out'); sys.exit(7)")
    assert done.returncode == 7
    assert done.stderr.startswith(FULL) and "exit code 7" in done.stderr


def test_a_dry_run_on_a_full_disk_says_so(launcher: Launcher) -> None:
    done = run_on_a_full_disk(launcher, "", "--dry-run")
    assert (done.returncode, done.stderr) == (1, FULL)


def test_a_client_without_the_key_does_not_end_a_job_that_has_one(make_job: Callable[..., Job]) -> None:
    port = free_port()
    place = ("--master-addr", "127.0.0.1", "--master-port", str(port))
    job = make_job("--nnodes", "2", *place, "--rdzv-conf", LEASE)
    for node in range(2):
        job.start("--node-rank", str(node), environment={"PROCGROUP_JOB_KEY": "ab" * 32})
    job.wait_for_round(2)
    with contextlib.ExitStack() as clients:
        for _ in range(8):
            clients.enter_context(_ask_for_a_gigabyte(port))
        job.order(0, f"time.sleep({LONGER_THAN_A_LEASE})")
        wait_until(lambda: not (job.directory / "rank-0").exists(), WITHIN)
        assert job.finish() == [0, 0], job.output
    assert [start.restarts for agent in job.agents for start in agent.starts()] == [0, 0]


def _ask_for_a_gigabyte(port: int) -> socket.socket:
    """Set a key of 16 kB as a client of PyTorch's TCPStore, and ask for it as often as one request may."""
    client = socket.create_connection(("127.0.0.1", port))
    key = struct.pack("<Q", 2) + b"/k"
    value = bytes(16_000)
    client.sendall(VALIDATION + SET + key + struct.pack("<Q", len(value)) + value)
    client.sendall(MULTI_GET + struct.pack("<Q", MOST_KEYS) + key * MOST_KEYS)
    return client
