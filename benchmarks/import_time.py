"""Check that the package and its command line start quickly, and that neither loads NumPy or torch for it."""

from __future__ import annotations

import statistics
import subprocess
import sys
import time

RUNS = 20
IMPORT = """
import sys, time
start = time.perf_counter()
import procgroup
seconds = time.perf_counter() - start
loaded = [name for name in ("numpy", "torch") if name in sys.modules]
sys.exit(f"import procgroup loads {', '.join(loaded)}") if loaded else print(seconds)
"""


def import_seconds() -> float:
    """Return what ``import procgroup`` takes in a fresh interpreter, without the start of that interpreter."""
    return float(subprocess.run([sys.executable, "-c", IMPORT], check=True, capture_output=True, text=True).stdout)


def help_seconds() -> float:
    """Return what ``procgroup run --help`` takes, the interpreter's start and end included."""
    start = time.perf_counter()
    command = [sys.executable, "-m", "procgroup", "run", "--help"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - start


def main() -> int:
    """Print medians of 20 runs; return 1 when one is over its limit."""
    late = False
    for name, measure, limit in (
        ("import procgroup", import_seconds, 0.050),
        ("procgroup run --help", help_seconds, 0.200),
    ):
        median = statistics.median(measure() for _ in range(RUNS))
        late = late or median >= limit
        print(f"{name}: {median * 1000:.1f} ms, {'over' if median >= limit else 'under'} {limit * 1000:.0f} ms")
    return int(late)


if __name__ == "__main__":
    sys.exit(main())
