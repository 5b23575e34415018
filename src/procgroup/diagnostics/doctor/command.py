"""``procgroup doctor``: check this machine; print what to change."""

from __future__ import annotations

import argparse
import json
import socket
import sys
from collections.abc import Sequence

from procgroup.diagnostics.doctor import machine
from procgroup.diagnostics.doctor.report import HostReport, Report, document, text, wants_colours

FLAGS = {"--json": "print one JSON document in place of text", "--strict": "exit with status 1 for warnings, too"}

_EPILOG = """
Exit status: 0 without problems, 1 with problems (--strict: or warnings), 2 for wrong arguments.
"""


def main(arguments: Sequence[str]) -> int:
    """Check, print the report, and return the exit status."""
    options = _parser().parse_args(arguments)
    report = Report([_this_host()])
    if options.json:
        print(json.dumps(document(report, strict=options.strict), indent=1), flush=True)
    else:
        print(text(report, has_colours=wants_colours(sys.stdout)), flush=True)
    return report.exit_status(strict=options.strict)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="procgroup doctor",
        description="Check this machine, and say what is wrong and what to change.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    for flag in ("--json", "--strict"):
        parser.add_argument(flag, action="store_true", help=FLAGS[flag])
    return parser


def _this_host() -> HostReport:
    return HostReport(socket.gethostname(), [], machine.sections(machine.checks()))
