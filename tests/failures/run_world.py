"""Run a world from the command line and print what became of it: ``python run_world.py FILE FUNCTION SIZE TIMEOUT``.

For tests that must change what a process sees of its machine before anything starts. Prints one line of JSON per
rank: exit code, value, error and output.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from world import attempt


def main(file: str, function: str, size: str, timeout: str) -> None:
    specification = importlib.util.spec_from_file_location(Path(file).stem, file)
    assert specification and specification.loader
    module = importlib.util.module_from_spec(specification)
    sys.modules[specification.name] = module
    specification.loader.exec_module(module)
    for outcome in attempt(getattr(module, function), int(size), timeout=float(timeout)):
        seen = {
            "exit_code": outcome.exit_code,
            "value": outcome.value,
            "error": f"{type(outcome.error).__name__}: {outcome.error}" if outcome.error else "",
            "output": outcome.output,
        }
        print(json.dumps(seen))


if __name__ == "__main__":
    main(*sys.argv[1:])
