"""Check the types of programs that use procgroup, with mypy and with pyright, and that all public types are known.

The programs are the documentation's, the examples and tests/annotations/idioms.py. Those of the documentation are
written to build/typed, each at the line at which it stands in its page, so that an error names the place to mend.
PyTorch and JAX need not be installed: where they are not, their types count as Any.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TYPED = ROOT / "build" / "typed"
# Not named by programs: torch's classes filled in, programs.
NOT_COMPLETE = ("procgroup.torch_plugin.", "procgroup.diagnostics.bench.peers.")
# What pyright says of a class that derives from one of torch.
OF_TORCH = re.compile("Type of metaclass unknown|Type of base class unknown")
PROGRAMS = ["build/typed", "examples", "tests/annotations/idioms.py"]

sys.path.insert(0, str(ROOT / "tests"))
from documentation.page_programs import programs  # noqa: E402 - the tests execute the same programs


def write_programs() -> None:
    """Write each program of the documentation to a file that is named for its page and line."""
    shutil.rmtree(TYPED, ignore_errors=True)
    TYPED.mkdir(parents=True)
    for program in programs():
        stem = "_".join(program.page.relative_to(ROOT).with_suffix("").parts).replace("-", "_")
        (TYPED / f"{stem}_{program.line}.py").write_text("\n" * (program.line - 1) + program.text)


def unknown_types(report: str) -> list[str]:
    """Return a line for each public name whose type pyright does not know or has to guess."""
    read = json.loads(report)
    if not any(read["typeCompleteness"]["exportedSymbolCounts"].values()):
        return [f"pyright --verifytypes: {found['message']}" for found in read["generalDiagnostics"]]
    return [
        f"{symbol['name']}: {'; '.join(found['message'] for found in symbol['diagnostics'])}"
        for symbol in read["typeCompleteness"]["symbols"]
        if symbol["isExported"]
        and (not symbol["isTypeKnown"] or symbol["isTypeAmbiguous"])
        # Without a message of its own the symbol contains another that has one.
        and symbol["diagnostics"]
        and not symbol["name"].startswith(NOT_COMPLETE)
        and not all(OF_TORCH.match(found["message"]) for found in symbol["diagnostics"])
    ]


def main() -> int:
    """Run the three checks at the same time; print what they find and return 1 if that is anything."""
    write_programs()
    pyright = [sys.executable, "-m", "pyright", "--pythonpath", sys.executable]
    commands = {
        "mypy": [sys.executable, "-m", "mypy", "--no-error-summary", *PROGRAMS],
        "pyright": [*pyright],
        "types": [*pyright, "--verifytypes", "procgroup", "--ignoreexternal", "--outputjson"],
    }
    # Where the package is installed for development, pyright finds its sources, and its py.typed, by the path alone.
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    running = {
        name: subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True)
        for name, command in commands.items()
    }
    output = {name: process.communicate()[0] for name, process in running.items()}
    found = [output[name] for name in ("mypy", "pyright") if running[name].returncode]
    found += unknown_types(output["types"])
    print(*found, sep="\n", end="\n" if found else "")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
