"""Refuse the words and calls that docs/design/style.md lists: those that are not the field's, and those that hang."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
STYLE = "docs/design/style.md"
WORDS, CALLS = "## Words", "## Calls that procgroup does not make"
_ROW = re.compile(r"\| (`.*`) \| ([^|]*) \|")
PLACES = ("src/**/*.py", "native/**/*.?pp", "tests/**/*.py", "examples/*.py", "benchmarks/*.py", "README.md")
PLACES += ("docs/*.md", "docs/design/*.md", "docs/guide/*.md")
MAY_UNPICKLE = {
    "src/procgroup/launch/spawning/spawn.py",  # what the parent process wrote for its own children
    "src/procgroup/groups/pickling.py",  # what the program itself sends by object operations
    "src/procgroup/launch/elastic.py",  # what the ranks that it started have left in its own folder
    "src/procgroup/launch/function_worker.py",  # what its parent process has left there
}


@cache
def rules(heading: str) -> dict[str, str]:
    """Return the patterns of the table below a heading, and what each row says."""
    section = (ROOT / STYLE).read_text().split(f"\n{heading}\n")[1].split("\n## ")[0]
    rows = [match for match in map(_ROW.fullmatch, section.splitlines()) if match]
    return {rf"\b{pattern}\b": row[2] for row in rows for pattern in re.findall("`(.*?)`", row[1].replace(r"\|", "|"))}


def refused(name: str, lines: list[str]) -> Iterator[str]:
    """Yield a line for each word of a file that is refused."""
    checks = [(pattern, reason, re.IGNORECASE) for pattern, reason in rules(WORDS).items()]
    if not name.startswith("tests/"):
        checks += [(pattern, reason, re.NOFLAG) for pattern, reason in rules(CALLS).items()]
    for number, line in enumerate(lines, start=1):
        if name == STYLE and _ROW.fullmatch(line):
            continue
        for pattern, reason, flags in checks:
            if "pickle" in pattern and name in MAY_UNPICKLE:
                continue
            if match := re.search(pattern, line, flags):
                yield f"{name}:{number}: {match.group()}: {reason}"


def main() -> int:
    files = {path.relative_to(ROOT).as_posix(): path for place in PLACES for path in ROOT.glob(place)}
    found = [line for name in sorted(files) for line in refused(name, files[name].read_text().splitlines())]
    print(*found, sep="\n", end="\n" if found else "")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
