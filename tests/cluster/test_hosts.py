"""Lists of hosts: what is read, and what is refused with the place where it stands."""

from __future__ import annotations

from pathlib import Path

import pytest

from procgroup.cluster.addresses import Host, parse_hosts, read_hostfile


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("", []),
        ("a:4,b:2", [Host("a", 4), Host("b", 2)]),
        ("a, me@b.example.org:2", [Host("a"), Host("me@b.example.org", 2)]),
        ("[fe80::1]:2,me@[::1]", [Host("fe80::1", 2), Host("me@::1")]),
        ("a:1,b:1,a:2", [Host("a", 3), Host("b", 1)]),
        ("a,a,a", [Host("a", 3)]),
    ],
)
def test_a_list_gives_each_host_its_processes_in_order(text: str, hosts: list[Host]) -> None:
    assert parse_hosts(text) == hosts


@pytest.mark.parametrize("text", ["a:0", "a:-1", "a:x", "a:", ":4", "a,,b", "::1", "-oProxyCommand=x", "a b:2", "a;b"])
def test_what_is_no_host_is_shown(text: str) -> None:
    with pytest.raises(ValueError, match="expected HOST"):
        parse_hosts(text)


def test_a_file_has_a_host_in_a_line_with_or_without_its_processes(tmp_path: Path) -> None:
    path = tmp_path / "hosts"
    path.write_text("# a rack\nnode1 slots=4\n\nnode2:2  # the small one\nnode3\n")
    assert read_hostfile(str(path)) == [Host("node1", 4), Host("node2", 2), Host("node3")]


@pytest.mark.parametrize("line", ["a slots=2 max_slots=4", "a slots=2 max-slots=4", "a:2"])
def test_files_of_open_mpi_and_mpich_are_read(line: str, tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text(f"{line}\n")
    assert read_hostfile(str(tmp_path / "hosts")) == [Host("a", 2)]


@pytest.mark.parametrize(
    "line", ["b slots=0", "b slots", "b max_slots=3", "b slots=2 max_slots=x", "b slots=1 c", "b:1 slots=2", "b:x"]
)
def test_a_line_that_is_none_is_shown_with_its_number(line: str, tmp_path: Path) -> None:
    path = tmp_path / "hosts"
    path.write_text(f"a\n{line}\n")
    with pytest.raises(ValueError, match=f"{path}, line 2: expected HOST"):
        read_hostfile(str(path))


def test_a_file_that_is_missing_or_names_nobody_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="cannot read the hosts"):
        read_hostfile(str(tmp_path / "none"))
    (tmp_path / "empty").write_text("# nobody\n")
    with pytest.raises(ValueError, match="names no host"):
        read_hostfile(str(tmp_path / "empty"))
