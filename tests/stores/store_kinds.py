"""Every kind of store, by name, so that one contract is checked on all of them.

A test that makes stores of all kinds needs the fixture ``database_servers``; the fixture ``store`` has it.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from pathlib import Path

import pytest

import database_servers
from procgroup.stores import EtcdStore, FileStore, HashStore, PrefixStore, RedisStore, Store, TCPStore

ADDRESSES: dict[str, str] = {}
"""Where the servers of etcd and Redis listen, as their stores want to know it."""

_jobs = (f"{os.getpid()}-{number}" for number in itertools.count())


_ALL_MAKERS: dict[str, Callable[[Path], Store]] = {
    "hash": lambda path: HashStore(),
    "file": lambda path: FileStore(str(path / "store")),
    "tcp": lambda path: TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False),
    "etcd": lambda path: EtcdStore(ADDRESSES["etcd"], next(_jobs)),
    "redis": lambda path: RedisStore(ADDRESSES["redis"], next(_jobs)),
}
LACKS = {"etcd": database_servers.lacks_etcd(), "redis": database_servers.lacks_redis()}
MAKERS = {kind: make for kind, make in _ALL_MAKERS.items() if not LACKS.get(kind)}


def param(kind: str) -> object:
    """Return a kind as a parameter of a test that is skipped where the kind's server is not installed."""
    lack = LACKS.get(kind, "")
    return pytest.param(kind, marks=pytest.mark.skipif(bool(lack), reason=lack))


_PREFIXED = ("prefix-hash", "prefix-file", "prefix-tcp", "prefix-prefix-hash")
KINDS = [param(kind) for kind in (*_ALL_MAKERS, *_PREFIXED)]


def make_store(kind: str, path: Path) -> Store:
    if kind.startswith("prefix-"):
        inner = make_store(kind.removeprefix("prefix-"), path)
        inner.set("outside", "not of this prefix")
        return PrefixStore("inside", inner)
    return MAKERS[kind](path)


def large_size(store: Store) -> int:
    """Return the size of a value that is large for a store and within its limits."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return 1_500_000 if isinstance(store, EtcdStore) else 3_000_000
