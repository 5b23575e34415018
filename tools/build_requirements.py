"""Print what builds the package, one requirement per word: for installations without build isolation."""

from __future__ import annotations

import tomllib
from pathlib import Path

settings = tomllib.loads((Path(__file__).resolve().parent.parent / "pyproject.toml").read_text())
print(*settings["build-system"]["requires"], "cmake", "ninja")
