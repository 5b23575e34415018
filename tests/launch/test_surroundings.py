"""A launcher among others, without standard streams, or with a hostile client."""

from __future__ import annotations

import contextlib
import socket
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from launch.agents import Job, wait_until
from launch.conftest import Launcher
from world import free_port

PRINTS = """
    print("kept")
"""

# What PyTorch's clients say first, and the requests for which their protocol has the numbers 1 and 10.
VALIDATION = b"\x00\xce\xf7\x85\x3c"
SET, MULTI_GET = b"\x01", b"\x0a"
MOST_KEYS = 65_536

LONGER_THAN_A_LEASE = 8


def test_logs_that_were_kept_without_a_log_directory_outlive_the_next_job(launcher: Launcher, tmp_path: Path) -> None:
    for flags in (("-r", "3"), ()):
        done = launcher.run(PRINTS, *flags, environment={"TMPDIR": str(tmp_path)})
        assert done.returncode == 0, done.stderr
    logs = list(tmp_path.glob("procgroup_*/*/attempt_0/0/stdout.log"))
    assert [log.read_text() for log in logs] == ["kept\n"]


def test_a_rank_may_print_where_the_launcher_has_no_standard_streams(launcher: Launcher) -> None:
    command = f'exec "{sys.executable}" -m procgroup run "{launcher.script(PRINTS)}" <&- >&-'
    done = subprocess.run(["sh", "-c", command], stderr=subprocess.PIPE, text=True, timeout=30)
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
    done = subprocess.run(["sh", "-c", command], stderr=subprocess.PIPE, text=True, timeout=30)
    assert (done.returncode, done.stderr) == (0, "")
    assert [(launcher.directory / name).read_text() for name in ("first", "second")] == ["", ""]


def test_a_client_without_the_key_does_not_end_a_job_that_has_one(make_job: Callable[..., Job]) -> None:
    port = free_port()
    place = ("--master-addr", "127.0.0.1", "--master-port", str(port))
    job = make_job("--nnodes", "2", *place)
    for node in range(2):
        job.start("--node-rank", str(node), environment={"PROCGROUP_JOB_KEY": "ab" * 32})
    job.wait_for_round(2)
    with contextlib.ExitStack() as clients:
        for _ in range(8):
            clients.enter_context(_ask_for_a_gigabyte(port))
        job.order(0, f"time.sleep({LONGER_THAN_A_LEASE})")
        wait_until(lambda: not (job.directory / "rank-0").exists(), 20)
        assert job.finish(within=30) == [0, 0], job.output
    assert [start.restarts for agent in job.agents for start in agent.starts()] == [0, 0]


def _ask_for_a_gigabyte(port: int) -> socket.socket:
    """Set a key of 16 kB as a client of PyTorch's TCPStore, and ask for it as often as one request may."""
    client = socket.create_connection(("127.0.0.1", port))
    key = struct.pack("<Q", 2) + b"/k"
    value = bytes(16_000)
    client.sendall(VALIDATION + SET + key + struct.pack("<Q", len(value)) + value)
    client.sendall(MULTI_GET + struct.pack("<Q", MOST_KEYS) + key * MOST_KEYS)
    return client
