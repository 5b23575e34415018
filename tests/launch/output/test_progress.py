"""procgroup.report reaches the launcher, never blocks, costs little, and nobody else's datagrams are taken."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import procgroup
from procgroup import _native
from procgroup.launch.output import progress
from procgroup.launch.output.progress import encode
from procgroup.launch.output.status_line import ProgressInbox, decode, describe
from world import run


@pytest.fixture
def inbox(monkeypatch: pytest.MonkeyPatch) -> Iterator[ProgressInbox]:
    made = ProgressInbox()
    monkeypatch.setenv("PROCGROUP_REPORT_SOCKET", made.address)
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setattr(progress, "_next_time", 0.0)
    yield made
    made.close()


def test_a_report_reaches_the_launcher(inbox: ProgressInbox) -> None:
    procgroup.report(step=7, loss=0.25, phase="warm-up")
    assert inbox.take() == {3: {"step": 7, "loss": 0.25, "phase": "warm-up"}}
    assert inbox.take() == {}


def test_reports_of_other_processes_arrive_and_those_in_quick_succession_are_left_out(inbox: ProgressInbox) -> None:
    source = "import procgroup\nfor step in range(100_000): procgroup.report(step=step)"
    subprocess.run([sys.executable, "-c", source], env={**os.environ, "RANK": "5"}, check=True, timeout=120)
    assert inbox.take()[5]["step"] in range(100_000)


def test_without_a_launcher_nothing_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PROCGROUP_REPORT_SOCKET", raising=False)
    procgroup.report(step=1)


def test_a_launcher_that_is_gone_or_behind_is_no_error(inbox: ProgressInbox, monkeypatch: pytest.MonkeyPatch) -> None:
    for step in range(2000):  # more than its socket takes
        monkeypatch.setattr(progress, "_next_time", 0.0)
        procgroup.report(step=step)
    assert inbox.take()[3]["step"] in range(2000)
    inbox.close()
    monkeypatch.setattr(progress, "_next_time", 0.0)
    procgroup.report(step=1)


def test_a_report_that_comes_too_soon_costs_next_to_nothing(inbox: ProgressInbox) -> None:
    procgroup.report(step=0)
    began = time.thread_time()
    for step in range(20_000):
        procgroup.report(step=step)
    assert time.thread_time() - began < 1.0, "50 µs each would be a hundred times too much"


def report_in_quick_succession(rank: int, size: int, directory: str) -> str:
    procgroup.init_process_group()
    for step in range(100):
        procgroup.report(step=step, loss=0.5)
    (record,) = Path(directory).glob("*/0-*.record")
    text = str(_native.read_flight_record(str(record))["report"][1])
    procgroup.destroy_process_group()
    return text


def test_the_flight_record_has_the_last_report_also_of_those_in_quick_succession(tmp_path: Path) -> None:
    records = {"PROCGROUP_RECORD_DIR": str(tmp_path)}
    assert run(report_in_quick_succession, 1, args=(str(tmp_path),), environment=records) == ["step 99, loss 0.5"]


def test_numbers_of_array_libraries_are_numbers() -> None:
    numpy = pytest.importorskip("numpy")
    assert decode(encode(0, {"step": numpy.int64(3), "loss": numpy.float32(0.5), "array": numpy.ones(1)[0]})) == (
        0,
        {"step": 3, "loss": 0.5, "array": 1.0},
    )


def test_the_only_element_of_an_array_is_sent_with_its_fraction() -> None:
    numpy = pytest.importorskip("numpy")
    values = {"loss": numpy.array(0.31), "steps": numpy.array([7]), "large": 2**53 + 1}
    assert decode(encode(0, values)) == (0, {"loss": 0.31, "steps": 7, "large": 2**53 + 1})
    sent = decode(encode(0, {"loss": numpy.array(float("nan"))}))
    assert sent is not None
    assert str(sent[1]["loss"]) == "nan"


@pytest.mark.parametrize("value", [None, [1], object(), {"a": 1}])
def test_what_is_no_number_or_text_is_refused_by_name(inbox: ProgressInbox, value: object) -> None:
    with pytest.raises(TypeError, match="report takes numbers and texts, got loss of type"):
        procgroup.report(loss=value)


def test_what_is_sent_is_bounded() -> None:
    with pytest.raises(ValueError, match="at most 8 values, got 9"):
        encode(0, {str(number): number for number in range(9)})
    assert len(encode(0, {"n" * 500 + str(number): "ü" * 500 for number in range(1)})) < 1000


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xff",
        b"[]",
        b"3",
        b'{"rank": true, "values": {}}',
        b'{"rank": -1, "values": {}}',
        b'{"rank": 0, "values": []}',
        b'{"rank": 0}',
        b"[" * 8000,
    ],
)
def test_what_is_no_report_is_dropped(inbox: ProgressInbox, data: bytes) -> None:
    assert decode(data) is None
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
        sender.sendto(data, "\0" + inbox.address)
    assert inbox.take() == {}


def test_control_characters_do_not_reach_the_terminal() -> None:
    decoded = decode(b'{"rank": 0, "values": {"a\\u001b[2J": "x\\ny", "big": 1e400, "list": [1]}}')
    assert decoded == (0, {"a?[2J": "x?y", "big": float("inf"), "list": "[1]"})


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_user_s_reports_are_dropped(inbox: ProgressInbox) -> None:
    source = "import json, os, socket\nfrom procgroup import report\nos.setuid(65534)\nreport(step=1)"
    subprocess.run([sys.executable, "-c", source], env=dict(os.environ), check=True, timeout=120)
    assert inbox.take() == {}


def test_the_status_line_shows_the_ranks_and_the_range_of_their_numbers() -> None:
    assert describe(8, 8, 0, {}) == "procgroup: 8 of 8 ranks up"
    reports = {1: {"step": 118, "loss": 0.31234}, 0: {"step": 120, "phase": "late"}}
    shown = describe(7, 8, 1, reports)
    assert shown == "procgroup: 7 of 8 ranks up, 1 restart, step 118 to 120, phase late, loss 0.3123"
    assert describe(2, 2, 2, {0: {"step": 5}, 1: {"step": 5}}) == "procgroup: 2 of 2 ranks up, 2 restarts, step 5"
    assert "x nan" in describe(1, 1, 0, {0: {"x": float("nan")}})
