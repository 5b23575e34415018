"""The fixture ``store``: a test that takes it runs on every kind of store."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from stores.store_kinds import KINDS, make_store

from procgroup.stores import PrefixStore, Store


@pytest.fixture(params=KINDS)
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    made = make_store(request.param, tmp_path)
    yield made
    while isinstance(made, PrefixStore):
        made = made.underlying_store
    made.close()
