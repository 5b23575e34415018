"""The network of one host: interfaces, loopback, its own name, and MASTER_ADDR:MASTER_PORT."""

from __future__ import annotations

import socket
from collections.abc import Iterator, Sequence

import pytest

import two_hosts
from diagnostics.made_up_system import one, texts
from diagnostics.namespaces import in_namespace
from procgroup.diagnostics.doctor import interfaces, network
from procgroup.diagnostics.doctor.findings import Finding, Level
from world import free_port


def no_address(name: str, seconds: float) -> Sequence[str]:
    return []


def own_name(addresses: Sequence[str], seconds: float) -> Finding:
    """Return the finding about a name that a resolver answers after so many seconds of a made-up clock."""
    times = iter((0.0, seconds))
    return network.own_name("host", lambda name, limit: addresses, lambda: next(times))


@pytest.mark.parametrize(
    ("addresses", "seconds", "level", "text"),
    [
        (["10.0.0.5"], 0.01, Level.OK, "leads to 10.0.0.5"),
        (["127.0.1.1"], 0.01, Level.NOTE, "which no other host reaches"),
        (["10.0.0.5"], 2.0, Level.WARNING, "after 2.0 s"),
        ([], 0.01, Level.WARNING, "has no address (procgroup does not need it"),
        ([], 5.0, Level.WARNING, "has no address after 5.0 s"),
    ],
)
def test_the_own_name_has_an_address_soon(addresses: list[str], seconds: float, level: Level, text: str) -> None:
    found = own_name(addresses, seconds)
    assert found.level is level and text in found.text


def test_this_host_reaches_itself() -> None:
    assert network.loopback().level is Level.OK


def test_a_master_without_address_is_a_problem() -> None:
    found = one(network.master_address({"MASTER_ADDR": "nowhere"}, no_address), Level.PROBLEM)
    assert found.text == "MASTER_ADDR=nowhere has no address"


def master(port: int, **environment: str) -> list[Finding]:
    return list(network.master_port({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), **environment}))


@pytest.fixture
def taken() -> Iterator[int]:
    """A port of this host at which a program listens."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def test_rank_0_can_listen_at_a_free_port() -> None:
    assert one(master(free_port()), Level.OK).text.endswith("is this host, and rank 0 can listen there")


def test_a_port_of_another_program_is_a_problem_for_rank_0(taken: int) -> None:
    assert "another program listens there" in one(master(taken), Level.PROBLEM).text


@pytest.mark.parametrize("environment", [{"RANK": "1"}, {"RANK": "0", "PROCGROUP_STORE": "127.0.0.1:1"}])
def test_a_port_of_the_launcher_or_of_rank_0_is_fine(taken: int, environment: dict[str, str]) -> None:
    assert "listens there" in one(master(taken, **environment), Level.OK).text


def test_without_a_usable_port_nothing_is_tried() -> None:
    assert not list(network.master_port({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "http"}))


def test_the_interfaces_of_a_host_are_those_of_its_network_namespace() -> None:
    if lack := two_hosts.lacks():
        pytest.skip(lack)
    with two_hosts.joined() as hosts:
        found = {one.name: one for one in in_namespace(hosts[0], interfaces.addresses) if ":" not in one.address}
        assert found["cable"] == interfaces.Interface("cable", hosts[0].address, 24)
        assert found["lo"].is_loopback and not found["lo"].is_candidate and found["cable"].is_candidate
        assert in_namespace(hosts[0], lambda: interfaces.mtu("cable")) == 1500


def test_another_host_s_port_is_reached_refused_or_silent() -> None:
    if lack := two_hosts.lacks():
        pytest.skip(lack)
    with two_hosts.joined() as hosts:
        here, there = hosts
        with in_namespace(there, lambda: socket.create_server((there.address, 0))) as server:
            variables = {"MASTER_ADDR": there.address, "MASTER_PORT": str(server.getsockname()[1])}
            found = in_namespace(here, lambda: list(network.master_port(variables)))
            assert one(found, Level.OK).text.endswith("is another host, and a program listens there")
        found = in_namespace(here, lambda: list(network.master_port(variables)))
        assert "where no program listens yet" in one(found, Level.NOTE).text
        variables["MASTER_ADDR"] = "192.168.99.9"  # there is no route
        found = in_namespace(here, lambda: list(network.master_port(variables)))
        assert texts(found, Level.PROBLEM) == [
            f"MASTER_ADDR:MASTER_PORT, 192.168.99.9:{variables['MASTER_PORT']}, is another host, which is not reached: "
            "192.168.99.9: Network is unreachable"
        ]
