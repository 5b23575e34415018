"""``procgroup doctor`` as a command, here."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterable
from typing import Any

import pytest

from procgroup.diagnostics.doctor import machine
from procgroup.diagnostics.doctor.findings import Level
from world import run_command

DOCTOR = [sys.executable, "-m", "procgroup", "doctor"]
SECTIONS = [*machine.checks()]

Done = subprocess.CompletedProcess[str]


def doctor(*arguments: str, **environment: str) -> Done:
    done = run_command([*DOCTOR, *arguments], environment=environment, timeout=50)
    assert "Traceback" not in done.stdout + done.stderr
    return done


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


@pytest.mark.parametrize("arguments", [["--jsno"], ["now"]])
def test_wrong_arguments_end_with_status_2(arguments: list[str]) -> None:
    assert doctor(*arguments).returncode == 2


def test_a_check_that_fails_itself_does_not_end_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails() -> list[Any]:
        raise ZeroDivisionError("no such file")

    first, second = machine.sections({"A": fails, "B": list})
    assert first.findings[0].text == "the check itself failed: ZeroDivisionError: no such file"
    assert second.findings == []
