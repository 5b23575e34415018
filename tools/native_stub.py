"""Compare src/procgroup/_native.pyi with the stub that nanobind generates from the built module, or write it.

python tools/native_stub.py --check | --write
"""

from __future__ import annotations

import difflib
import importlib
import re
import subprocess
import sys
from pathlib import Path

from nanobind.stubgen import StubGen

STUB = Path(__file__).resolve().parent.parent / "src" / "procgroup" / "_native.pyi"


def generated() -> str:
    """Return the stub of the installed native module, formatted as the sources are."""
    generator = StubGen(importlib.import_module("procgroup._native"))
    generator.put(generator.module)
    ruff = [sys.executable, "-m", "ruff", "--quiet"]
    text = complete(generator.get())
    for step in (["check", "--fix", "--exit-zero"], ["format"]):
        command = [*ruff, *step, "--stdin-filename", str(STUB), "-"]
        text = subprocess.run(command, input=text, capture_output=True, text=True, check=True).stdout
    return text


def complete(text: str) -> str:
    """Give the generic types the arguments that mypy asks for and that C++ does not know."""
    for generic, arguments in {"Sequence": "Any", "list": "Any", "dict": "str, Any", "tuple": "Any, ..."}.items():
        text = re.sub(rf"(?<=[:>\[|] ){generic}\b(?!\[)", f"{generic}[{arguments}]", text)
    return re.sub(r"\nimport|\nfrom", r"\nfrom typing import Any\g<0>", text, count=1) if "Any" in text else text


def main() -> int:
    text = generated()
    if sys.argv[1:] == ["--write"]:
        STUB.write_text(text)
        return 0
    written = STUB.read_text() if STUB.exists() else ""
    if written == text:
        return 0
    sys.stdout.writelines(difflib.unified_diff(written.splitlines(True), text.splitlines(True), str(STUB), "generated"))
    print("\nThe stub differs from the native module: write it again with make format.")
    return 1


if __name__ == "__main__":
    sys.exit(main())
