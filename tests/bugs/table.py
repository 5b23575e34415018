"""Print what each bug program leads to in each surrounding, and on torch.distributed with Gloo, as a table in Markdown.

::

    python tests/bugs/table.py                                        # some ten minutes on two cores
    python tests/bugs/table.py --programs dtype_differs stopped --surroundings network gloo
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bugs.bug import Bug, all_bugs
from bugs.surroundings import GLOO, SURROUNDINGS, Surroundings
from bugs.verdict import WORST_FIRST, Verdict, try_out

COLUMNS = {**SURROUNDINGS, GLOO.name: GLOO}
HEADINGS = {"torch": "PyTorch on procgroup", GLOO.name: "torch.distributed + Gloo"}

_surroundings = Surroundings()
_bugs = all_bugs()

Cell = tuple[str, str]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--programs", nargs="+", choices=_bugs, default=list(_bugs), metavar="PROGRAM")
    parser.add_argument("--surroundings", nargs="+", choices=COLUMNS, default=list(COLUMNS), metavar="SURROUNDING")
    parser.add_argument("--jobs", type=int, default=3, help="programs that run at the same time")
    options = parser.parse_args()
    columns = [name for name in options.surroundings if not _lacks(name)]
    cells = [(bug, name) for bug in options.programs for name in columns if name not in _bugs[bug].left_out]
    with ProcessPoolExecutor(options.jobs, multiprocessing.get_context("spawn")) as pool:
        verdicts = dict(zip(cells, pool.map(_try_out, cells), strict=True))
    for line in written([_bugs[name] for name in options.programs], columns, verdicts):
        print(line)


def _lacks(name: str) -> str:
    lack = COLUMNS[name].lacks()
    if lack:
        print(f"without {name}: {lack}", file=sys.stderr)
    return lack


def _try_out(cell: Cell) -> Verdict:
    bug, name = cell
    verdict = try_out(_bugs[bug], COLUMNS[name], _surroundings)
    print(f"{bug}, {name}: {verdict}", file=sys.stderr)
    return verdict


def written(bugs: Sequence[Bug], columns: Sequence[str], verdicts: dict[Cell, Verdict]) -> Iterator[str]:
    """Yield the lines of the table, of the number of each verdict below it, and of what is not as it should be."""
    yield f"| the bug | {' | '.join(HEADINGS.get(name, name) for name in columns)} |"
    yield "|---" * (len(columns) + 1) + "|"
    for bug in bugs:
        row = [verdicts.get((bug.name, name)) for name in columns]
        yield f"| {bug.sentence} (`{bug.name}`) | {' | '.join(str(verdict or '') for verdict in row)} |"
    for word in reversed(WORST_FIRST):
        counts = Counter(name for (_, name), verdict in verdicts.items() if verdict.word == word)
        if counts:
            yield f"| **{word}** | {' | '.join(str(counts[name]) for name in columns)} |"
    unnamed = Counter(name for (_, name), verdict in verdicts.items() if verdict.is_ok and not verdict.names_line)
    yield f"| **ok, but the guilty line is not named** | {' | '.join(str(unnamed[name]) for name in columns)} |"
    yield ""
    for (bug_name, name), verdict in verdicts.items():
        if not verdict.is_ok and name != GLOO.name:
            yield f"- `{bug_name}`, {name}: {verdict}: {' '.join(verdict.reason.split())}"


if __name__ == "__main__":
    main()
