"""Run one of accelerate's own test scripts as its wheel has it: own_script.py SCRIPT [--without TEST ...]."""

import argparse
import importlib
import os
from typing import Any

from client_report import DEVICE

if DEVICE == "cpu":  # a launcher alone would have accelerate look for GPUs, and take no backend
    os.environ["ACCELERATE_USE_CPU"] = "true"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("script")
    parser.add_argument("--without", nargs="+", default=[], help="tests in it that need GPUs")
    options = parser.parse_args()
    script = importlib.import_module(f"accelerate.test_utils.scripts.{options.script}")
    for function in options.without if DEVICE == "cpu" else []:
        assert callable(getattr(script, function))
        setattr(script, function, skip)
    script.main()


def skip(*arguments: Any) -> None:
    """Stand in for a test that is left out."""


if __name__ == "__main__":
    main()
