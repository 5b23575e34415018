"""The fixture ``store``: a test that takes it runs on every kind of store."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from stores.store_kinds import ADDRESSES, KINDS, LACKS, make_store

import world
from database_servers import etcd_server, redis_server
from procgroup.stores import PrefixStore, Store


@pytest.fixture(scope="session")
def database_servers() -> Iterator[None]:
    """The servers of etcd and Redis that are installed, for all tests of a session."""
    with ExitStack() as servers:
        if not LACKS["etcd"]:
            port = world.free_port()
            servers.enter_context(etcd_server(_folder(servers), port))
            ADDRESSES["etcd"] = f"127.0.0.1:{port}"
        if not LACKS["redis"]:
            port = world.free_port()
            servers.enter_context(redis_server(_folder(servers), port))
            ADDRESSES["redis"] = f"redis://127.0.0.1:{port}"
        yield


def _folder(servers: ExitStack) -> Path:
    # In memory where that is possible: etcd waits for its disk at each change.
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    return Path(servers.enter_context(TemporaryDirectory(dir=memory)))


@pytest.fixture(params=KINDS)
def store(request: pytest.FixtureRequest, tmp_path: Path, database_servers: None) -> Iterator[Store]:
    made = make_store(request.param, tmp_path)
    yield made
    while isinstance(made, PrefixStore):
        made = made.underlying_store
    made.close()
