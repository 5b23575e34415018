"""Where agents meet, as ``--rdzv-endpoint`` says it."""

from __future__ import annotations

import time

import pytest

from procgroup.cluster.addresses import Endpoint, parse_endpoints
from procgroup.errors import DistNetworkError
from procgroup.launch.nodes import endpoints
from procgroup.launch.nodes.endpoints import find_store, use_server
from procgroup.stores import HashStore, addresses


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("host", ["host:29400"]),
        ("a, b:1,10.0.0.1", ["a:29400", "b:1", "10.0.0.1:29400"]),
        ("::1", ["[::1]:29400"]),
        ("[::1]", ["[::1]:29400"]),
        ("[fe80::1%eth0]:7", ["[fe80::1%eth0]:7"]),
    ],
)
def test_an_endpoint_without_a_port_has_the_default_one(text: str, expected: list[str]) -> None:
    assert [str(endpoint) for endpoint in parse_endpoints(text, 29400)] == expected


@pytest.mark.parametrize("text", ["", "a,,b", "host:port", "host:65536", ":29400"])
def test_what_is_no_endpoint_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="expected"):
        parse_endpoints(text, 29400)


def test_a_server_that_is_named_by_a_loopback_address_does_not_hide_where_others_reach_this_host() -> None:
    outward = addresses.outward_address()
    if outward is None:
        pytest.skip("this host has no way to others")
    servers = [Endpoint("localhost", 2379), Endpoint(outward, 2379)]
    assert use_server(HashStore, servers, lambda: False).address_here() == outward
    assert use_server(HashStore, servers[:1], lambda: False).address_here() == "127.0.0.1"


def test_a_host_name_without_an_address_is_said_while_it_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(endpoints, "say", said.append)
    deadline = time.monotonic() + 20
    with pytest.raises(DistNetworkError, match="no agent hosts the store at nowhere.invalid:1"):
        find_store([Endpoint("nowhere.invalid", 1)], lambda: bool(said) or time.monotonic() > deadline)
    assert said == ["the host name nowhere.invalid has no address here yet: check its spelling, or give an address"]
