"""``procgroup run ... -m procgroup doctor`` on two hosts, which are network namespaces: the fault is named."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import two_hosts
from diagnostics.namespaces import block_connections_to
from documentation.page_programs import ROOT, blocks
from documentation.test_documentation import provide_commands
from procgroup.diagnostics.doctor.findings import Level
from procgroup.diagnostics.doctor.reachability import REACHED, SILENT
from two_hosts import Host
from world import free_port, run_command

PORT = 29500


@pytest.fixture
def hosts() -> Iterator[tuple[Host, Host]]:
    if lack := two_hosts.lacks():
        pytest.skip(lack)
    with two_hosts.joined() as made:
        yield made


def doctor(hosts: tuple[Host, Host], directory: Path, ranks: int = 2) -> tuple[dict[str, Any], list[int]]:
    """Start the command on both hosts; return the document, and the exit statuses of the launchers."""
    address = (f"--master-addr={hosts[0].address}", f"--master-port={PORT}")

    def start(node: int) -> subprocess.CompletedProcess[str]:
        flags = ("--nnodes=2", f"--node-rank={node}", f"--nproc-per-node={ranks}", "--log-prefix=", *address)
        command = [sys.executable, "-m", "procgroup", "run", *flags, "-m", "procgroup", "doctor", "--json"]
        key = {"PROCGROUP_JOB_KEY": "ab" * 16}
        return run_command(hosts[node].command(command), directory=directory, environment=key, timeout=250)

    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(start, range(2))
    assert second.stdout == "" and "Traceback" not in first.stderr + second.stderr, first.stderr + second.stderr
    return json.loads(first.stdout), [first.returncode, second.returncode]


def test_the_page_s_lines_print_what_the_page_shows(hosts: tuple[Host, Host], tmp_path: Path) -> None:
    provide_commands(tmp_path)
    (block,) = (block.text for block in blocks(ROOT / "docs" / "doctor.md") if block.text.startswith("host1$"))
    lines = re.findall(r"^host([12])\$ (.*)\n((?:(?!host).+\n)*)", block, re.MULTILINE)
    environment = {"PATH": f"{tmp_path}/bin:{os.environ['PATH']}", "PROCGROUP_JOB_KEY": "ab" * 16}

    def start(line: tuple[str, str, str]) -> None:
        host, command, expected = line
        inside = hosts[int(host) - 1].command(["bash", "-c", command])
        done = run_command(inside, directory=tmp_path, environment=environment, timeout=250)
        # On a busy machine other messages than the largest may be the fastest, and then their size is printed; below
        # 0.1 GB/s the unit is MB/s.
        printed = re.sub(r" \(messages of [^)]*\)", "", done.stdout).replace(" MB/s", " GB/s")
        for shown in expected.splitlines():
            pattern = ".*".join(map(re.escape, shown.split("...")))
            assert re.search(f"^{pattern}$", printed, re.MULTILINE), f"{shown!r} is not in {printed}"

    assert len(lines) == 2
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(start, lines))


def findings(read: dict[str, Any], section: str, level: Level) -> list[str]:
    (found,) = [one["findings"] for one in read["between_hosts"] if one["name"] == section]
    return [one["text"] for one in found if one["level"] == level]


def test_two_hosts_that_reach_each_other_have_links_both_ways(hosts: tuple[Host, Host], tmp_path: Path) -> None:
    read, statuses = doctor(hosts, tmp_path)
    first, second = (host["name"] for host in read["hosts"])
    assert statuses == [read["exit_status"]] * 2
    assert [host["ranks"] for host in read["hosts"]] == [[0, 1], [2, 3]]
    assert read["measured"]["reached"] == {
        first: {second: {hosts[1].address: REACHED}},
        second: {first: {hosts[0].address: REACHED}},
    }
    links = {(link["source"], link["target"]): link["transport"] for link in read["measured"]["links"]}
    assert links[first, second] == links[second, first] == "tcp"
    assert links[first, first] == links[second, second] == "shared memory"
    assert not findings(read, "Reachability", Level.PROBLEM) and not findings(read, "Links", Level.PROBLEM)


def test_an_address_that_both_hosts_have_is_not_taken_for_the_other_host(
    hosts: tuple[Host, Host], tmp_path: Path
) -> None:
    for host in hosts:
        for command in ("link add docker0 type bridge", "addr add 172.17.0.1/16 dev docker0", "link set docker0 up"):
            done = subprocess.run(host.command(["ip", *command.split()]), capture_output=True, text=True)
            if done.returncode:
                pytest.skip(f"ip {command}: {done.stderr.strip()}")
    read, _ = doctor(hosts, tmp_path, ranks=1)
    first, second = (host["name"] for host in read["hosts"])
    outcomes = read["measured"]["reached"][first][second]
    assert outcomes[hosts[1].address] == REACHED and outcomes["172.17.0.1"] != REACHED
    assert not findings(read, "Reachability", Level.PROBLEM)


def test_a_host_that_cannot_be_connected_to_is_named(hosts: tuple[Host, Host], tmp_path: Path) -> None:
    if lack := block_connections_to(hosts[1]):
        pytest.skip(lack)
    read, statuses = doctor(hosts, tmp_path)
    first, second = (host["name"] for host in read["hosts"])
    assert statuses == [1, 1]
    assert read["measured"]["reached"] == {
        first: {second: {hosts[1].address: SILENT}},
        second: {first: {hosts[0].address: REACHED}},
    }
    (text,) = findings(read, "Reachability", Level.PROBLEM)
    assert text.startswith(f"{first} cannot connect to {second} at any address: {hosts[1].address} (cable): no answer")
    assert text.endswith(f"{second} does connect to {first}, so one direction is blocked")
    assert not findings(read, "Links", Level.PROBLEM)


def test_a_host_that_does_not_reach_rank_0_says_so_before_it_gives_up(hosts: tuple[Host, Host], tmp_path: Path) -> None:
    done = run_on(hosts[1], tmp_path, MASTER_ADDR="192.168.99.9")
    assert done.returncode == 1
    assert "192.168.99.9: Network is unreachable" in done.stdout and "rank 1 could not check the job" in done.stdout


def test_a_host_without_loopback_is_a_problem(hosts: tuple[Host, Host], tmp_path: Path) -> None:
    subprocess.run(hosts[0].command(["ip", "link", "set", "lo", "down"]), check=True)
    done = run_command(hosts[0].command([sys.executable, "-m", "procgroup", "doctor"]), directory=tmp_path)
    assert done.returncode == 1
    assert "this host does not reach itself at 127.0.0.1" in done.stdout and "ip link set lo up" in done.stdout


def run_on(host: Host, directory: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the command as rank 1 of 2 on one host."""
    place = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_PORT": str(free_port()), **environment}
    command = [sys.executable, "-m", "procgroup", "doctor", "--timeout", "1"]
    return run_command(host.command(command), directory=directory, environment=place)
