"""``procgroup doctor``: check this machine or, as the ranks of a job, all of its hosts; print what to change."""

from __future__ import annotations

import argparse
import json
import math
import socket
import sys
from collections.abc import Sequence

from procgroup.diagnostics.doctor import machine, variables
from procgroup.diagnostics.doctor.findings import DoctorReport, HostReport, Section, problem, wants_colours
from procgroup.errors import DistError

JOIN_SECONDS = 60.0
"""How long the ranks of a job may take to come together. A launcher starts them at the same time."""

FLAGS = {
    "--json": "print one JSON document in place of text",
    "--strict": "exit with status 1 for warnings, too",
    "--verbose": "of several hosts, print all findings, not only warnings and problems",
    "--timeout": f"how long the ranks of a job may take to come together (default: {JOIN_SECONDS:g} seconds)",
}

_EPILOG = """
As a rank of a job, with one or more ranks on each host, it also checks the hosts against each other, and rank 0 prints:
  procgroup run --nnodes=2 --node-rank=0 --master-addr=HOST --master-port=29500 -m procgroup doctor
Exit status: 0 without problems, 1 with problems (--strict: or warnings), 2 for wrong arguments.
"""


def main(arguments: Sequence[str]) -> int:
    """Check, print the report, and return the exit status."""
    options = _parser().parse_args(arguments)
    place = variables.place()
    if place.rank is None or place.world_size is None or place.world_size < 2:
        report: DoctorReport | None = DoctorReport([_this_host()])
    else:
        report = _check_job(place.rank, options.timeout)
    if report is None:  # rank 0 prints the report
        return 0
    if options.json:
        print(json.dumps(report.document(strict=options.strict), indent=1), flush=True)
    else:
        print(report.text(has_colours=wants_colours(sys.stdout), verbose=options.verbose), flush=True)
    return report.exit_status(strict=options.strict)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="procgroup doctor",
        description="Check this machine, and report problems with the changes that cure them.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    for flag in ("--json", "--strict"):
        parser.add_argument(flag, action="store_true", help=FLAGS[flag])
    parser.add_argument("-v", "--verbose", action="store_true", help=FLAGS["--verbose"])
    parser.add_argument("--timeout", type=_seconds, default=JOIN_SECONDS, metavar="SECONDS", help=FLAGS["--timeout"])
    return parser


def _seconds(given: str) -> float:
    seconds = float(given)
    if not 0 < seconds < math.inf:
        raise ValueError(given)
    return seconds


def _this_host(*, tries_port: bool = True) -> HostReport:
    return HostReport(socket.gethostname(), [], machine.sections(machine.checks(tries_port=tries_port)))


def _check_job(rank: int, seconds: float) -> DoctorReport | None:
    """Check the hosts of the job; return the report on rank 0, and on every rank that could not take part."""
    try:
        # Not above: they need NumPy and the native module, without which this machine can still be checked.
        from procgroup.diagnostics.doctor import comparison, job

        answers = job.check(seconds)
    except (DistError, ImportError, OSError, RuntimeError, ValueError) as error:
        return _report_of_failure(rank, error)
    return None if answers is None else comparison.report(answers)


def _report_of_failure(rank: int, error: Exception) -> DoctorReport:
    """Return the error and, on the first rank of each host, the checks of that host."""
    lines = [f"{type(error).__name__}: {error}", *getattr(error, "__notes__", ())]
    failure = problem(
        f"rank {rank} could not check the job: {' '.join(' '.join(lines).split())}",
        "The findings about the network and the environment of each host may show why",
    )
    # After a failed start rank 0 still hosts the store.
    hosts = [_this_host(tries_port=rank != 0)] if variables.is_first_on_host() else []
    return DoctorReport(hosts, [Section("Start", [failure])])
