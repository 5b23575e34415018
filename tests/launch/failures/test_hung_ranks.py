"""Ranks that live but do not get on are reported, and killed where that was asked for."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest

from procgroup.launch.ranks import rank_process
from procgroup.launch.ranks.rank_process import HungRanks, process_state
from waiting import stop


class Rank:
    """What HungRanks sees of a rank's process."""

    def __init__(self, pid: int) -> None:
        self.rank = 3
        self.pid = pid
        self.killed_for = ""
        self.signals: list[int] = []

    def signal(self, number: int) -> None:
        self.signals.append(number)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The time that HungRanks sees: it goes on only when a test says so."""

    class Clock:
        now = 1000.0

    monkeypatch.setattr(rank_process.time, "monotonic", lambda: Clock.now)
    return Clock


def look_every_five_seconds(hung: HungRanks, rank: Rank, clock: Any, seconds: float) -> None:
    until = clock.now + seconds
    while clock.now < until:
        clock.now += 5
        hung.look([rank])  # type: ignore[list-item]


def test_a_stopped_rank_is_reported_once(start_launcher: Any, clock: Any) -> None:
    running = start_launcher("import os, time; print('pid', os.getpid(), flush=True); time.sleep(60)")
    running.wait_for("pid")
    rank = Rank(running.pids()[0])
    stop(rank.pid)
    said: list[str] = []
    look_every_five_seconds(HungRanks(None, {}, said.append), rank, clock, 60)
    assert len(said) == 1
    assert f"rank 3 (pid {rank.pid}) has been stopped (kill -CONT {rank.pid} lets it go on) for 10 s" in said[0]
    assert rank.signals == []
    os.kill(rank.pid, signal.SIGCONT)


def test_a_rank_that_works_is_not_reported(clock: Any) -> None:
    said: list[str] = []
    look_every_five_seconds(HungRanks(None, {}, said.append), Rank(os.getpid()), clock, 60)
    look_every_five_seconds(HungRanks(90.0, {3: clock.now}, said.append), Rank(os.getpid()), clock, 80)
    assert said == []


def test_a_timeout_that_sees_no_endless_loop_because_no_rank_reports_says_so_once(clock: Any) -> None:
    rank, said = Rank(os.getpid()), list[str]()
    look_every_five_seconds(HungRanks(20.0, {}, said.append), rank, clock, 15)
    assert said == []
    look_every_five_seconds(HungRanks(20.0, {}, said.append), rank, clock, 60)
    assert len(said) == 1
    assert "--hang-timeout 20: no rank of this node has called procgroup.report yet" in said[0]
    assert rank.signals == []


def test_a_rank_that_ceases_to_report_is_killed_with_the_reason(clock: Any) -> None:
    rank, said = Rank(os.getpid()), list[str]()
    look_every_five_seconds(HungRanks(20.0, {3: clock.now}, said.append), rank, clock, 60)
    assert rank.signals == [signal.SIGKILL]
    assert rank.killed_for == "it has not called procgroup.report for 20 s (--hang-timeout 20)"


def test_a_process_that_is_gone_has_no_state() -> None:
    assert process_state(2**22 + 1) == ""


def test_a_stopped_rank_is_killed_and_started_again(start_launcher: Any) -> None:
    source = """
        import os, signal
        print("pid", os.getpid(), flush=True)
        if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGSTOP)
    """
    running = start_launcher(source, "-n", "2", "--max-restarts", "1", "--hang-timeout", "3")
    assert running.process.wait(timeout=60) == 0
    assert "it has been stopped" in running.stderr
    assert "restart 1 of 1" in running.stderr
