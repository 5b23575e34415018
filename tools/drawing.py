"""Two kinds of picture of an operation, drawn as SVG.

In a `Movement` the ranks stand side by side, their arrays before the call above those after it, and arrows lead
from what is read to where it goes; colour says whose data it was. In a `Timeline` each rank is a lane and time
runs to the right.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape

CELL, HEIGHT, LIST_GAP, RANK_GAP, MARGIN = 30, 28, 7, 34, 18
LABELS = 62
"""Room at the left for the words "before" and "after"."""
TOP, BELOW = 44, 150
"""Where the upper and the lower row of arrays begin."""

COLOURS = {
    "0": ("#d3e4f8", "#2b6cb0"),
    "1": ("#fde2c6", "#c05a0c"),
    "2": ("#d5edd2", "#2f7d32"),
    "3": ("#e7dbf3", "#6b3fa0"),
    "+": ("#fbf3b8", "#7a6a00"),
    "?": ("#ffffff", "#9aa0a6"),
}
"""Fill and line of a cell: those of a rank, of what is combined from several ranks, and of an unset element."""

Array = Sequence[str]
"""Cells such as "1:8": whose colour, and what is written in it; "?" alone is an element that nobody has set."""

Place = tuple[int, int, int]
"""A rank, one of its arrays, and a cell of it; -1 for the whole array."""


@dataclass(frozen=True)
class Movement:
    """Arrays of each rank before and after a call, and what goes from where to where."""

    title: str
    before: Sequence[Sequence[Array]]
    after: Sequence[Sequence[Array]]
    moves: Sequence[tuple[Place, Place]]
    names: Sequence[str] = ()
    """What stands above each rank; by default "rank 0", "rank 1", ..."""


@dataclass(frozen=True)
class Timeline:
    """Lanes with spans of time (start, end, colour, text), and messages (lane, time, lane, time)."""

    title: str
    lanes: Sequence[Sequence[tuple[float, float, str, str]]]
    messages: Sequence[tuple[int, float, int, float]] = ()
    names: Sequence[str] = ()
    together: float | None = None
    """A moment that is the same for all lanes, drawn as a line through them."""


def draw(picture: Movement | Timeline) -> str:
    """Return the SVG text of one picture; the same picture gives the same bytes."""
    body, width, height = _movement(picture) if isinstance(picture, Movement) else _timeline(picture)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
        f' role="img" font-family="Helvetica, Arial, sans-serif" font-size="13">',
        f"<title>{escape(picture.title)}</title>",
        f'<rect width="{width}" height="{height}" rx="8" fill="#ffffff" stroke="#d9dce1"/>',
        *body,
        "</svg>",
    ]
    return "\n".join(lines) + "\n"


def _movement(picture: Movement) -> tuple[list[str], int, int]:
    names = picture.names or [f"rank {rank}" for rank in range(len(picture.before))]
    widths = [
        max(_arrays_width(picture.before[rank]), _arrays_width(picture.after[rank]), 9 * len(name))
        for rank, name in enumerate(names)
    ]
    lefts = [LABELS + sum(widths[:rank]) + RANK_GAP * rank for rank in range(len(widths))]
    width = lefts[-1] + widths[-1] + MARGIN
    body = [_text(12, TOP + 19, "before", anchor="start", colour="#5f6368")]
    body.append(_text(12, BELOW + 19, "after", anchor="start", colour="#5f6368"))
    for name, left, room in zip(names, lefts, widths, strict=True):
        body.append(_text(left + room // 2, 26, name, weight="bold"))
    boxes: list[dict[Place, tuple[int, int]]] = []
    for top, rows in ((TOP, picture.before), (BELOW, picture.after)):
        found: dict[Place, tuple[int, int]] = {}
        for rank, arrays in enumerate(rows):
            left = lefts[rank] + (widths[rank] - _arrays_width(arrays)) // 2
            body += _arrays(arrays, rank, left, top, found)
        boxes.append(found)
    for source, target in picture.moves:
        line = COLOURS[_colour(picture.before, source)][1]
        body += _arrow(boxes[0][source], TOP + HEIGHT + 2, boxes[1][target], BELOW - 3, line)
    return body, width, BELOW + HEIGHT + MARGIN


def _arrays(
    arrays: Sequence[Array], rank: int, left: int, top: int, found: dict[Place, tuple[int, int]]
) -> Iterator[str]:
    """Draw the arrays of one rank, and note in ``found`` where each begins and ends."""
    for number, array in enumerate(arrays):
        begin = left
        for index, cell in enumerate(array):
            colour, _, text = cell.partition(":")
            fill, line = COLOURS[colour]
            room = _cell_width(cell)
            dashes = ' stroke-dasharray="3 3"' if colour == "?" else ""
            yield (
                f'<rect x="{left}" y="{top}" width="{room}" height="{HEIGHT}" fill="{fill}" stroke="{line}"{dashes}/>'
            )
            if text:
                yield _text(left + room // 2, top + 19, text)
            found[rank, number, index] = (left, left + room)
            left += room
        found[rank, number, -1] = (begin, left)
        left += LIST_GAP


def _arrow(source: tuple[int, int], top: int, target: tuple[int, int], bottom: int, colour: str) -> Iterator[str]:
    start, end = sum(source) // 2, sum(target) // 2
    bend = (bottom - top) // 2
    yield (
        f'<path d="M{start} {top} C{start} {top + bend} {end} {bottom - bend} {end} {bottom - 6}"'
        f' fill="none" stroke="{colour}" stroke-width="1.6"/>'
    )
    yield f'<path d="M{end - 4} {bottom - 8} L{end + 4} {bottom - 8} L{end} {bottom} Z" fill="{colour}"/>'


def _timeline(picture: Timeline) -> tuple[list[str], int, int]:
    names = picture.names or [f"rank {rank}" for rank in range(len(picture.lanes))]
    left = 22 + max(8 * len(name) for name in names)
    length = max(end for lane in picture.lanes for _, end, _, _ in lane)
    tops = [24 + 60 * lane for lane in range(len(names))]
    width, height = left + round(length) + MARGIN, tops[-1] + HEIGHT + 24
    body = []
    for name, top, lane in zip(names, tops, picture.lanes, strict=True):
        body.append(_text(12, top + 19, name, anchor="start", weight="bold"))
        for start, end, colour, text in lane:
            fill, line = COLOURS[colour]
            dashes = ' stroke-dasharray="3 3"' if colour == "?" else ""
            body.append(
                f'<rect x="{left + start:g}" y="{top}" width="{end - start:g}" height="{HEIGHT}" rx="3"'
                f' fill="{fill}" stroke="{line}"{dashes}/>'
            )
            body.append(_text(round(left + (start + end) / 2), top + 19, text, size=12))
    for source, sent, target, arrived in picture.messages:
        body += _message(left + sent, tops[source], left + arrived, tops[target])
    if picture.together is not None:
        x = left + picture.together
        body.append(f'<path d="M{x:g} 12 V{height - 12}" stroke="#202124" stroke-width="2" stroke-dasharray="6 3"/>')
    return body, width, height


def _message(start: float, source_top: int, end: float, target_top: int) -> Iterator[str]:
    down = target_top > source_top
    top, bottom = (source_top + HEIGHT, target_top) if down else (source_top, target_top + HEIGHT)
    tip = bottom - 2 if down else bottom + 2
    back = tip - 8 if down else tip + 8
    yield f'<path d="M{start:g} {top} L{end:g} {back}" fill="none" stroke="#202124" stroke-width="1.6"/>'
    yield f'<path d="M{end - 4:g} {back} L{end + 4:g} {back} L{end:g} {tip} Z" fill="#202124"/>'


def _text(
    x: float, y: float, text: str, anchor: str = "middle", weight: str = "", colour: str = "#202124", size: int = 0
) -> str:
    extra = (f' font-weight="{weight}"' if weight else "") + (f' font-size="{size}"' if size else "")
    return f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}" fill="{colour}"{extra}>{escape(text)}</text>'


def _cell_width(cell: str) -> int:
    return max(CELL, 14 + 7 * len(cell.partition(":")[2]))


def _arrays_width(arrays: Sequence[Array]) -> int:
    cells = sum(_cell_width(cell) for array in arrays for cell in array)
    return cells + LIST_GAP * max(0, len(arrays) - 1)


def _colour(rows: Sequence[Sequence[Array]], place: Place) -> str:
    rank, array, cell = place
    return rows[rank][array][max(cell, 0)].partition(":")[0]
