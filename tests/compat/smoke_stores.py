"""Smoke programs of the stores and the rendezvous, without a process group."""

from __future__ import annotations

import os
import tempfile
from datetime import timedelta
from unittest import mock

import pytest
from compat.registry import shows

import procgroup as dist
from procgroup.rendezvous import handlers


@shows("Store", ranks=0)
def every_store_is_a_store() -> None:
    assert isinstance(dist.HashStore(), dist.Store)


@shows("HashStore", ranks=0)
def hash_store() -> None:
    store = dist.HashStore()
    store.set("key", "value")
    assert store.get("key") == b"value"


@shows("TCPStore", "TCPStore.host", "TCPStore.port", ranks=0)
def tcp_store() -> None:
    server = dist.TCPStore("127.0.0.1", 0, 1, is_master=True)
    client = dist.TCPStore(server.host, server.port, 1, is_master=False)
    client.set("key", "value")
    assert server.get("key") == b"value"
    assert (client.host, client.port > 0) == ("127.0.0.1", True)


@shows("FileStore", "FileStore.path", ranks=0)
def file_store() -> None:
    with tempfile.TemporaryDirectory() as directory:
        path = os.path.join(directory, "store")
        store = dist.FileStore(path, 1)
        store.set("key", "value")
        assert dist.FileStore(path, 1).get("key") == b"value"
        assert store.path == path


@shows("PrefixStore", "PrefixStore.underlying_store", ranks=0)
def prefix_store() -> None:
    under = dist.HashStore()
    store = dist.PrefixStore("mine", under)
    store.set("key", "value")
    assert store.underlying_store is under
    assert under.get("mine/key") == b"value"


_METHODS = """
    add append barrier check clone compare_set delete_key get has_extended_api list_keys multi_get multi_set num_keys
    queue_len queue_pop queue_push set set_timeout timeout wait
"""


@shows(*(f"HashStore.{method}" for method in _METHODS.split()), ranks=0)
def store_methods() -> None:
    store = dist.HashStore()
    store.set_timeout(timedelta(seconds=20))
    assert store.timeout == timedelta(seconds=20)
    store.set("key", "value")
    assert store.num_keys() == 1
    assert store.clone().get("key") == b"value"
    assert (store.add("number", 2), store.add("number", 3)) == (2, 5)
    store.append("key", "s")
    assert store.get("key") == b"values"
    assert store.compare_set("key", "values", "other") == b"other"
    assert store.check(["key", "number"])
    assert not store.check(["nothing"])
    store.multi_set(["a", "b"], ["1", "2"])
    assert store.num_keys() == 4
    assert store.multi_get(["a", "b"]) == [b"1", b"2"]
    assert store.has_extended_api()
    assert sorted(store.list_keys()) == ["a", "b", "key", "number"]
    assert store.delete_key("a")
    store.queue_push("queue", "first")
    assert store.queue_len("queue") == 1
    assert store.queue_pop("queue") == b"first"
    store.barrier("meeting", 1, timedelta(seconds=20))
    with pytest.raises(dist.DistStoreError):
        store.wait(["nothing"], timedelta(milliseconds=1))
    with pytest.raises(dist.DistStoreError):
        store.barrier("lonely", 2, timedelta(milliseconds=1))


@shows("DistError", "DistStoreError", ranks=0)
def store_errors() -> None:
    for kind in (dist.DistError, dist.DistStoreError):
        with pytest.raises(kind):
            dist.HashStore().wait(["nothing"], timedelta(milliseconds=1))


@shows("QueueEmptyError", ranks=0)
def queue_empty_error() -> None:
    with pytest.raises(dist.QueueEmptyError):
        dist.HashStore().queue_pop("queue", block=False)


@shows("DistNetworkError", ranks=0)
def network_error() -> None:
    server = dist.TCPStore("127.0.0.1", 0, 1, is_master=True)
    with pytest.raises(dist.DistNetworkError):
        dist.TCPStore("127.0.0.1", server.port, 1, is_master=True)


@shows("rendezvous", ranks=0)
def rendezvous() -> None:
    with tempfile.TemporaryDirectory() as directory:
        store, rank, size = next(dist.rendezvous(f"file://{directory}/store", 0, 1))
        store.set("key", "value")
        assert (store.get("key"), rank, size) == (b"value", 0, 1)


@shows("register_rendezvous_handler", ranks=0)
def register_rendezvous_handler() -> None:
    with mock.patch.dict(handlers._handlers):  # other tests expect the known schemes only
        dist.register_rendezvous_handler("smoke", lambda url, **_: iter([(dist.HashStore(), 0, 1)]))
        _, rank, size = next(dist.rendezvous("smoke://anywhere"))
        assert (rank, size) == (0, 1)
