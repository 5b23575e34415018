"""The addresses at which ranks reach each other over TCP, also where a host's own name leads to its loopback."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import two_hosts
import world
from procgroup.backends.peer_network import Route, route_to
from procgroup.stores.addresses import listen
from procgroup.stores.hash import HashStore
from procgroup.stores.prefix import PrefixStore
from procgroup.stores.tcp import TCPStore

OWN_NAME = "procgroup-own-name"

PROGRAM = """
import os, numpy as np, procgroup as dist
dist.init_process_group(timeout=30)
number = np.array([dist.get_rank() + 1])
dist.all_reduce(number)
os.write(1, f"rank {dist.get_rank()} has {number[0]}\\n".encode())
dist.destroy_process_group()
"""


def test_a_store_without_a_host_leads_to_loopback() -> None:
    assert route_to(PrefixStore("a", HashStore())) == Route("127.0.0.1", "127.0.0.1", "127.0.0.1")


def test_the_route_to_a_store_on_loopback_is_loopback() -> None:
    with_name = TCPStore("localhost", 0, is_master=True)
    route = route_to(PrefixStore("a", with_name))
    assert route.host == "localhost" and route.local in ("127.0.0.1", "::1")


@contextmanager
def listening(route: Route) -> Iterator[str]:
    with listen(route.listening_host, 0) as listener:
        yield listener.getsockname()[0]


@pytest.mark.parametrize(
    ("host", "local", "where"),
    [
        ("127.0.0.1", "127.0.0.1", {"127.0.0.1"}),
        ("127.0.1.1", "127.0.0.1", {"127.0.0.1"}),
        ("localhost", "127.0.0.1", {"127.0.0.1"}),
        (OWN_NAME, "127.0.0.1", {"::", "0.0.0.0"}),
    ],
)
def test_a_rank_listens_beyond_its_host_only_where_the_store_s_host_has_a_name(
    host: str, local: str, where: set[str]
) -> None:
    with listening(Route(host, local, local)) as address:
        assert address in where


@pytest.mark.parametrize(
    ("local", "published", "expected"),
    [
        ("10.0.0.2", "127.0.0.1", "10.0.0.1"),
        ("10.0.0.2", "10.0.0.3", "10.0.0.3"),
        ("127.0.0.1", "127.0.0.1", "127.0.0.1"),
        ("127.0.0.1", "10.0.0.2", "10.0.0.2"),
        ("fd00::2", "::1", "10.0.0.1"),
    ],
)
def test_a_loopback_address_means_the_store_s_host(local: str, published: str, expected: str) -> None:
    assert Route("node1", "10.0.0.1", local).address_of(published) == expected


def test_two_hosts_meet_where_the_first_one_s_name_is_its_loopback(tmp_path: Path) -> None:
    if lack := two_hosts.lacks():
        pytest.skip(lack)
    for number, line in enumerate(("127.0.1.1", two_hosts.ADDRESSES[0])):
        (tmp_path / f"hosts{number}").write_text(f"127.0.0.1 localhost\n{line} {OWN_NAME}\n")
    port = str(world.free_port())
    place = {"MASTER_ADDR": OWN_NAME, "MASTER_PORT": port, "WORLD_SIZE": "3", "PROCGROUP_JOB_KEY": "ab" * 32}
    with two_hosts.joined() as hosts:
        processes = []
        for rank, number in enumerate((0, 0, 1)):
            own_file = 'mount --bind "$0" /etc/hosts && exec "$@"'
            inside = ["unshare", "--mount", "sh", "-c", own_file, str(tmp_path / f"hosts{number}")]
            command = hosts[number].command([*inside, sys.executable, "-c", PROGRAM])
            processes.append(
                subprocess.Popen(
                    command,
                    env={**os.environ, **place, "RANK": str(rank)},
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                )
            )
        ends = [process.communicate(timeout=120) for process in processes]
    assert [output for output, _ in ends] == [f"rank {rank} has 6\n" for rank in range(3)], ends
