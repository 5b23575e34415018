"""The judge of the bug programs: what it makes of ranks that name the right one, another one, or nobody."""

from __future__ import annotations

from typing import Any

import pytest
from bugs import bug as expectations
from bugs.bug import Bug
from bugs.surroundings import Seen
from bugs.verdict import judge, ranks_named


def program() -> None:
    """A program that is never run."""
    print("guilty")  # BUG


DEATH = Bug(program, ("PeerLost",), within=1.0)
DIFFERENT = Bug(program, ("CollectiveMismatch",), within=1.0, keeps_arrays=True)
FINE = Bug(program, (), within=1.0)


def ended(rank: int, kind: str = "", text: str = "", after: float = 0.1, **others: Any) -> Seen:
    """Return what is seen of a rank that started at 10, and whose program ended ``after`` seconds after the fault."""
    others = {"status": int(bool(kind))} | others
    return Seen(rank, started=10.0, kind=kind, text=text, moment=11.0 + after, **others)


def world(*others: Seen) -> list[Seen]:
    """Return what is seen of a world whose rank 1 is killed, one second after its start."""
    victim = Seen(1, started=10.0, fault=11.0, status=-9)
    seen = sorted([victim, *others], key=lambda one: one.rank)
    for one in seen:
        if one.moment is not None and one.ended is None and one.status is not None:
            one.ended = one.moment + 0.1
    return seen


LONG_AFTER = 10_000.0
"""Seconds: later than any load allows."""

RIGHT = ended(2, "PeerLost", "lost rank 1 (pid 5)")


@pytest.fixture(autouse=True)
def fixture_lines_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """The texts below are short: lines count in the test of lines alone."""
    monkeypatch.setattr(expectations, "LINES_ARE_NAMED", False)


@pytest.mark.parametrize(
    ("word", "seen"),
    [
        ("ok", ended(0, "PeerLost", "lost rank 1 (pid 5)")),
        ("no rank", ended(0, "PeerLost", "Connection closed by peer [127.0.0.1]:3412")),
        ("wrong rank", ended(0, "PeerLost", "lost rank 2 (pid 5)")),
        ("wrong error", ended(0, "RuntimeError", "lost rank 1")),
        ("no error", ended(0)),
        ("late", ended(0, "PeerLost", "lost rank 1", after=LONG_AFTER)),
        ("crash", Seen(0, started=10.0, status=-6)),
        ("hang", Seen(0, started=10.0)),
        ("hang", ended(0, "PeerLost", "lost rank 1", status=None)),
        ("slow exit", ended(0, "PeerLost", "lost rank 1", ended=LONG_AFTER)),
        ("slow exit", ended(0, "PeerLost", "lost rank 1", left=["python worker.py"])),
        ("WRONG RESULT", ended(0, "WrongResult", "got 2, expected 3")),
        ("WRONG RESULT", ended(0, changed=["1 became 2"])),
    ],
)
def test_the_worst_of_all_ranks_counts(word: str, seen: Seen) -> None:
    assert judge(DEATH, world(seen, RIGHT)).word == word


def test_an_array_that_a_refused_call_has_changed_is_a_wrong_result() -> None:
    calls = {"calls": {"0": "barrier", "1": "broadcast", "2": "barrier"}}
    refused = ended(0, "CollectiveMismatch", "the ranks made different calls", attributes=calls)
    other = ended(2, "CollectiveMismatch", "the ranks made different calls", attributes=calls)
    assert judge(DIFFERENT, world(refused, other)).word == "ok"
    refused.changed = ["1 became 2"]
    assert judge(DIFFERENT, world(refused, other)).word == "WRONG RESULT"


def test_an_error_where_none_is_due_is_wrong() -> None:
    assert judge(FINE, world(ended(0), ended(2))).word == "ok"
    assert judge(FINE, world(ended(0), RIGHT)).word == "wrong error"


def test_a_line_that_is_not_named_counts_when_it_has_to(monkeypatch: pytest.MonkeyPatch) -> None:
    named = [ended(rank, "PeerLost", f"lost rank 1 ({DEATH.place})") for rank in (0, 2)]
    assert judge(DEATH, world(*named)).names_line
    assert not judge(DEATH, world(named[0], RIGHT)).names_line
    monkeypatch.setattr(expectations, "LINES_ARE_NAMED", True)
    assert judge(DEATH, world(*named)).word == "ok"
    assert judge(DEATH, world(named[0], RIGHT)).word == "no line"


@pytest.mark.parametrize(
    ("text", "attributes", "named"),
    [
        ("all_reduce #2 on group 0 (rank 0 of 3): lost rank 1 (pid 3)", {}, {1}),
        ("barrier #1 on group 1 (rank 1 of 2; global rank 3): lost rank 2", {}, {2}),
        ("rank 0 of 3: still missing ranks 1, 2 and 4 of 5", {}, {1, 2, 4}),
        ("", {"global_peer": 3, "peer": 1}, {3}),
        ("", {"missing": [1], "members": [4, 6], "calls": {}}, {6}),
        ("", {"calls": {"0": "a", "1": "b", "2": "a"}}, {1}),
        ("", {"calls": {"0": "send", "1": "recv"}}, {0, 1}),
        ("", {"waits": {"0": "recv from 1", "1": "recv from 0"}}, {0, 1}),
    ],
)
def test_ranks_are_named_by_texts_and_attributes(text: str, attributes: dict[str, Any], named: set[int]) -> None:
    assert ranks_named(Seen(0, text=text, attributes=attributes)) == named
