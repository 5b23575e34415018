"""The contract that every store keeps: the same results and the same errors, whatever keeps the keys."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from stores.store_kinds import MAKERS, large_size

from procgroup.errors import DistStoreError, QueueEmptyError, StoreLimitError, StoreTimeout
from procgroup.stores import HashStore, PrefixStore, Store
from procgroup.stores.store import MAX_KEY_BYTES, MAX_KEYS_PER_REQUEST
from procgroup.types import Timeout


def after(seconds: float, action: Callable[[], object]) -> threading.Timer:
    timer = threading.Timer(seconds, action)
    timer.start()
    return timer


# --- values ---


@pytest.mark.parametrize("value", [b"", b"x", b"\0\xff\n", "text", "straße", b"v" * 5000])
def test_a_value_comes_back_as_bytes(store: Store, value: str | bytes) -> None:
    store.set("key", value)
    assert store.get("key") == (value.encode() if isinstance(value, str) else value)


def test_a_large_value_comes_back(store: Store) -> None:
    value = b"w" * large_size(store)
    store.set("key", value)
    assert store.get("key") == value


@pytest.mark.parametrize("key", ["", "/", "a/b", "nul\0inside", "schlüssel", "鍵", " ", "k" * 1000])
def test_a_key_may_be_any_text(store: Store, key: str) -> None:
    assert store.check([key]) is False
    store.set(key, "value")
    assert store.check([key]) is True
    assert store.get(key) == b"value"
    assert store.list_keys() == [key]
    assert store.delete_key(key) is True


def test_set_replaces(store: Store) -> None:
    store.set("key", "old and longer")
    store.set("key", "new")
    assert store.get("key") == b"new"
    assert store.num_keys() == 1


@pytest.mark.parametrize("value", [3, None, 1.5, ["x"], bytearray(b"x")])
def test_a_value_of_another_type_is_refused(store: Store, value: object) -> None:
    with pytest.raises(TypeError, match="str or bytes"):
        store.set("key", value)  # type: ignore[arg-type]
    assert store.check(["key"]) is False


@pytest.mark.parametrize("key", [3, None, b"key"])
def test_a_key_of_another_type_is_refused(store: Store, key: object) -> None:
    with pytest.raises(TypeError, match="expected key to be str"):
        store.set(key, "value")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="expected key to be str"):
        store.get(key)  # type: ignore[arg-type]


def test_a_key_that_is_too_long_is_refused_and_nothing_is_stored(store: Store) -> None:
    key = "k" * (MAX_KEY_BYTES + 1)
    with pytest.raises(StoreLimitError, match="a key of") as caught:
        store.set(key, "value")
    assert caught.value.limit == MAX_KEY_BYTES
    assert store.num_keys() == 0


def test_too_many_keys_in_one_request_are_refused(store: Store) -> None:
    with pytest.raises(StoreLimitError, match="a list of keys"):
        store.wait(["k"] * (MAX_KEYS_PER_REQUEST + 1))


def test_one_str_is_no_list_of_keys(store: Store) -> None:
    for method in (store.wait, store.check, store.multi_get):
        with pytest.raises(TypeError, match="sequence of str"):
            method("key")


# --- waiting ---


def test_get_waits_for_another_thread(store: Store) -> None:
    timer = after(0.1, lambda: store.set("late", "here"))
    assert store.get("late", timeout=10) == b"here"
    timer.join()


def test_wait_waits_for_all_keys(store: Store) -> None:
    timers = [after(0.05 * i, lambda i=i: store.set(f"k{i}", "")) for i in range(3)]
    store.wait(["k2", "k0", "k1"], timeout=10)
    assert store.check(["k0", "k1", "k2"])
    for timer in timers:
        timer.join()


def test_nothing_to_wait_for_is_there_at_once(store: Store) -> None:
    store.wait([])
    assert store.check([]) is True
    assert store.multi_get([]) == []


@pytest.mark.parametrize("limit", [0.2, timedelta(milliseconds=200)])
def test_get_of_a_missing_key_ends_at_its_timeout(store: Store, limit: float | timedelta) -> None:
    started = time.monotonic()
    with pytest.raises(StoreTimeout, match=r"^wait timeout after 200ms, keys: /.*nope\. Check the ranks") as caught:
        store.get("nope", limit)
    assert 0.2 <= time.monotonic() - started < 5
    assert caught.value.keys[0].endswith("nope")
    assert caught.value.seconds == 0.2


def test_the_timeout_of_wait_names_all_keys(store: Store) -> None:
    store.set("a", "")
    with pytest.raises(StoreTimeout, match=r"^wait timeout after 100ms, keys: /.*a, /.*zz, /.*yy\. "):
        store.wait(["a", "zz", "yy"], 0.1)


def test_a_timeout_of_zero_looks_once(store: Store) -> None:
    with pytest.raises(StoreTimeout):
        store.get("key", 0)
    store.set("key", "value")
    assert store.get("key", 0) == b"value"


def test_the_stores_own_timeout_is_300_seconds_and_can_be_set(store: Store) -> None:
    assert store.timeout == timedelta(seconds=300)
    store.set_timeout(0.1)
    assert store.timeout == timedelta(seconds=0.1)
    with pytest.raises(StoreTimeout, match="after 100ms"):
        store.get("nope")
    store.timeout = timedelta(seconds=0.05)
    with pytest.raises(StoreTimeout, match="after 50ms"):
        store.wait(["nope"])


@pytest.mark.parametrize(("timeout", "error"), [("1", TypeError), (True, TypeError), (-1, ValueError)])
def test_a_timeout_that_is_none_is_refused(store: Store, timeout: object, error: type[Exception]) -> None:
    with pytest.raises(error, match="timeout"):
        store.set_timeout(timeout)  # type: ignore[arg-type]
    with pytest.raises(error, match="timeout"):
        store.get("key", timeout)  # type: ignore[arg-type]


def test_a_waiting_thread_delays_no_other(store: Store) -> None:
    with ThreadPoolExecutor(8) as pool:
        waiting = [pool.submit(store.get, "late", 10) for _ in range(7)]
        started = time.monotonic()
        for i in range(20):
            store.set(f"k{i}", str(i))
        assert time.monotonic() - started < 5
        store.set("late", "x")
        assert [each.result() for each in waiting] == [b"x"] * 7


def test_a_timeout_does_not_disturb_what_follows(store: Store) -> None:
    for i in range(5):
        with pytest.raises(StoreTimeout):
            store.get(f"missing{i}", 0.01)
        store.set(f"k{i}", str(i))
        assert store.get(f"k{i}") == str(i).encode()
    store.set("missing0", "late")
    assert store.get("missing0") == b"late"


@pytest.mark.parametrize(
    "blocked",
    [
        lambda store: store.get("nope"),
        lambda store: store.wait(["nope"]),
        lambda store: store.multi_get(["nope"]),
        lambda store: store.queue_pop("nope"),
        lambda store: store.barrier("nope", 2),
    ],
    ids=["get", "wait", "multi_get", "queue_pop", "barrier"],
)
def test_ctrl_c_ends_a_blocked_call_within_two_seconds(store: Store, blocked: Callable[[Store], object]) -> None:
    pressed: list[float] = []

    def press() -> None:
        pressed.append(time.monotonic())
        os.kill(os.getpid(), signal.SIGINT)

    timer = threading.Timer(0.2, press)
    with pytest.raises(KeyboardInterrupt):
        timer.start()
        blocked(store)
    assert time.monotonic() - pressed[0] < 2
    timer.join()
    store.set("after", "works")
    assert store.get("after") == b"works"


# --- add, compare_set, append ---


def test_add_starts_at_zero_and_keeps_decimal_text(store: Store) -> None:
    assert store.add("n", 5) == 5
    assert store.add("n", -7) == -2
    assert store.get("n") == b"-2"
    store.set("n", "40")
    assert store.add("n", 2) == 42
    assert store.add("new", 0) == 0
    assert store.check(["new"])


@pytest.mark.parametrize("text", ["", "x", "1x", " 1", "1.0", "9" * 30, "+1", "-"])
def test_add_to_what_is_no_number_raises_and_changes_nothing(store: Store, text: str) -> None:
    store.set("n", text)
    with pytest.raises(DistStoreError, match="not a decimal number"):
        store.add("n", 1)
    assert store.get("n") == text.encode()


def test_add_beyond_64_bits_raises_and_changes_nothing(store: Store) -> None:
    assert store.add("n", 2**63 - 1) == 2**63 - 1
    with pytest.raises(DistStoreError, match="64 bits"):
        store.add("n", 1)
    assert store.get("n") == str(2**63 - 1).encode()
    with pytest.raises(ValueError, match="64 bits"):
        store.add("n", 2**63)
    with pytest.raises(TypeError):
        store.add("n", 1.5)  # type: ignore[arg-type]


def test_adds_of_many_threads_are_all_counted(store: Store) -> None:
    with ThreadPoolExecutor(4) as pool:
        sums = list(pool.map(lambda _: store.add("n", 1), range(200)))
    assert sorted(sums) == list(range(1, 201))


def test_compare_set(store: Store) -> None:
    assert store.compare_set("key", "other", "new") == b"other"
    assert store.check(["key"]) is False
    assert store.compare_set("key", "", "first") == b"first"
    assert store.get("key") == b"first"
    assert store.compare_set("key", "wrong", "second") == b"first"
    assert store.compare_set("key", b"first", b"second") == b"second"
    assert store.compare_set("key", "", "third") == b"second"


def test_compare_set_has_one_winner(store: Store) -> None:
    with ThreadPoolExecutor(4) as pool:
        seen = list(pool.map(lambda i: store.compare_set("leader", "", str(i)), range(16)))
    assert len(set(seen)) == 1


def test_append_starts_from_nothing(store: Store) -> None:
    store.append("key", "ab")
    store.append("key", b"\0c")
    assert store.get("key") == b"ab\0c"


def test_what_is_added_or_appended_ends_a_wait(store: Store) -> None:
    timers = [after(0.05, lambda: store.add("n", 1)), after(0.05, lambda: store.append("a", "x"))]
    assert store.multi_get(["n", "a"], 10) == [b"1", b"x"]
    for timer in timers:
        timer.join()


# --- many keys ---


def test_multi_set_and_multi_get_keep_the_order(store: Store) -> None:
    keys = [f"k{i}" for i in range(50)]
    store.multi_set(keys, [str(i) for i in range(50)])
    assert store.multi_get(keys[::-1]) == [str(i).encode() for i in range(50)][::-1]
    assert store.multi_get(["k1", "k1"]) == [b"1", b"1"]


def test_multi_set_of_unequal_lists_raises_and_stores_nothing(store: Store) -> None:
    with pytest.raises(DistStoreError, match="multiSet keys and values vectors must be of same size"):
        store.multi_set(["a", "b"], ["1"])
    assert store.num_keys() == 0


def test_multi_set_with_a_bad_value_stores_nothing(store: Store) -> None:
    with pytest.raises(TypeError):
        store.multi_set(["a", "b"], ["1", 2])  # type: ignore[list-item]
    assert store.num_keys() == 0


def test_multi_get_waits_for_all(store: Store) -> None:
    store.set("a", "1")
    timer = after(0.1, lambda: store.set("b", "2" * 100_000))
    assert store.multi_get(["a", "b"], 10) == [b"1", b"2" * 100_000]
    timer.join()
    with pytest.raises(StoreTimeout, match="keys: /.*a, /.*c"):
        store.multi_get(["a", "c"], 0.1)


def test_keys_are_counted_listed_and_deleted(store: Store) -> None:
    for key in ("a/1", "a/2", "b"):
        store.set(key, "")
    assert store.num_keys() == 3
    assert sorted(store.list_keys()) == ["a/1", "a/2", "b"]
    assert sorted(store.list_keys("a/")) == ["a/1", "a/2"]
    assert store.list_keys("none") == []
    assert store.delete_key("a/1") is True
    assert store.delete_key("a/1") is False
    assert store.num_keys() == 2
    assert store.check(["a/1"]) is False
    with pytest.raises(StoreTimeout):
        store.get("a/1", 0.05)


# --- queues ---


def test_a_queue_is_first_in_first_out(store: Store) -> None:
    for value in ("1", b"2", "3"):
        store.queue_push("q", value)
    assert store.queue_len("q") == 3
    assert [store.queue_pop("q") for _ in range(3)] == [b"1", b"2", b"3"]
    assert store.queue_len("q") == 0


def test_pop_of_an_empty_queue_raises_or_waits(store: Store) -> None:
    with pytest.raises(QueueEmptyError, match="^queue is empty$"):
        store.queue_pop("q", block=False)
    with pytest.raises(StoreTimeout, match="wait timeout after 100ms, keys: /.*q"):
        store.queue_pop("q", timeout=0.1)
    timer = after(0.1, lambda: store.queue_push("q", "late"))
    assert store.queue_pop("q", timeout=10) == b"late"
    timer.join()
    assert store.queue_len("q") == 0


def test_a_pop_that_timed_out_takes_nothing_later(store: Store) -> None:
    with pytest.raises(StoreTimeout):
        store.queue_pop("q", timeout=0.02)
    store.queue_push("q", "kept")
    assert store.queue_len("q") == 1
    assert store.queue_pop("q", block=False) == b"kept"


def test_a_queue_that_is_not_empty_is_a_key(store: Store) -> None:
    store.queue_push("q", "x")
    assert store.check(["q"]) is True
    store.wait(["q"], 1)
    assert store.num_keys() == 1
    assert store.list_keys() == ["q"]
    with pytest.raises(StoreTimeout):
        store.get("q", 0.05)
    store.queue_pop("q")
    assert store.check(["q"]) is False
    assert store.num_keys() == 0
    store.queue_push("q", "y")
    assert store.delete_key("q") is True
    assert store.queue_len("q") == 0


def test_every_item_of_a_queue_reaches_one_of_many_poppers(store: Store) -> None:
    with ThreadPoolExecutor(4) as pool:
        popped = [pool.submit(store.queue_pop, "q", True, 20) for _ in range(40)]
        for i in range(40):
            store.queue_push("q", str(i))
        assert Counter(each.result() for each in popped) == Counter(str(i).encode() for i in range(40))


# --- barrier ---


@pytest.mark.parametrize("size", [1, 2, 5])
def test_a_barrier_opens_for_all_and_can_be_used_again(store: Store, size: int) -> None:
    inside: list[int] = []

    def rank() -> None:
        for turn in range(3):
            inside.append(turn)
            store.barrier("b", size, 20)
            assert inside.count(turn) == size

    with ThreadPoolExecutor(size) as pool:
        for done in [pool.submit(rank) for _ in range(size)]:
            done.result()
    assert store.num_keys() == 0


def test_a_barrier_that_times_out_says_so_and_counts_nobody(store: Store) -> None:
    for _ in range(2):
        with pytest.raises(StoreTimeout, match=r"^barrier timeout after 100ms, key: .*b\. "):
            store.barrier("b", 2, 0.1)
    with ThreadPoolExecutor(2) as pool:
        for done in [pool.submit(store.barrier, "b", 2, 10) for _ in range(2)]:
            done.result()


def test_a_barrier_of_two_sizes_is_refused(store: Store) -> None:
    def enter_first() -> None:
        while True:  # until no call with the other size is just in the barrier
            try:
                return store.barrier("b", 2, 10)
            except StoreTimeout:
                raise
            except DistStoreError:
                continue

    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(enter_first)
        while True:
            try:
                store.barrier("b", 3, 0.05)
            except StoreTimeout:
                continue
            except DistStoreError as error:
                assert "world size 2" in str(error)
                assert "3" in str(error)
                break
        store.barrier("b", 2, 10)
        first.result()


def test_a_barrier_for_nobody_is_refused(store: Store) -> None:
    with pytest.raises(ValueError, match="world_size"):
        store.barrier("b", 0)


# --- clones and ends ---


def test_a_clone_sees_the_same_keys_and_keeps_the_timeout(store: Store) -> None:
    store.set_timeout(5)
    clone = store.clone()
    assert type(clone) is type(store)
    assert clone.timeout == timedelta(seconds=5)
    store.set("key", "1")
    assert clone.get("key") == b"1"
    clone.add("key", 1)
    assert store.get("key") == b"2"


def test_the_extended_api_is_there(store: Store) -> None:
    assert store.has_extended_api() is True


@pytest.mark.usefixtures("database_servers")
def test_a_closed_store_raises(tmp_path: Path) -> None:
    for make in MAKERS.values():
        with make(tmp_path) as store:
            store.set("key", "x")
        store.close()
        with pytest.raises(DistStoreError, match="closed"):
            store.get("key", 0.1)


def test_a_prefix_is_joined_with_a_slash() -> None:
    inner = HashStore()
    outer = PrefixStore("a", PrefixStore("b", inner))
    outer.set("key", "x")
    assert inner.list_keys() == ["b/a/key"]
    assert outer.list_keys() == ["key"]
    assert isinstance(outer.underlying_store, PrefixStore)
    assert outer.underlying_store.underlying_store is inner
    with pytest.raises(TypeError):
        PrefixStore("a", {})  # type: ignore[arg-type]


def test_a_forked_child_works_or_says_why_not_and_the_parent_goes_on(store: Store) -> None:
    store.set("key", "parent")
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            text = store.get("key", 5).decode()
            store.set("from child", text)
        except BaseException as error:
            text = type(error).__name__
        os.write(writer, text.encode())
        os._exit(0)
    os.close(writer)
    assert os.read(reader, 100) in (b"parent", b"ForkedProcessError")
    os.close(reader)
    os.waitpid(child, 0)
    store.set("key", "again")
    assert store.get("key") == b"again"
    with pytest.raises(StoreTimeout):
        store.get("nope", 0.05)


# --- against a model ---

_KEYS = st.sampled_from(["a", "b", ""])
_VALUES = st.binary(max_size=3)
_STEPS = st.one_of(
    st.tuples(st.just("set"), _KEYS, _VALUES),
    st.tuples(st.just("append"), _KEYS, _VALUES),
    st.tuples(st.just("compare_set"), _KEYS, _VALUES, _VALUES),
    st.tuples(st.just("delete_key"), _KEYS),
    st.tuples(st.just("add"), _KEYS, st.integers(-3, 3)),
    st.tuples(st.just("queue_push"), _KEYS, _VALUES),
    st.tuples(st.just("queue_pop"), _KEYS, st.just(False)),
    st.tuples(st.just("queue_len"), _KEYS),
    st.tuples(st.just("check"), st.lists(_KEYS, max_size=3)),
    st.tuples(st.just("num_keys")),
    st.tuples(st.just("get"), _KEYS, st.just(0)),
)


def _outcome(store: Store, step: tuple) -> object:
    try:
        return getattr(store, step[0])(*step[1:])
    except DistStoreError as error:
        return type(error)


@pytest.mark.usefixtures("database_servers")
@settings(
    max_examples=60,
    deadline=None,
    # How long it takes to think of a sequence says how busy the machine is.
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(steps=st.lists(_STEPS, max_size=25))
def test_all_stores_agree_on_every_sequence_of_calls(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple]
) -> None:
    path = tmp_path_factory.mktemp("model")
    stores = [make(path) for make in MAKERS.values()]
    try:
        for step in steps:
            outcomes = [_outcome(store, step) for store in stores]
            assert outcomes[1:] == outcomes[:-1], step
        assert len({tuple(sorted(store.list_keys())) for store in stores}) == 1
    finally:
        for store in stores:
            store.close()


# --- a key that ends a wait ---


def test_get_unless_returns_the_values_or_what_ends_the_wait(store: Store) -> None:
    store.multi_set(["a", "b"], ["1", "2"])
    assert store.get_unless(["a", "b"], "lost", 5) == [b"1", b"2"]
    timer = after(0.1, lambda: store.set("lost", "why"))
    assert store.get_unless(["a", "missing"], "lost", 10) == b"why"
    timer.join()
    assert store.get_unless(["b", "a"], "lost", 5) == [b"2", b"1"], "values that are there come first"


def test_get_unless_ends_when_the_last_key_comes_or_at_the_timeout(store: Store) -> None:
    timer = after(0.1, lambda: store.set("late", "value"))
    assert store.get_unless(["late"], "lost", 10) == [b"value"]
    timer.join()
    with pytest.raises(StoreTimeout) as caught:
        store.get_unless(["late", "never"], "lost", 0.1)
    assert caught.value.seconds == 0.1
    assert store.check(["lost"]) is False


class WithoutGetUnless(Store):
    """A store as a program may write it: with the methods that get_unless needs."""

    def __init__(self) -> None:
        self._keys = HashStore()
        self.set_timeout(5)

    def set(self, key: str, value: str | bytes) -> None:
        self._keys.set(key, value)

    def get(self, key: str, timeout: Timeout | None = None) -> bytes:
        return self._keys.get(key, timeout)

    def check(self, keys: Sequence[str]) -> bool:
        return self._keys.check(keys)

    def multi_get(self, keys: Sequence[str], timeout: Timeout | None = None) -> list[bytes]:
        return self._keys.multi_get(keys, timeout)

    def clone(self) -> WithoutGetUnless:
        return self


def test_get_unless_works_on_a_store_that_does_not_have_its_own() -> None:
    store = WithoutGetUnless()
    timer = after(0.1, lambda: store.set("lost", "why"))
    assert store.get_unless(["missing"], "lost", 10) == b"why"
    timer.join()
    with pytest.raises(StoreTimeout):
        store.get_unless(["missing"], "never", 0.1)


def test_with_timeout_is_a_view_of_the_same_keys(store: Store) -> None:
    view = store.with_timeout(0.1)
    view.set("key", "value")
    assert store.get("key") == b"value"
    assert store.timeout == timedelta(seconds=300)
