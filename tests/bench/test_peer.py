from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from bench.scripted import HERE, scripted_command

from procgroup.diagnostics.bench.peer import BenchPeer, PeerCommand, Plan, parse_times
from procgroup.diagnostics.bench.rounds import InterleavedRun, connect_all
from procgroup.errors import PeerFailure


@pytest.fixture
def directory() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as name:  # tmp_path may be longer than the path of a Unix socket
        yield Path(name)


@contextlib.contextmanager
def scripted_peers(directory: Path, **behaviours: str) -> Iterator[dict[str, BenchPeer]]:
    with contextlib.ExitStack() as on_exit:
        yield {
            name: on_exit.enter_context(BenchPeer(scripted_command(name, 2, behaviour), 2, directory))
            for name, behaviour in behaviours.items()
        }


def processes_with(text: str) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if text in " ".join(process.cmdline()):
                found.append(process)
    return found


def assert_none_left(text: str) -> None:
    deadline = time.monotonic() + 40
    while processes_with(text) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert processes_with(text) == []


def test_a_peer_answers_with_one_time_per_sample(directory: Path) -> None:
    with scripted_peers(directory, one="slow") as peers:
        peers["one"].connect(timeout=30)
        times = peers["one"].measure("all_reduce", 64, Plan(samples=4, calls=3), timeout=30)
        assert len(times) == 4
        assert min(times) >= 2e6, "nanoseconds per call, of calls that sleep for 2 ms"
        assert peers["one"].description == "scripted 1.0"


def test_close_lets_the_ranks_leave_and_may_be_called_again(directory: Path) -> None:
    with scripted_peers(directory, one="works") as peers:
        peers["one"].connect(timeout=30)
        peers["one"].close()
        peers["one"].close()
        assert_none_left(str(directory))


@pytest.mark.parametrize(
    ("behaviour", "reason"),
    [
        ("never starts", "exit status 7"),
        ("silent", "did not say hello"),
        ("foreign", "expected hello"),
        ("miscounts", "expected 2 ranks"),
    ],
)
def test_a_peer_that_does_not_start_is_named_with_the_reason(directory: Path, behaviour: str, reason: str) -> None:
    with scripted_peers(directory, one=behaviour) as peers:
        if behaviour == "silent":
            assert select.select([peers["one"]._listener], [], [], 30)[0], "nobody has connected"
        (failure,) = connect_all(peers, timeout=2 if behaviour == "silent" else 30)
        assert failure.peer == "one"
        assert reason in failure.reason
    assert_none_left(str(directory))


def test_a_program_that_does_not_exist_is_a_failure_of_that_peer(directory: Path) -> None:
    with pytest.raises(PeerFailure, match=r"ghost: cannot start .*nowhere"):
        BenchPeer(PeerCommand("ghost", ["/nowhere/at/all"], {}), 2, directory)


def test_a_wrong_result_is_not_measured(directory: Path) -> None:
    with scripted_peers(directory, one="wrong") as peers:
        peers["one"].connect(timeout=30)
        with pytest.raises(PeerFailure, match="all_reduce of 64 bytes gave a wrong result"):
            peers["one"].measure("all_reduce", 64, Plan(3, 1), timeout=30)


def test_an_operation_that_a_peer_lacks_is_said(directory: Path) -> None:
    with scripted_peers(directory, one="works") as peers:
        peers["one"].connect(timeout=30)
        with pytest.raises(PeerFailure, match="does not measure barrier"):
            peers["one"].measure("barrier", 4, Plan(3, 1), timeout=30)


def test_a_rank_that_dies_is_reported_at_once_though_the_others_are_stuck(directory: Path) -> None:
    with scripted_peers(directory, one="dies") as peers:
        peers["one"].connect(timeout=30)
        start = time.monotonic()
        with pytest.raises(PeerFailure, match=r"rank 1: the process ended\n    out of luck"):
            peers["one"].measure("all_reduce", 8, Plan(100, 1), timeout=50)
        assert time.monotonic() - start < 25, "half of the timeout"


def test_a_peer_that_is_stuck_is_given_up_after_the_timeout(directory: Path) -> None:
    with scripted_peers(directory, one="stuck") as peers:
        peers["one"].connect(timeout=30)
        with pytest.raises(PeerFailure, match="no answer from rank 0, 1 in time"):
            peers["one"].measure("all_reduce", 8, Plan(100, 1), timeout=0.5)
    assert_none_left(str(directory))


def test_a_run_goes_on_without_the_peer_that_died(directory: Path) -> None:
    told: list[str] = []
    with scripted_peers(directory, good="works", bad="dies", slow="slow") as peers:
        assert connect_all(peers, timeout=30) == []
        run = InterleavedRun("all_reduce", peers, rounds=4, seconds=0.02, timeout=30, tell=told.append)
        small, large = run.sizes([8, 1024])
        assert set(run.left_out) == {"bad"}
        assert "rank 1: the process ended" in told[0]
        assert [len(small.rounds[name]) for name in ("good", "slow")] == [4, 4]
        assert "bad" not in large.rounds
        ratio = large.ratio("slow", "good")
        assert ratio is not None
        assert ratio.verdict == "ahead"
        assert large.ratio("bad", "good") is None


def test_peers_that_wait_use_no_processor_time(directory: Path) -> None:
    with scripted_peers(directory, waiting="works", working="slow") as peers:
        assert connect_all(peers, timeout=30) == []
        peers["waiting"].measure("all_reduce", 8, Plan(3, 1), timeout=30)
        before = peers["waiting"].idle_ns
        start = time.monotonic_ns()
        peers["working"].measure("all_reduce", 8, Plan(250, 1), timeout=30)
        waited = time.monotonic_ns() - start
        peers["waiting"].measure("all_reduce", 8, Plan(3, 1), timeout=30)
        assert peers["waiting"].idle_ns - before < 0.02 * waited * 2, "two ranks, each under 2 percent of a core"


@pytest.mark.parametrize("signal_number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_nothing_runs_on_when_the_driver_is_killed(directory: Path, signal_number: signal.Signals) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    environment["TMPDIR"] = str(directory)
    driver = subprocess.Popen(
        [sys.executable, str(HERE / "driver_of_scripted_peers.py")],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    with driver:
        assert driver.stdout is not None
        assert driver.stdout.readline() == b"ready\n"
        assert len(processes_with(str(directory))) == 6, "two launchers of two ranks each"
        driver.send_signal(signal_number)
    assert_none_left(str(directory))


@pytest.mark.parametrize("line", ["times", "times 5", "times 5 x", "times 5 -1", "time 5 6", "", "error too bad"])
def test_answers_that_are_not_times_are_refused(line: str) -> None:
    with pytest.raises(ValueError, match=r"expected|invalid literal|too bad"):
        parse_times(line)
