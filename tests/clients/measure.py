"""Play the clients' programs, and write what came out of it to results/ and docs/clients.md.

    python tests/clients/measure.py                      # all clients
    python tests/clients/measure.py ignite torchmetrics-states --rounds 5   # a client, and one program of another
    python tests/clients/measure.py --page               # the page only, from the results there are

The ways of a program are interleaved, so that what else the machine does meets all of them; the table has medians.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from clients.client_programs import WAYS, Played, Program, clients, facts_of, play, programs, wrong_in
from clients.environment import CLIENTS, ROOT, version_of

from world import WorldTimeout

PAGE = ROOT / "docs" / "clients.md"
RESULTS = CLIENTS / "results"


def measure(client: str, asked: Sequence[str], rounds: int) -> bool:
    """Play a client's programs, or those that are asked for, and write down each; return whether all went well."""
    facts = facts_of(client)
    path = RESULTS / f"{client}.json"
    before = json.loads(path.read_text())["programs"] if path.exists() else {}
    rows = {program.name: before[program.name] for program in programs(client) if program.name in before}
    for program in programs(client):
        if client in asked or str(program) in asked:
            rows[program.name] = _row(program, rounds)
            versions = {package: version_of(client, package) for package in (facts["package"], "torch")}
            in_order = {one.name: rows[one.name] for one in programs(client) if one.name in rows}
            results = {"title": facts["title"], "versions": versions, "cores": os.cpu_count(), "programs": in_order}
            path.write_text(json.dumps(results, indent=2) + "\n")
    return not any(row["wrong"] for row in rows.values())


def _row(program: Program, rounds: int) -> dict[str, Any]:
    seconds: dict[str, list[float]] = {way: [] for way in program.ways}
    wrong: dict[str, str] = {}
    for _ in range(rounds):
        on_gloo: Played | None = None
        for way in program.ways:
            try:
                played = play(program, way)
            except WorldTimeout as late:
                played = Played(way, program.seconds, 1, str(late))
            if text := wrong_in(program, played, on_gloo):
                print(f"{program}, {way}: {text}", file=sys.stderr)
                wrong[way] = text.splitlines()[0].rstrip(":")
            seconds[way].append(played.seconds)
            on_gloo = on_gloo or played
    for way, taken in seconds.items():
        print(f"{program}, {way}: {wrong.get(way, 'passed')}, {' '.join(f'{one:.1f}' for one in taken)} s", flush=True)
    return {
        "what": program.what,
        "remarks": program.remarks,
        "rounds": rounds,
        "seconds": {way: round(statistics.median(taken), 1) for way, taken in seconds.items()},
        "wrong": wrong,
    }


def page() -> str:
    """Return docs/clients.md as the results have it."""
    lines = [_HEAD]
    for client in clients():
        path = RESULTS / f"{client}.json"
        if path.exists():
            lines += _section(json.loads(path.read_text()))
    return "\n".join(lines).rstrip("\n") + "\n"


def _section(results: dict[str, Any]) -> list[str]:
    versions = ", ".join(f"{package} {version}" for package, version in results["versions"].items())
    about = f"{versions}; {results['cores']} cores."
    head = " | ".join(["what is run", *WAYS.values(), "runs", "remarks"])
    rows = [
        " | ".join([row["what"], *(_cell(row, way) for way in WAYS), str(row["rounds"]), row["remarks"]])
        for row in results["programs"].values()
    ]
    rule = "|".join(["---"] * (len(WAYS) + 3))
    return [f"## {results['title']}", "", about, "", f"| {head} |", f"|{rule}|", *(f"| {row} |" for row in rows), ""]


def _cell(row: dict[str, Any], way: str) -> str:
    if way not in row["seconds"]:
        return "-"
    return f"{'failed' if way in row['wrong'] else 'passed'}, {row['seconds'][way]:.1f} s"


_HEAD = """\
# Programs that use torch.distributed

The libraries on this page are built on torch.distributed and run on procgroup without a change. `make test-all` runs
the programs below, each library in a separate environment, and compares their results with those on Gloo. It also
checks the class of every process group that they make, in every process, so that none is Gloo's. `-` means that the
program cannot be started in this way, for the reason in its remarks. tests/clients/measure.py writes this page.

Times include the start of Python and PyTorch in every process. Each is the median of the runs in the column "runs", on
an idle machine, with the ways in turn. Two sets of runs of one program differ by up to 10 %.

On stand-in GPUs, which compute on the CPU, results are within 1e-4 of those on Gloo. None of these programs has
[run on a GPU](nccl.md#what-has-run-on-a-gpu) with procgroup.
"""


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("clients", nargs="*", help="clients, or CLIENT-PROGRAM (default: all)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--page", action="store_true", help="only write the page from the results there are")
    asked = parser.parse_args(arguments)
    RESULTS.mkdir(exist_ok=True)
    chosen = [] if asked.page else asked.clients or clients()
    unknown = set(chosen) - {*clients(), *(str(program) for client in clients() for program in programs(client))}
    if unknown:
        parser.error(f"no such clients or programs: {', '.join(sorted(unknown))}")
    right = [measure(client, chosen, asked.rounds) for client in clients()]
    PAGE.write_text(page())
    return int(not all(right))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
