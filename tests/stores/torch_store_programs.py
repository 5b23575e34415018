"""Programs that use a TCPStore of PyTorch's, each of which returns what the store answered.

A program runs on PyTorch's own server and on ours, with clients of PyTorch's: both have to answer the same.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

SHORT = timedelta(milliseconds=50)


def outcome(call: Callable[..., Any], *args: Any) -> Any:
    """Return what the call returns, or the error that it raises, without addresses and stacks."""
    try:
        return call(*args)
    except Exception as error:
        return type(error).__name__, str(error).partition("\n")[0]


def settle(store: Any) -> None:
    """Wait until the server has done all that this client asked for: set, append and queue_push have no reply."""
    store.check([])


def set_and_get(store: Any, other: Any) -> list[Any]:
    for key, value in {
        "a": "text",
        "": "of the empty key",
        "b": b"\x00\xff\n",
        "c": "",
        "ü": "ß",
        "k" * 8000: "x",
    }.items():
        store.set(key, value)
    store.set("a", "text again")
    store.set("large", b"v" * 3_000_000)
    settle(store)
    return [other.get(key) for key in ("a", "", "b", "c", "ü", "k" * 8000, "large")]


def add(store: Any, other: Any) -> list[Any]:
    sums = [store.add("n", 5), other.add("n", -7), store.add("n", 0), store.add("new", 0), other.get("n")]
    for text in ["12", " 12", "+3", "-4", "12abc", "1.5"]:
        store.set("text", text)
        settle(store)
        sums.append(other.add("text", 1))
    for text in ["", "abc", "+-3", "99999999999999999999"]:
        store.set("text", text)
        settle(store)
        sums.append(outcome(other.clone().add, "text", 1))  # ends the connection
    return sums


def check(store: Any, other: Any) -> list[Any]:
    store.multi_set(["a", "b"], ["1", "2"])
    settle(store)
    return [other.check(keys) for keys in ([], ["a"], ["a", "b"], ["a", "missing"], ["missing"], ["a", "a"])]


def wait(store: Any, other: Any) -> list[Any]:
    store.multi_set(["a", "b"], ["1", "2"])
    settle(store)
    answers = [outcome(other.wait, keys, SHORT) for keys in ([], ["a"], ["a", "b", "a"], ["a", "missing"], ["missing"])]
    store.set("missing", "came late")
    return [*answers, other.get("missing"), outcome(other.wait, ["missing"], SHORT)]


def compare_set(store: Any, other: Any) -> list[Any]:
    cases = [("", "new"), ("other", "x"), ("new", "newer"), ("", "x"), ("newer", "")]
    answers = [store.compare_set("key", expected, desired) for expected, desired in cases]
    missing = store.compare_set("missing", "expected", "desired")
    return [*answers, missing, other.check(["missing"]), other.get("key")]


def delete_key(store: Any, other: Any) -> list[Any]:
    store.set("key", "value")
    settle(store)
    return [other.delete_key("key"), store.delete_key("key"), store.check(["key"]), outcome(store.wait, ["key"], SHORT)]


def keys(store: Any, other: Any) -> list[Any]:
    before = store.num_keys()
    store.multi_set(["a", "b/c"], ["1", "2"])
    store.add("n", 1)
    return [before, other.num_keys(), sorted(other.list_keys())]


def append(store: Any, other: Any) -> list[Any]:
    store.append("key", "begin")
    settle(store)
    other.append("key", b"\x00end")
    settle(other)
    store.append("empty", "")
    return [store.get("key"), store.get("empty")]


def multi(store: Any, other: Any) -> list[Any]:
    names = [f"key {number}" for number in range(2000)]
    store.multi_set(names, [str(number) * 20 for number in range(2000)])
    store.multi_set([], [])
    return [other.multi_get(names), other.multi_get([]), other.multi_get(["key 1", "key 1"])]


def queues(store: Any, other: Any) -> list[Any]:
    if not store.libuvBackend:
        return [outcome(store.queue_push, "q", "1"), outcome(store.queue_pop, "q"), outcome(store.queue_len, "q")]
    answers = [store.queue_len("q"), outcome(store.queue_pop, "q", False)]
    for value in ("first", b"second", ""):
        store.queue_push("q", value)
    settle(store)
    answers += [other.queue_len("q"), other.check(["q"]), other.num_keys(), other.list_keys(), other.delete_key("q")]
    answers += [other.queue_pop("q"), store.queue_pop("q"), other.queue_pop("q"), store.queue_len("q")]
    store.set_timeout(SHORT)
    return [*answers, outcome(store.queue_pop, "q")]


def barriers(store: Any, other: Any) -> list[Any]:
    alone = [outcome(store.barrier, "alone", size, SHORT) for size in (1, 0, -1)]
    late = [outcome(store.barrier, "pair", 2, SHORT), outcome(other.barrier, "pair", 2, SHORT), store.get("pair")]
    store.set("text", "abc")
    settle(store)
    return [*alone, *late, outcome(other.clone().barrier, "text", 2, SHORT)]


PROGRAMS = [set_and_get, add, check, wait, compare_set, delete_key, keys, append, multi, queues, barriers]
