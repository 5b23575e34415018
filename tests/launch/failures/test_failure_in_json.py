"""A failure travels between nodes as bounded JSON, and is checked where it is read."""

from __future__ import annotations

import json
import math
import signal
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from procgroup.cluster.control_group import OutOfMemoryKills
from procgroup.launch.failures.failure import RankFailure
from procgroup.process.error_file import ErrorRecord
from procgroup.process.exit_reason import PEER, Origin

TRACEBACK = 'Traceback (most recent call last):\n  File "a.py", line 1, in <module>\n    f()\nValueError: boom\n'

SHOWN = ("rank", "pid", "exit_code", "exit_status", "time", "host", "node_rank", "evidence", "reason", "is_secondary")


def failure(stderr: str, exit_code: int = 1, **more: Any) -> RankFailure:
    return RankFailure(rank=3, pid=77, exit_code=exit_code, time=12.5, stderr=stderr, host="beta", node_rank=1, **more)


def read_again(sent: RankFailure) -> RankFailure:
    return RankFailure.from_json(sent.to_json())


@pytest.mark.parametrize(
    "sent",
    [
        failure("noise\n" * 50 + TRACEBACK),
        failure("last words\n", 7),
        failure("", -signal.SIGKILL, peak_memory=3 << 30, kills=OutOfMemoryKills(None, 2)),
        failure('Fatal Python error: Aborted\n\nCurrent thread 0x1 (most recent call first):\n  File "a"\n', -6),
        failure("", 5, record=ErrorRecord("ValueError: of the record", TRACEBACK)),
        failure("", record=ErrorRecord("RuntimeError: lost rank 2", TRACEBACK, origin=Origin(PEER, 2))),
        failure("", record=ErrorRecord("GroupBroken: gone", TRACEBACK, origin=Origin(PEER))),
    ],
)
def test_what_is_reported_of_a_failure_survives(sent: RankFailure) -> None:
    got = read_again(sent)
    for name in SHOWN:
        assert getattr(got, name) == getattr(sent, name), name
    assert got.blamed_rank == sent.blamed_rank
    assert got.origin == sent.origin


def test_a_long_text_keeps_its_beginning_and_its_end() -> None:
    frames = '  File "deep.py", line 1, in f\n' * 4000
    got = read_again(failure("Traceback (most recent call last):\n" + frames + "ValueError: the end 🙂\n"))
    assert got.evidence.startswith("Traceback (most recent call last):\n  File")
    assert got.evidence.endswith("ValueError: the end 🙂\n")
    assert "bytes are left out here" in got.evidence
    assert got.reason == "ValueError: the end 🙂"
    assert len(got.evidence.encode()) < 17 * 1024


def test_a_long_message_keeps_the_first_of_its_line() -> None:
    sent = failure(TRACEBACK.replace("boom", "x" * 60_000))
    assert len(sent.to_json()) < 40 * 1024
    assert read_again(sent).reason.startswith("ValueError: xxx")


def test_characters_that_redraw_a_terminal_are_replaced() -> None:
    got = read_again(failure(TRACEBACK.replace("boom", "\x1b[2Jboom\x07 \ud800")))
    assert got.evidence.endswith("ValueError: ?[2Jboom? ?\n")
    assert got.reason == "ValueError: ?[2Jboom? ?"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("rank", -1),
        ("rank", True),
        ("rank", "3"),
        ("rank", 1 << 40),
        ("pid", None),
        ("exit_code", 1000),
        ("time", math.inf),
        ("time", "now"),
        ("time", 10**400),
        ("host", 7),
        ("text", None),
        ("exception", ["x"]),
        ("kills", [1]),
        ("kills", [1, -2]),
        ("kills", {"group": 1}),
        ("peak_memory", 0.5),
    ],
)
def test_a_field_that_does_not_fit_is_named(name: str, value: object) -> None:
    content = json.loads(failure(TRACEBACK).to_json())
    with pytest.raises(ValueError, match="expected a failure whose .*, got"):
        RankFailure.from_json(json.dumps(content | {name: value}))


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "[" * 50_000, " " * 100_000])
def test_anything_else_is_refused_with_what_was_expected(text: str) -> None:
    with pytest.raises(ValueError, match="expected a failure"):
        RankFailure.from_json(text)


JSON = st.recursive(
    st.none() | st.booleans() | st.floats() | st.integers() | st.text(max_size=20),
    lambda children: st.lists(children, max_size=4) | st.dictionaries(st.text(max_size=8), children, max_size=4),
    max_leaves=10,
)
FIELDS = [
    "rank",
    "node_rank",
    "host",
    "pid",
    "exit_code",
    "time",
    "peak_memory",
    "kills",
    "exception",
    "text",
    "procgroup",
]


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.dictionaries(st.sampled_from(FIELDS), JSON))
def test_whatever_a_record_holds_reading_it_gives_a_failure_or_a_value_error(changes: dict[str, Any]) -> None:
    content = json.loads(failure(TRACEBACK).to_json()) | changes
    try:
        got = RankFailure.from_json(json.dumps(content))
    except ValueError:
        return
    assert isinstance(got.reason, str) and isinstance(got.evidence, str)
    assert got.blamed_rank is None or got.blamed_rank >= 0
