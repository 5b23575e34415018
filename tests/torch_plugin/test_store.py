"""torch's stores behind procgroup's contract: what the ranks of a PyTorch program meet at."""

from __future__ import annotations

import signal
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from procgroup.errors import DistStoreError, QueueEmptyError, StoreTimeout
from world import free_port

pytestmark = pytest.mark.torch

KINDS = ["HashStore", "FileStore", "TCPStore", "PrefixStore"]


@pytest.fixture(params=KINDS)
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    import torch.distributed as dist

    from procgroup.torch_plugin.store import TorchStore

    made = {
        "HashStore": lambda: dist.HashStore(),
        "FileStore": lambda: dist.FileStore(str(tmp_path / "store"), 1),
        "TCPStore": lambda: dist.TCPStore("127.0.0.1", free_port(), 1, True),
        "PrefixStore": lambda: dist.PrefixStore("a", dist.PrefixStore("b", dist.HashStore())),
    }
    return TorchStore(made[request.param]())


def test_values_come_back_as_the_bytes_they_were(store: Any) -> None:
    for value in (b"", b"\0\xff\xc8 bytes", b"x" * 100_000):
        store.set("key", value)
        assert store.get("key") == value
    store.set("text", "grün")
    assert store.get("text") == "grün".encode()
    store.multi_set(["a", "b"], ["1", b"2"])
    assert store.multi_get(["b", "a"]) == [b"2", b"1"]


def test_numbers_are_added_and_values_compared(store: Any) -> None:
    assert store.add("count", 0) == 0
    assert store.add("count", 3) == 3
    assert store.add("count", -1) == 2
    assert store.compare_set("place", "", "mine") == b"mine"
    assert store.compare_set("place", "", "yours") == b"mine"
    assert store.compare_set("place", "mine", "ours") == b"ours"
    assert store.check(["place", "count"])
    assert not store.check(["place", "nowhere"])


def test_appended_bytes_follow_each_other(store: Any) -> None:
    store.append("list", "one,")
    store.append("list", b"two,")
    assert store.get("list") == b"one,two,"


def test_a_wait_ends_at_its_deadline_and_names_the_key(store: Any) -> None:
    started = time.monotonic()
    with pytest.raises(StoreTimeout, match="nowhere"):
        store.get("nowhere", 0.2)
    with pytest.raises(StoreTimeout, match="nowhere"):
        store.wait(["nowhere"], timedelta(seconds=0.2))
    assert 0.4 <= time.monotonic() - started < 5.0


def test_a_wait_ends_when_the_value_comes(store: Any) -> None:
    timer = threading.Timer(0.2, store.set, ("late", b"value"))
    timer.start()
    assert store.get("late", 10) == b"value"
    timer.join()


def test_ctrl_c_ends_a_wait(store: Any) -> None:
    timer = threading.Timer(0.2, lambda: signal.pthread_kill(threading.main_thread().ident, signal.SIGINT))
    started = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        timer.start()
        store.get("nowhere", 20)
    assert time.monotonic() - started < 10.0
    timer.join()


def test_a_barrier_lets_everybody_pass_once_all_are_there(store: Any) -> None:
    passed: list[int] = []

    def pass_twice() -> None:
        for _ in range(2):
            store.barrier("gate", 2, 10)
            passed.append(1)

    threads = [threading.Thread(target=pass_twice) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(passed) == 4
    with pytest.raises(StoreTimeout, match="gate"):
        store.barrier("gate", 2, 0.1)


@pytest.mark.parametrize("store", [kind for kind in KINDS if kind != "FileStore"], indirect=True)
def test_a_queue_is_emptied_in_order(store: Any) -> None:
    store.queue_push("queue", "first")
    store.queue_push("queue", "second")
    assert store.queue_len("queue") == 2
    assert store.queue_pop("queue") == b"first"
    assert store.queue_pop("queue", block=False) == b"second"
    with pytest.raises(QueueEmptyError, match="queue"):
        store.queue_pop("queue", block=False)
    with pytest.raises(StoreTimeout):
        store.queue_pop("queue", timeout=0.1)


def test_what_goes_wrong_at_a_queue_is_not_taken_for_an_empty_one() -> None:
    import torch.distributed as dist

    from procgroup.torch_plugin.store import TorchStore

    class Broken(dist.HashStore):  # type: ignore[misc]
        def queue_pop(self, key: str, block: bool = True) -> bytes:
            raise dist.DistNetworkError("connection reset by peer")

    store = TorchStore(Broken())
    store.queue_push("queue", "first")
    for block in (False, True):
        with pytest.raises(dist.DistNetworkError, match="reset"):
            store.queue_pop("queue", block, timeout=5)


def test_a_wait_at_a_queue_goes_on_when_another_process_takes_the_value_first() -> None:
    import torch.distributed as dist

    from procgroup.torch_plugin.store import TorchStore

    taken_by_another: list[bytes] = []

    class Contended(dist.HashStore):  # type: ignore[misc]
        """Another process takes the first value once this one has seen it; the second one is pushed after that."""

        def queue_pop(self, key: str, block: bool = True) -> bytes:
            if taken_by_another:
                return super().queue_pop(key, block)
            taken_by_another.append(super().queue_pop(key, block))
            try:
                return super().queue_pop(key, block)
            finally:
                super().queue_push(key, "second")

    store = TorchStore(Contended())
    store.queue_push("queue", "first")
    assert store.queue_pop("queue", timeout=60) == b"second"
    assert taken_by_another == [b"first"]


def is_of_files(store: Any) -> bool:
    """torch's FileStore answers True for every key that is to be deleted."""
    return type(store.underlying_store).__name__ == "FileStore"


def test_keys_are_counted_listed_and_deleted(store: Any) -> None:
    before = store.num_keys()  # those of torch itself
    for key in ("here/1", "here/2", "there"):
        store.set(key, "value")
    assert store.num_keys() == before + 3
    assert sorted(store.list_keys("here/")) == ["here/1", "here/2"]
    assert {"here/1", "here/2", "there"} <= set(store.list_keys())
    assert store.delete_key("here/1")
    assert is_of_files(store) or not store.delete_key("here/1")
    assert not store.check(["here/1"]) and store.check(["here/2"])


def test_lists_of_other_lengths_are_refused_and_nothing_is_stored(store: Any) -> None:
    with pytest.raises(DistStoreError, match="1 keys and 2 values"):
        store.multi_set(["key"], ["one", "two"])
    assert not store.check(["key"])


def test_a_clone_sees_the_same_keys_and_keeps_the_timeout(store: Any) -> None:
    store.set_timeout(7)
    clone = store.clone()
    assert clone.timeout == timedelta(seconds=7)
    clone.set("key", "value")
    assert store.get("key") == b"value"


def test_keys_and_values_of_other_types_are_refused(store: Any) -> None:
    with pytest.raises(TypeError):
        store.set(3, "value")
    with pytest.raises(TypeError):
        store.set("key", 3)
    with pytest.raises(TypeError):
        store.wait("key")


def test_the_address_of_the_store_is_found_through_all_prefixes() -> None:
    import torch.distributed as dist

    from procgroup.backends.peer_network import route_to
    from procgroup.torch_plugin.store import TorchStore

    store = dist.PrefixStore("a", dist.PrefixStore("b", dist.TCPStore("127.0.0.1", free_port(), 1, True)))
    assert route_to(TorchStore(store)).local == "127.0.0.1"
