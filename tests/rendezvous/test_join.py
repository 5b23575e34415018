"""Ranks that join through any store learn together who is there, or what is wrong. Here ranks are threads."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from procgroup.errors import RendezvousConflict, RendezvousError, RendezvousTimeout, StoreLost
from procgroup.rendezvous import join as joining
from procgroup.rendezvous.join import JoinedWorld, join
from procgroup.stores.hash import HashStore
from procgroup.stores.start_up import Member, read_members


def together(*calls: Callable[[], Any]) -> list[Any]:
    """Make the calls in a thread each; return what they return or raise."""
    results: list[Any] = [None] * len(calls)

    def run(index: int) -> None:
        try:
            results[index] = calls[index]()
        except BaseException as error:
            results[index] = error

    threads = [threading.Thread(target=run, args=(index,), daemon=True) for index in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive()
    return results


def joins(store: HashStore, places: list[tuple[int, int]], timeout: float = 10) -> list[Any]:
    return together(*(lambda rank=rank, size=size: join(store, rank, size, timeout) for rank, size in places))


def wait_until_claimed(store: HashStore, rank: int, number: int = 0) -> None:
    store.wait([f"rendezvous/{number}/rank/{rank}"], 5)


@pytest.mark.parametrize("size", [1, 2, 3, 4, 7])
def test_all_ranks_learn_the_same_members_and_secret(size: int) -> None:
    worlds = joins(HashStore(), [(rank, size) for rank in range(size)])
    assert len({(world.round, world.members, world.key) for world in worlds}) == 1
    assert [member.rank for member in worlds[0].members] == list(range(size))
    assert len(worlds[0].key) == 32


def test_two_jobs_do_not_share_a_secret() -> None:
    assert join(HashStore(), 0, 1, 5).key != join(HashStore(), 0, 1, 5).key


def test_ranks_can_come_together_again_and_again_over_one_store() -> None:
    store = HashStore()
    for number in range(5):
        worlds = joins(store, [(2, 3), (0, 3), (1, 3)])
        assert {world.round for world in worlds} == {number}


def test_a_rank_that_is_quick_to_join_again_waits_for_the_next_round() -> None:
    store = HashStore()

    def twice(rank: int) -> list[int]:
        return [join(store, rank, 2, 10).round for _ in range(20)]

    assert together(lambda: twice(0), lambda: twice(1)) == [list(range(20))] * 2


class CountingStore:
    """A store that counts the requests of each thread."""

    def __init__(self) -> None:
        self.store = HashStore()
        self.requests: Counter[int] = Counter()

    def __getattr__(self, name: str) -> Any:
        if name not in ("is_hosted_here", "name_users"):  # with_timeout stands for the request that follows it
            self.requests[threading.get_ident()] += 1
        return getattr(self.store, name)


@pytest.mark.parametrize("size", [2, 16])
def test_a_rank_makes_a_number_of_requests_that_does_not_grow_with_the_world(size: int) -> None:
    store = CountingStore()
    joins(store, [(rank, size) for rank in range(size)])
    made = sorted(store.requests.values())
    assert made[:-1] == [7] * (size - 1)
    assert made[-1] == 10


def test_a_rank_that_joins_twice_is_named_on_all_sides() -> None:
    store = HashStore()

    def second() -> JoinedWorld:
        wait_until_claimed(store, 0)
        wait_until_claimed(store, 1)
        return join(store, 1, 3, 10)

    started = time.monotonic()
    raised = together(lambda: join(store, 0, 3, 10), lambda: join(store, 1, 3, 10), second)
    assert time.monotonic() - started < 8
    assert {type(error) for error in raised} == {RendezvousConflict}
    assert len({str(error) for error in raised}) == 1
    assert str(raised[0]).startswith("rank 1 joined twice: ")
    assert str(raised[0]).count(" pid ") == 2


def test_a_world_size_that_differs_is_named_on_all_sides() -> None:
    store = HashStore()

    def second() -> JoinedWorld:
        wait_until_claimed(store, 0)
        store.wait(["rendezvous/0/world_size"], 5)
        return join(store, 2, 8, 10)

    started = time.monotonic()
    raised = together(lambda: join(store, 0, 4, 10), second)
    assert time.monotonic() - started < 8
    assert [str(error) for error in raised] == ["world_size disagreement: rank 2 says 8, rank 0 says 4"] * 2
    assert {type(error) for error in raised} == {RendezvousConflict}


def test_the_timeout_names_the_missing_and_the_others_on_all_sides() -> None:
    store = HashStore()

    def first() -> JoinedWorld:
        store.wait(["rendezvous/0/count"], 5)
        return join(store, 0, 4, 0.5)

    started = time.monotonic()
    raised = together(first, lambda: join(store, 2, 4, 10))
    assert 0.4 < time.monotonic() - started < 5
    for error in raised:
        assert isinstance(error, RendezvousTimeout)
        assert (error.missing, sorted(error.joined), error.size) == ((1, 3), [0, 2], 4)
        assert "still missing ranks 1, 3 of 4 (joined: 0@" in str(error)


def test_rank_0_says_who_is_missing_while_it_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(joining, "REPORT_SECONDS", 0.1)
    store, said = HashStore(), []
    reported = threading.Event()

    def say(line: str) -> None:
        said.append(line)
        if "2@" in line:
            reported.set()

    def last() -> JoinedWorld:
        assert reported.wait(10)
        return join(store, 1, 3, 10)

    worlds = together(lambda: join(store, 0, 3, 10, say=say), lambda: join(store, 2, 3, 10), last)
    assert len({(world.round, world.members, world.key) for world in worlds}) == 1
    host = worlds[0].members[0].host
    assert said[-1] == f"waiting for rank 1 of 3 (joined: 0@{host} 2@{host})"


def test_when_rank_0_is_missing_the_lowest_rank_that_has_come_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(joining, "REPORT_SECONDS", 0.1)
    store = HashStore()
    said: dict[int, list[str]] = {1: [], 2: []}
    reported = threading.Event()

    def say(line: str) -> None:
        said[1].append(line)
        if "2@" in line:
            reported.set()

    def last() -> JoinedWorld:
        assert reported.wait(10)
        return join(store, 0, 3, 10, say=lambda line: None)

    worlds = together(lambda: join(store, 1, 3, 10, say=say), lambda: join(store, 2, 3, 10, say=said[2].append), last)
    assert len({(world.round, world.members, world.key) for world in worlds}) == 1
    host = worlds[0].members[0].host
    assert said[1][-1] == f"waiting for rank 0 of 3 (joined: 1@{host} 2@{host})"
    assert not [line for line in said[2] if "rank 0" in line and "1@" in line]


def test_after_a_failed_round_the_same_ranks_can_join_again() -> None:
    store = HashStore()
    for number in range(3):
        raised = joins(store, [(0, 3), (1, 3)], timeout=0.1)
        assert all(isinstance(error, RendezvousTimeout) for error in raised), number
    (last,) = {world.round for world in joins(store, [(0, 3), (1, 3), (2, 3)])}
    assert last >= 3  # more when a rank was so slow that it came to a failed round's successor


class VerdictsAtOnce(HashStore):
    """Lets both ranks of a failed round come to their verdicts before either writes it."""

    def __init__(self) -> None:
        super().__init__()
        self.both = threading.Barrier(2)

    def compare_set(self, key: str, expected: Any, desired: Any) -> bytes:
        if key == "rendezvous/0/verdict":
            self.both.wait(10)
        return super().compare_set(key, expected, desired)


def test_a_round_in_which_two_ranks_say_the_same_is_counted_once() -> None:
    store = VerdictsAtOnce()
    raised = joins(store, [(0, 3), (1, 3)], timeout=2)
    assert all(isinstance(error, RendezvousTimeout) and error.missing == (2,) for error in raised)
    assert store.add("rendezvous/round", 0) == 1


class InterruptedStore(HashStore):
    """Interrupts one thread when it waits for the verdict."""

    thread = 0

    def get_unless(self, keys: Any, unless: str, timeout: Any = None) -> Any:
        if keys[0].endswith("verdict") and threading.get_ident() == self.thread:
            raise KeyboardInterrupt
        return super().get_unless(keys, unless, timeout)


def test_a_rank_that_is_interrupted_tells_the_others() -> None:
    store = InterruptedStore()

    def second() -> JoinedWorld:
        wait_until_claimed(store, 0)
        store.thread = threading.get_ident()
        return join(store, 1, 3, 10)

    started = time.monotonic()
    raised = together(lambda: join(store, 0, 3, 10), second)
    assert time.monotonic() - started < 8
    assert isinstance(raised[1], KeyboardInterrupt)
    assert type(raised[0]) is RendezvousError
    assert str(raised[0]).startswith("rank 1 (")
    assert str(raised[0]).endswith("left: KeyboardInterrupt")


def test_what_others_wrote_into_the_list_is_left_out() -> None:
    member = Member(3, 4, "host", 7, "nonce")
    text = "\n".join(["garbage", "[]", "{}", '{"rank": "x"}', '{"rank": null}', member.line(), "3", ""])
    assert read_members(text) == [member]


def test_a_claim_that_cannot_be_read_still_ends_in_a_conflict() -> None:
    store = HashStore()
    store.set("rendezvous/0/rank/0", b"\xff\xfe")
    with pytest.raises(RendezvousConflict, match="rank 0 joined twice: an unknown process, "):
        join(store, 0, 2, 5)


def test_a_rank_that_comes_after_the_others_have_failed_learns_why() -> None:
    store = HashStore()
    assert [type(error) for error in joins(store, [(0, 3), (1, 4)])] == [RendezvousConflict] * 2
    with pytest.raises(RendezvousTimeout) as caught:
        join(store, 2, 3, 0.2)
    assert "did not go on: world_size disagreement: rank" in caught.value.__notes__[0]


class EndingInTheSecondRound(HashStore):
    """A store whose host is one of the ranks that failed in the first round, and ends soon after."""

    def get_unless(self, keys: Any, *arguments: Any) -> Any:
        if keys[0].startswith("rendezvous/1/"):
            raise StoreLost(host="127.0.0.1", port=29500, reason="it closed the connection")
        return super().get_unless(keys, *arguments)


def test_a_rank_that_comes_when_the_host_of_the_store_has_failed_learns_why() -> None:
    store = EndingInTheSecondRound()
    joins(store, [(0, 3), (1, 4)])
    with pytest.raises(StoreLost) as caught:
        join(store, 2, 3, 5)
    assert "did not go on: world_size disagreement: rank" in caught.value.__notes__[-1]


class WithoutTheLastWord(HashStore):
    """The rank that is the last to count itself ends before it writes the verdict."""

    def add(self, key: str, amount: int) -> int:
        counted = super().add(key, amount)
        if key.endswith("count") and counted == 2:
            raise SystemExit
        return counted

    def compare_set(self, key: str, expected: Any, desired: Any) -> bytes:
        if "left: SystemExit" in str(desired):
            return b""
        return super().compare_set(key, expected, desired)


def test_a_round_that_its_last_rank_does_not_complete_is_completed_by_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(joining, "REPORT_SECONDS", 0.1)
    store = WithoutTheLastWord()
    first = threading.Thread(target=lambda: worlds.append(join(store, 0, 2, 10)), daemon=True)
    worlds: list[JoinedWorld] = []
    first.start()
    store.wait(["rendezvous/0/count"], 5)
    with pytest.raises(SystemExit):
        join(store, 1, 2, 10)
    first.join(10)
    assert [member.rank for member in worlds[0].members] == [0, 1]
