"""Ranks of one host that wait for each other at a launcher know which of them have come."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
from collections.abc import Iterator

import pytest

from procgroup.rendezvous.announced_store import Arrivals


@pytest.fixture
def job() -> str:
    return secrets.token_hex(8)


@contextlib.contextmanager
def process_that_has_come(job: str, rank: int, size: int) -> Iterator[int]:
    """Fork a process that shows its arrival until it is killed; yield its id."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        arrivals = Arrivals(job, rank, size)
        os.write(writing, b"1")
        signal.pause()
        arrivals.close()
        os._exit(0)
    os.read(reading, 1)
    try:
        yield child
    finally:
        with contextlib.suppress(ProcessLookupError, ChildProcessError):
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        os.close(reading)
        os.close(writing)


def test_ranks_that_come_later_are_not_missing(job: str) -> None:
    first = Arrivals(job, 0, 3)
    assert first.missing() == [1, 2]
    second = Arrivals(job, 1, 3)
    assert first.missing() == [2] == second.missing()
    third = Arrivals(job, 2, 3)
    assert [one.missing() for one in (first, second, third)] == [[], [], []]
    for one in (first, second, third):
        one.close()


def test_a_rank_whose_time_has_passed_earlier_is_not_missing(job: str) -> None:
    first, second = Arrivals(job, 0, 3), Arrivals(job, 1, 3)
    first.close()
    assert second.missing() == [2]
    second.close()


def test_a_rank_that_was_killed_is_named_where_all_have_come(job: str) -> None:
    with process_that_has_come(job, 1, 2) as process:
        mine = Arrivals(job, 0, 2)
        assert mine.missing() == []
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)
        assert mine.missing() == [1]
        mine.close()


def test_jobs_do_not_see_each_other(job: str) -> None:
    mine, other = Arrivals(job, 0, 2), Arrivals(f"{job}-other", 1, 2)
    assert mine.missing() == [1]
    mine.close()
    other.close()
