"""Print requirements of the package, one per word, for an installation in place, which pip must not resolve itself.

Without arguments: what builds procgroup, and what it needs. With names of dependency groups: their requirements.
"""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path

settings = tomllib.loads((Path(__file__).resolve().parent.parent / "pyproject.toml").read_text())
groups = settings["dependency-groups"]
if len(sys.argv) > 1:
    requirements = [requirement for name in sys.argv[1:] for requirement in groups[name]]
else:
    requirements = [*settings["build-system"]["requires"], "cmake", "ninja", *settings["project"]["dependencies"]]
print(*requirements)
