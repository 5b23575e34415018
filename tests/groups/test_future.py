"""A future has torch's methods and those of concurrent.futures."""

from __future__ import annotations

import pytest

from procgroup.groups.future import Future


def test_a_value_can_be_waited_for_taken_and_passed_on() -> None:
    future = Future()
    doubled = future.then(lambda done: done.value() * 2)
    with pytest.raises(RuntimeError, match="no value yet"):
        future.value()
    future.set_result(21)
    assert (future.wait(), future.value(), doubled.wait()) == (21, 21, 42)
    assert future.then(lambda done: done.wait() + 1).value() == 22


def test_an_error_is_raised_wherever_the_value_is_asked_for() -> None:
    future = Future()
    following = future.then(lambda done: done.value())
    future.set_exception(KeyError("lost"))
    for ask in (future.wait, future.value, following.wait):
        with pytest.raises(KeyError):
            ask()
