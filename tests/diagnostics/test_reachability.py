"""Which addresses of a host are reached: listeners with tokens, and the outcomes of connections to them."""

from __future__ import annotations

import socket

import pytest

import two_hosts
from diagnostics.namespaces import block_connections_to, in_namespace
from procgroup.diagnostics.doctor.reachability import ANOTHER_HOST, REACHED, REFUSED, SILENT, Listener, Target, probe
from world import free_port


def test_a_listener_is_reached_by_its_token_by_everybody_who_asks() -> None:
    with Listener() as listener:
        target = Target("127.0.0.1", listener.port, listener.token)
        assert probe([target] * 20, 5) == [REACHED] * 20


def test_a_listener_of_another_host_at_the_same_address_is_told_apart() -> None:
    with Listener() as listener:
        assert probe([Target("127.0.0.1", listener.port, "0" * len(listener.token))], 5) == [ANOTHER_HOST]


def test_a_closed_listener_refuses() -> None:
    with Listener() as listener:
        pass
    assert probe([Target("127.0.0.1", listener.port, listener.token)], 5) == [REFUSED]


def test_a_program_that_says_nothing_or_too_little_is_no_listener() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        assert probe([Target("127.0.0.1", silent.getsockname()[1], "token")], 0.2) == [SILENT]


def test_the_outcomes_are_in_the_order_of_the_targets() -> None:
    with Listener() as listener:
        closed = Target("127.0.0.1", free_port(), listener.token)
        open_ = Target("127.0.0.1", listener.port, listener.token)
        assert probe([closed, open_, closed], 5) == [REFUSED, REACHED, REFUSED]
    assert probe([], 5) == []


def test_a_host_that_drops_connections_is_silent_and_still_connects_itself() -> None:
    if lack := two_hosts.lacks():
        pytest.skip(lack)
    with two_hosts.joined() as (first, second):
        if lack := block_connections_to(second):
            pytest.skip(lack)
        with in_namespace(first, Listener) as of_first, in_namespace(second, Listener) as of_second:
            to_first = Target(first.address, of_first.port, of_first.token)
            to_second = Target(second.address, of_second.port, of_second.token)
            nowhere = Target("192.168.99.9", of_second.port, of_second.token)
            assert in_namespace(second, lambda: probe([to_first], 5)) == [REACHED]
            assert in_namespace(first, lambda: probe([to_second, nowhere], 0.5)) == [SILENT, "Network is unreachable"]
