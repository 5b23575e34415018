"""Pages that need nothing else: HTML with its style, its script and its data in it.

Every text of a record is escaped, because a program's name or a report may hold anything. Moreover a page forbids the
browser all but its own script and style, which it names by their hashes (Content-Security-Policy).
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterable, Sequence
from functools import cache
from html import escape
from pathlib import Path
from typing import Any

_HERE = Path(__file__).parent
STYLE = _HERE / "page.css"
TIMELINE_SCRIPTS = (_HERE / "calls.js", _HERE / "timeline.js", _HERE / "moving.js")

# JSON has these in texts only. A script element ends at "</script", whatever its type is.
_ESCAPES = str.maketrans({"<": r"\u003c", ">": r"\u003e", "&": r"\u0026"})


class Page:
    """A kind of page: its style, its script, and what it is allowed to do besides, such as "connect-src 'self'"."""

    def __init__(self, scripts: Sequence[Path], *, also_allowed: str = "") -> None:
        self._style, self._script = _text(STYLE), "".join(map(_text, scripts))
        self.policy: str = "; ".join(
            [
                "default-src 'none'",
                f"script-src {_hash(self._script)}",
                f"style-src {_hash(self._style)}",
                *([also_allowed] if also_allowed else []),
                "base-uri 'none'",
                "form-action 'none'",
            ]
        )

    def html(self, title: str, body: str, data: Any) -> str:
        """Return a page with this body, which is HTML, whose script finds ``data`` as JSON in the element "data"."""
        return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{self.policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(title)}</title>
<style>{self._style}</style>
</head>
<body>
{body}
<script type="application/json" id="data">{as_json(data)}</script>
<script>{self._script}</script>
</body>
</html>
"""


def as_json(data: Any) -> str:
    """Return the data as JSON that is safe inside of an HTML page, too."""
    return json.dumps(data, separators=(",", ":")).translate(_ESCAPES)


def table(label: str, headings: Iterable[str], rows: Iterable[str], *, numbers: Sequence[str] = ()) -> str:
    """Return a table that scrolls where it is too large, also by keys. The columns ``numbers`` are so aligned."""
    head = "".join(f'<th scope="col"{" class=number" if one in numbers else ""}>{one}</th>' for one in headings)
    body = "\n".join(rows)
    return (
        f'<div class="table {label}" tabindex="0" role="region" aria-labelledby="{label}"><table>\n'
        f"<thead><tr>{head}</tr></thead>\n<tbody>\n{body}\n</tbody></table></div>"
    )


@cache
def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def _hash(content: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}'"
