"""The native table of requests and the methods of stores agree."""

from __future__ import annotations

import re

import pytest

from procgroup import _native
from procgroup.stores import EtcdStore, HashStore, PrefixStore, RedisStore, Store

_REQUESTS = [name for name in vars(_native.StoreRequests) if not name.startswith("_")]


def _parameters(name: str) -> list[str]:
    text = getattr(_native.StoreRequests, name).__doc__ or ""
    return re.findall(r"(\w+): ", text.partition("->")[0])


def test_the_table_has_the_requests_of_stores() -> None:
    assert {"set", "get", "queue_pop", "barrier", "get_unless"} <= set(_REQUESTS)
    assert not {"cancel", "set_on_disconnect", "wait_for_workers"} & set(_REQUESTS)


@pytest.mark.parametrize("name", _REQUESTS)
def test_a_method_of_stores_has_the_parameters_of_its_request(name: str) -> None:
    own = [each for each in getattr(Store, name).__annotations__ if each not in ("timeout", "return")]
    assert [*own, "seconds"] == _parameters(name)


@pytest.mark.parametrize("kind", [EtcdStore, RedisStore])
@pytest.mark.parametrize("name", _REQUESTS)
def test_a_store_on_a_database_server_has_the_method_itself(name: str, kind: type[Store]) -> None:
    assert getattr(kind, name) is not getattr(Store, name)


@pytest.mark.parametrize("kind", [HashStore, PrefixStore])
def test_other_stores_derive_the_methods_from_the_table(kind: type[Store]) -> None:
    own = {name for name in _REQUESTS if getattr(kind, name) is not getattr(Store, name)}
    assert own <= {"num_keys", "list_keys"}
