"""Calls that are deferred keep their place: what a group is asked later is issued behind them."""

from __future__ import annotations

import functools
import threading
import time
from datetime import timedelta

import numpy as np
import pytest

from procgroup.backends import native
from procgroup.errors import DistBackendError, GroupDestroyed
from procgroup.groups import issue as states
from procgroup.groups.group import ProcessGroup
from procgroup.stores.hash import HashStore


@pytest.fixture
def group() -> ProcessGroup:
    return ProcessGroup(
        native.alone(name="gloo", group_name="7"),
        HashStore(),
        rank=0,
        members=[0],
        group_name="7",
        timeout=timedelta(seconds=1),
        backend_config="cpu:gloo",
    )


def test_a_later_call_waits_until_the_deferred_ones_are_issued(group: ProcessGroup) -> None:
    may_go, issued = threading.Event(), []

    def issue(number: int) -> None:
        assert may_go.wait(30)
        group.all_reduce(np.ones(1))  # a deferred call does not wait for itself
        issued.append(number)

    deferral = group.deferring()
    for number in range(3):
        deferral.defer(functools.partial(issue, number), 30.0, at_once=number > 0)
    assert group.name() == "gloo"  # what is no call does not wait
    threading.Timer(0.2, may_go.set).start()
    group.barrier()
    assert issued == [0, 1, 2]
    assert group.deferring() is deferral


def test_at_once_issues_from_the_caller_where_nothing_is_deferred(group: ProcessGroup) -> None:
    threads: list[int] = []
    group.deferring().defer(lambda: threads.append(threading.get_ident()), 1.0, at_once=True)
    assert threads == [threading.get_ident()]


def test_a_call_behind_one_that_is_never_issued_ends_in_an_error(
    group: ProcessGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(states, "_GRACE_SECONDS", 0.1)
    never = threading.Event()
    group.deferring().defer(functools.partial(never.wait, 30), 0.1)
    with pytest.raises(DistBackendError, match="all_reduce on group 7 .*: an earlier call was not issued"):
        group.all_reduce(np.ones(1))
    never.set()


def test_leaving_issues_what_is_deferred_and_later_calls_raise(group: ProcessGroup) -> None:
    issued: list[bool] = []

    def issue() -> None:
        time.sleep(0.1)
        group.barrier()
        issued.append(True)

    group.deferring().defer(issue, 5.0)
    group.shutdown()
    assert issued == [True]
    with pytest.raises(GroupDestroyed):
        group.deferring()


def test_abort_does_not_wait_for_what_is_deferred(group: ProcessGroup) -> None:
    deferral = group.deferring()
    aborted = threading.Event()
    seen: list[bool] = []
    deferral.defer(lambda: seen.append(aborted.wait(20)), 30.0)
    group.abort()
    aborted.set()
    assert deferral.is_aborted and False not in seen


def test_a_group_that_coalesces_defers_nothing(group: ProcessGroup) -> None:
    group.start_coalescing()
    with pytest.raises(ValueError, match="cannot be deferred while the group coalesces"):
        group.deferring()
    group.stop_coalescing()
    group.deferring()


def test_the_thread_ends_where_nothing_is_deferred_for_long(
    group: ProcessGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(states, "_IDLE_SECONDS", 0.05)
    threads: list[threading.Thread] = []
    for number in range(2):
        group.deferring().defer(lambda: threads.append(threading.current_thread()), 1.0)
        group.barrier()
        threads[number].join(10)
        assert not threads[number].is_alive()
