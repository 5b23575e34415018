"""The Python programs of the documentation, block by block: the tests execute them, `make check` checks their types."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Block:
    """A block of a page: its language, its text, and the number of the text's first line in the page."""

    page: Path
    language: str
    text: str
    line: int


def blocks(page: Path) -> Iterator[Block]:
    """Return the blocks of a page, from top to bottom."""
    content = page.read_text()
    for match in BLOCK.finditer(content):
        yield Block(page, match[1], match[2], content.count("\n", 0, match.start(2)) + 1)


def programs() -> Iterator[Block]:
    """Return the Python blocks of all pages. Each is a whole program: it imports and defines all that it uses."""
    for page in PAGES:
        yield from (block for block in blocks(page) if block.language == "python")
