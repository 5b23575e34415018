"""A line that many ranks write is shown once, and the lines of one rank never change their order."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Iterator

import pytest

from procgroup.launch.deadlines import COLLAPSE_SECONDS
from procgroup.launch.output.collapse import Collapser, CollapsingPrefixer
from procgroup.launch.output.log_options import parse_ranks
from procgroup.launch.output.sinks import Sink


class Shown:
    """A collapser for some ranks, and what it has shown."""

    def __init__(self, ranks: int) -> None:
        self.sink = Sink(os.open(os.devnull, os.O_WRONLY))
        self.collapser = Collapser(self.sink, ranks)
        self.ranks = [CollapsingPrefixer(f"[rank {rank}] ", self.collapser, rank) for rank in range(ranks)]

    def lines(self) -> list[str]:
        shown = bytes(self.sink._pending).decode()
        self.sink._pending.clear()
        return shown.splitlines()


@pytest.fixture
def shown() -> Iterator[Shown]:
    made = Shown(4)
    yield made
    os.close(made.sink.descriptor)


def test_a_line_that_all_ranks_write_is_shown_at_once(shown: Shown) -> None:
    for rank in shown.ranks[:3]:
        rank.feed(b"epoch 3\n")
    assert shown.lines() == []
    shown.ranks[3].feed(b"epoch 3\n")
    assert shown.lines() == ["[ranks 0-3] (x4) epoch 3"]
    assert shown.collapser.due is None


def test_a_line_that_some_ranks_write_is_shown_after_a_moment(shown: Shown) -> None:
    shown.ranks[0].feed(b"a\n")
    shown.ranks[2].feed(b"a\n")
    due = shown.collapser.due
    assert due is not None and due <= time.monotonic() + COLLAPSE_SECONDS
    shown.collapser.show_due(due - 0.001)
    assert shown.lines() == []
    shown.collapser.show_due(due)
    assert shown.lines() == ["[ranks 0, 2] (x2) a"]


def test_a_line_of_one_rank_has_its_usual_prefix(shown: Shown) -> None:
    shown.ranks[1].feed(b"mine\n\n")
    shown.collapser.flush()
    assert shown.lines() == ["[rank 1] mine", "[rank 1] "]


def test_repeated_lines_are_collapsed_one_by_one(shown: Shown) -> None:
    shown.ranks[0].feed(b"a\na\n")
    shown.ranks[1].feed(b"a\na\na\n")
    shown.collapser.flush()
    assert shown.lines() == ["[ranks 0, 1] (x2) a", "[ranks 0, 1] (x2) a", "[rank 1] a"]


def test_a_live_line_is_not_collapsed_and_comes_after_what_the_rank_wrote_before(shown: Shown) -> None:
    shown.ranks[0].feed(b"first\n")
    shown.ranks[0].feed(b"\r 10%")
    shown.ranks[0].feed(b"\r100%\n")
    assert "".join(shown.lines()).replace("\r", "") == "[rank 0] first[rank 0]  10%[rank 0] 100%"


def test_what_is_held_back_is_bounded(shown: Shown) -> None:
    for number in range(40):
        shown.ranks[0].feed(f"{number} ".encode() + b"x" * 10_000 + b"\n")
    assert len(shown.lines()) >= 10


@pytest.mark.parametrize("seed", range(20))
def test_no_line_is_lost_and_none_of_a_rank_s_changes_its_place(seed: int) -> None:
    chance = random.Random(seed)
    shown = Shown(5)
    written: list[list[str]] = [[] for _ in shown.ranks]
    for _ in range(300):
        rank = chance.randrange(5)
        lines = [chance.choice("abcd") for _ in range(chance.randint(1, 3))]
        written[rank] += lines
        shown.ranks[rank].feed("".join(f"{line}\n" for line in lines).encode())
        if chance.random() < 0.1:
            shown.collapser.show_due(time.monotonic() + COLLAPSE_SECONDS * chance.random())
    shown.collapser.flush()
    found: list[list[str]] = [[] for _ in shown.ranks]
    for line in shown.lines():
        label, _, text = line.partition("] ")
        for rank in parse_ranks(label.removeprefix("[ranks ").removeprefix("[rank ")):
            found[rank].append(text.split()[-1])
    os.close(shown.sink.descriptor)
    assert found == written


def test_a_line_that_one_rank_writes_very_often_costs_little(shown: Shown) -> None:
    began = time.thread_time()
    shown.ranks[0].feed(b"\n" * 50_000)
    shown.collapser.flush()
    assert len(shown.lines()) == 50_000
    assert time.thread_time() - began < 20, "a search among all earlier lines for each one would take a minute"
