"""The start of a group as one rank sees it through a store: here the ranks are objects of one thread."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from procgroup.errors import (
    CollectiveTimeout,
    DistError,
    DistNetworkError,
    DistStoreError,
    PeerFailed,
    PeerLost,
    StoreLost,
    StoreTimeout,
)
from procgroup.stores import HashStore, Store
from procgroup.stores.start_up import Member, StartUp


def member(rank: int, size: int = 3, hosts_store: bool = False) -> Member:
    return Member(rank, size, f"host{rank}", 100 + rank, f"nonce {rank}", hosts_store)


def start_up(store: Store, rank: int, limit: float = 5.0) -> StartUp:
    made = StartUp(store, member(rank), group="0", timeout=limit, deadline=time.monotonic() + limit)
    made.enter("start")
    made.set_members([member(each, hosts_store=each == 0) for each in range(3)])
    return made


def test_all_values_are_gathered_in_the_order_of_the_ranks() -> None:
    store = HashStore()
    for rank in (2, 0, 1):
        start_up(store, rank).store.set(f"stage/{rank}", str(rank))
    assert start_up(store, 0).gather("stage") == [b"0", b"1", b"2"]


def test_the_first_rank_that_gives_up_is_named_on_all_others() -> None:
    store = HashStore()
    first, second, third = (start_up(store, rank) for rank in range(3))
    second.report_failure(ValueError("no room"))
    third.report_failure(KeyError("too late"))
    for rank in (first, third):
        for wait in (lambda rank=rank: rank.gather("stage"), rank.raise_if_lost):
            with pytest.raises(PeerFailed, match=r"rank 1 failed: ValueError: no room \(host1 pid 101\)") as caught:
                wait()
            assert (caught.value.peer, caught.value.op, caught.value.rank) == (1, "init_process_group", rank.me.rank)


def test_a_rank_that_has_not_written_is_named_at_the_deadline_also_by_those_who_learn_it_from_others() -> None:
    store = HashStore()
    first, second, third = start_up(store, 0, 0.1), start_up(store, 1), start_up(store, 2)
    for rank in (first, second):
        rank.store.set(f"stage/{rank.me.rank}", "")
    time.sleep(0.1)
    with pytest.raises(CollectiveTimeout, match="rank 2: rank 2 is process 102 on host host2") as caught:
        first.gather("stage")
    assert caught.value.missing == (2,)
    first.report_failure(caught.value)
    with pytest.raises(CollectiveTimeout) as learnt:
        second.gather("stage")
    assert learnt.value.missing == (2,)
    with pytest.raises(PeerFailed, match="rank 0 failed: CollectiveTimeout"):
        third.gather("stage")  # it was late, and the others have gone


class Failing(HashStore):
    """A store of which every request fails."""

    def __init__(self, error: DistError) -> None:
        super().__init__()
        self.error = error

    def check(self, keys: object) -> bool:
        raise self.error

    def get_unless(self, keys: object, unless: object, timeout: object = None) -> list[bytes]:
        raise self.error


def test_the_end_of_the_store_is_the_end_of_the_rank_that_hosts_it() -> None:
    lost = StoreLost(host="127.0.0.1", port=1, reason="it closed the connection")
    with pytest.raises(
        PeerLost, match="lost rank 0 .pid 100.: its process on host host0, which hosts the store"
    ) as caught:
        start_up(Failing(lost), 2).gather("stage")
    assert caught.value.__cause__ is lost
    alone = StartUp(Failing(lost), member(1), group="0", timeout=1, deadline=time.monotonic() + 1)
    with pytest.raises(StoreLost) as unknown:
        alone.gather("stage")
    assert unknown.value.__notes__ == ["Rank 1 of 3 was in init_process_group."]


@pytest.mark.parametrize("from_the_deadline_on", [False, True])
def test_a_store_that_does_not_answer_is_named_by_the_rank_that_hosts_it(from_the_deadline_on: bool) -> None:
    silent = Failing(StoreTimeout(keys=["a"], seconds=1))
    if from_the_deadline_on:
        silent.get_unless = HashStore().get_unless  # type: ignore[method-assign]
    with pytest.raises(CollectiveTimeout) as caught:
        start_up(silent, 1, 0.1).gather("stage")
    assert caught.value.missing == (0,)
    assert "hosts the store, which does not answer" in caught.value.__notes__[0]
    alone = StartUp(silent, member(1), group="0", timeout=0.1, deadline=time.monotonic())
    with pytest.raises(DistStoreError, match="the store has not answered within"):
        alone.gather("stage")


class WithoutConnections(HashStore):
    """A store to which no further connection can be made."""

    def set_on_disconnect(self, key: str, value: str | bytes) -> Any:
        raise DistNetworkError("too many open files")


def test_a_connection_that_cannot_be_made_is_not_blamed_on_a_store_that_answers() -> None:
    with pytest.raises(DistNetworkError, match="too many open files"):
        start_up(WithoutConnections(), 1)
    silent = WithoutConnections()
    silent.check = Failing(StoreTimeout(keys=["a"], seconds=1)).check  # type: ignore[method-assign]
    with pytest.raises(DistStoreError, match="the store has not answered within"):
        start_up(silent, 1)


@pytest.mark.parametrize(
    "written",
    [
        b"",
        b"\xff\xfe",
        b"null",
        b"[]",
        b'"member"',
        b"{}",
        b'{"member": 3, "reason": "", "missing": []}',
        b'{"member": "{}", "reason": "", "missing": []}',
        json.dumps({"member": member(3).line(), "reason": "", "missing": []}).encode(),
        json.dumps({"member": member(-1).line(), "reason": "", "missing": []}).encode(),
        json.dumps({"member": member(1).line(), "reason": "", "missing": 3}).encode(),
        b"[" * 100_000,
    ],
)
def test_what_no_rank_wrote_is_an_error_that_says_so(written: bytes) -> None:
    store = HashStore()
    store.set("start/lost", written)
    with pytest.raises(DistStoreError, match="in a record that no rank of this job wrote"):
        start_up(store, 0).gather("stage")


def test_what_a_rank_wrote_is_shown_in_part() -> None:
    store = HashStore()
    record = {"member": member(1).line(), "reason": "x" * 10_000_000, "missing": []}
    store.set("start/lost", json.dumps(record))
    with pytest.raises(PeerFailed) as caught:
        start_up(store, 0).gather("stage")
    assert len(str(caught.value)) < 5000
