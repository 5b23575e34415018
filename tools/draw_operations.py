"""Draw what moves where in each operation: the SVG files of docs/operations.

    python tools/draw_operations.py            # write them
    python tools/draw_operations.py --check    # exit status 1 when a file is not what would be written

What is drawn stands in operation_pictures.py.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from drawing import draw
from operation_pictures import PICTURES

FOLDER = Path(__file__).resolve().parent.parent / "docs" / "operations"


def main(arguments: Sequence[str]) -> int:
    stale = []
    for name, picture in PICTURES.items():
        path, text = FOLDER / f"{name}.svg", draw(picture)
        if not path.exists() or path.read_text() != text:
            stale.append(path.name)
            if "--check" not in arguments:
                path.write_text(text)
    if stale and "--check" in arguments:
        print(f"draw again with tools/draw_operations.py: {', '.join(stale)}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
