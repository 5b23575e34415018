"""The report: text for people and for files, the JSON document, and the exit status."""

from __future__ import annotations

import json

import pytest

from procgroup.diagnostics.doctor.findings import DoctorReport, HostReport, Section, note, ok, problem, warning

FINE = Section("Limits", [ok("65536 open files are allowed"), note("nothing is locked")])
SLOW = Section("Memory", [ok("an arena can be made"), warning("/dev/shm has 64 MiB", "Make it larger")])
BROKEN = Section("Network", [problem("no loopback", "Start it")])


def test_each_finding_is_a_line_with_its_level_and_advice_is_below() -> None:
    shown = DoctorReport([HostReport("a", [], [SLOW, FINE])]).text()
    assert shown == "\n".join(
        [
            "a",
            "  Memory",
            "    ok       an arena can be made",
            "    warning  /dev/shm has 64 MiB",
            "             -> Make it larger",
            "  Limits",
            "    ok       65536 open files are allowed",
            "    note     nothing is locked",
            "",
            "0 problems, 1 warning",
        ]
    )


def test_nothing_wrong_is_said_so() -> None:
    assert DoctorReport([HostReport("a", [], [FINE])]).text().endswith("\nnothing is wrong")


def test_of_several_hosts_what_is_wrong_is_shown_once_with_their_names() -> None:
    hosts = [HostReport("a", [0], [SLOW]), HostReport("b", [1], [SLOW, FINE]), HostReport("c", [2], [BROKEN])]
    lines = DoctorReport(hosts, [FINE]).text().splitlines()
    assert lines[:4] == ["a, b", "  Memory", "    warning  /dev/shm has 64 MiB", "             -> Make it larger"]
    assert "c" in lines and "an arena can be made" not in "".join(lines)
    assert "all hosts, against each other" in lines and lines[-1] == "1 problem, 2 warnings"


def test_verbose_shows_all_findings_of_all_hosts() -> None:
    hosts = [HostReport("a", [0], [SLOW]), HostReport("b", [1], [SLOW])]
    assert DoctorReport(hosts).text(verbose=True).count("an arena can be made") == 2


def test_colours_are_only_around_the_levels() -> None:
    shown = DoctorReport([HostReport("a", [], [BROKEN])]).text(has_colours=True)
    assert "    \033[31mproblem\033[0m  no loopback\n" in shown and shown.count("\033") == 2


@pytest.mark.parametrize(
    ("sections", "status", "strict_status"), [([FINE], 0, 0), ([SLOW], 0, 1), ([BROKEN], 1, 1), ([SLOW, BROKEN], 1, 1)]
)
def test_problems_change_the_exit_status_and_warnings_only_if_strict(
    sections: list[Section], status: int, strict_status: int
) -> None:
    for made in (DoctorReport([HostReport("a", [], sections)]), DoctorReport([], sections)):
        assert (made.exit_status(strict=False), made.exit_status(strict=True)) == (status, strict_status)


def test_the_document_has_all_findings_and_reads_back() -> None:
    made = DoctorReport([HostReport("a", [0, 1], [SLOW])], [BROKEN], {"links": []})
    read = json.loads(json.dumps(made.document(strict=False)))
    assert read == {
        "format": 1,
        "exit_status": 1,
        "problems": 1,
        "warnings": 1,
        "hosts": [{"name": "a", "ranks": [0, 1], "sections": [SLOW.as_dict()]}],
        "between_hosts": [BROKEN.as_dict()],
        "measured": {"links": []},
    }
    assert Section.from_dict(read["hosts"][0]["sections"][0]) == SLOW
