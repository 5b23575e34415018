"""``procgroup doctor`` as a command: here, as the ranks of a job, and where ranks cannot come together."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from procgroup.diagnostics.doctor import machine
from procgroup.diagnostics.doctor.findings import Level
from world import free_port, run_command

DOCTOR = [sys.executable, "-m", "procgroup", "doctor"]
SECTIONS = [*machine.checks()]

Done = subprocess.CompletedProcess[str]


def doctor(*arguments: str, **environment: str) -> Done:
    done = run_command([*DOCTOR, *arguments], environment=environment)
    assert "Traceback" not in done.stdout + done.stderr
    return done


def run_doctor(ranks: int, *arguments: str, **environment: str) -> Done:
    launcher = [sys.executable, "-m", "procgroup", "run", "--log-prefix", "", "-n", str(ranks), "-m", "procgroup"]
    return run_command([*launcher, "doctor", *arguments], environment=environment)


def levels(sections: Iterable[dict[str, Any]], level: Level) -> list[str]:
    return [one["text"] for section in sections for one in section["findings"] if one["level"] == level]


def test_this_machine_is_checked_in_sections() -> None:
    done = doctor()
    headings = re.findall(r"^  (\w.*)$", done.stdout, re.MULTILINE)
    assert headings == SECTIONS and not done.stderr
    assert "an arena can be made" in done.stdout and "\033" not in done.stdout


def test_the_document_says_the_same_as_the_text() -> None:
    read = json.loads(doctor("--json").stdout)
    (host,) = read["hosts"]
    assert [section["name"] for section in host["sections"]] == SECTIONS
    assert read["problems"] == len(levels(host["sections"], Level.PROBLEM))
    assert not any("the check itself failed" in text for text in levels(host["sections"], Level.WARNING))


def test_a_problem_ends_with_status_1_and_the_way_out() -> None:
    done = doctor(RANK="1")
    assert done.returncode == 1
    assert re.search(r"problem  RANK=1 is set without WORLD_SIZE: .*\n +-> Start the program", done.stdout)


def test_a_warning_changes_the_status_only_if_strict() -> None:
    (problems,) = [json.loads(doctor("--json").stdout)["problems"]]
    if problems:
        pytest.skip("this machine has problems of its own")
    assert doctor(PROCGROUP_TRANSPORT="tcp").returncode == 0
    assert doctor("--strict", PROCGROUP_TRANSPORT="tcp").returncode == 1


@pytest.mark.parametrize("arguments", [["--jsno"], ["--timeout", "soon"], ["--timeout", "-1"], ["now"]])
def test_wrong_arguments_end_with_status_2(arguments: list[str]) -> None:
    assert doctor(*arguments).returncode == 2


def test_the_ranks_of_one_host_report_once() -> None:
    done = run_doctor(3, "--json")
    read = json.loads(done.stdout)
    (host,) = read["hosts"]
    assert host["ranks"] == [0, 1, 2] and [section["name"] for section in host["sections"]] == SECTIONS
    assert [section["name"] for section in read["between_hosts"]] == ["Ranks", "Versions", "Links"]
    assert {link["transport"] for link in read["measured"]["links"]} == {"shared memory"}
    assert done.returncode == read["exit_status"]


def test_ranks_that_share_no_memory_are_a_warning() -> None:
    read = json.loads(run_doctor(2, "--json", PROCGROUP_TRANSPORT="tcp").stdout)
    assert any("share no memory" in text for text in levels(read["between_hosts"], Level.WARNING))


def test_hosts_have_addresses_clocks_and_links() -> None:
    program = "import os, sys; os.environ['PROCGROUP_HOST_ID'] = os.environ['RANK']; "
    program += "from procgroup.__main__ import main; sys.exit(main(['doctor', '--json', *sys.argv[1:]]))"
    launcher = [sys.executable, "-m", "procgroup", "run", "--log-prefix", "", "-n", "2", "--no-python"]
    done = run_command([*launcher, sys.executable, "-c", program])
    read = json.loads(done.stdout)
    names = [host["name"] for host in read["hosts"]]
    assert len(names) == 2 and all("(rank " in name for name in names)
    assert [section["name"] for section in read["between_hosts"]][:3] == ["Ranks", "Versions", "Clocks"]
    assert [(link["source"], link["target"]) for link in read["measured"]["links"]] == [(*names,), (*names[::-1],)]
    assert list(read["measured"]["clock_offsets"]) == names[1:]
    assert abs(read["measured"]["clock_offsets"][names[1]]) < 1


def test_a_rank_that_cannot_join_checks_its_host_and_prints_the_error() -> None:
    place = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    done = doctor("--timeout", "0.5", **place)
    assert done.returncode == 1
    assert [*re.findall(r"^  (\w.*)$", done.stdout, re.MULTILINE)] == [*SECTIONS, "Start"]
    assert re.search(r"problem  rank 1 could not check the job: DistNetworkError: .*Connection refused", done.stdout)


def test_other_ranks_of_a_host_print_only_why_they_cannot_join() -> None:
    place = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "127.0.0.1"}
    done = doctor("--timeout", "0.5", MASTER_PORT=str(free_port()), **place)
    assert done.returncode == 1
    assert [*re.findall(r"^  (\w.*)$", done.stdout, re.MULTILINE)] == ["Start"]


def test_rank_0_names_the_ranks_that_do_not_come() -> None:
    place = {"RANK": "0", "WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    done = doctor("--timeout", "0.5", **place)
    assert done.returncode == 1 and "RendezvousTimeout" in done.stdout and "ranks 1, 2" in done.stdout
    assert "cannot listen there" not in done.stdout  # its own store does


def test_contradicting_variables_are_named_beside_the_error_of_the_start() -> None:
    done = doctor(RANK="0", WORLD_SIZE="2")
    assert done.returncode == 1
    assert "WORLD_SIZE=2 without MASTER_ADDR and MASTER_PORT" in done.stdout and "IncompleteEnvironment" in done.stdout


def test_without_numpy_the_machine_is_still_checked(tmp_path: Path) -> None:
    (tmp_path / "numpy.py").write_text("raise ImportError('numpy is broken here')\n")
    path = {"PYTHONPATH": str(tmp_path), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    done = run_command([*DOCTOR], environment={**path, "RANK": "0", "WORLD_SIZE": "2"})
    assert done.returncode == 1 and "numpy is broken here" in done.stdout and "Memory" in done.stdout
    assert "Traceback" not in done.stdout + done.stderr


def test_a_check_that_fails_itself_does_not_end_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails() -> list[Any]:
        raise ZeroDivisionError("no such file")

    first, second = machine.sections({"A": fails, "B": list})
    assert first.findings[0].text == "the check itself failed: ZeroDivisionError: no such file"
    assert second.findings == []
