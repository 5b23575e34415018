"""Run tests many times beside programs that hold the cores, and list those that fail.

::

    python tests/under_load.py --times 30 tests/groups tests/failures/test_exit.py
    python tests/under_load.py --times 10 tests/stores -x --tb=short           # what it does not know goes to pytest
    python tests/under_load.py --times 10 --make test                          # the whole of `make test`, ten times

There is one such program for each core. It has a higher priority than the tests, and takes its core for up to 0.25 s
time and again, with pauses of up to 0.25 s. A test that fails here and passes alone waits for time to pass, or has a
deadline that a busy machine cannot meet; or it has found a race.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import os
import random
import re
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

NICER = 10
"""By how much the tests give way: beside a program that holds it they get a tenth of a core."""
LONGEST = 0.25


class Rounds:
    """A plug-in of pytest: each test runs ``times`` times, one after the other; what fails is counted."""

    def __init__(self, times: int) -> None:
        self.times = times
        self.reasons: dict[str, Counter[str]] = defaultdict(Counter)
        self.seconds: Counter[str] = Counter()
        """The longest run of each test."""

    @pytest.fixture
    def number_of_the_round(self, request: pytest.FixtureRequest) -> int:
        return int(request.param)

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        metafunc.fixturenames.append("number_of_the_round")
        names = [f"round{number}" for number in range(self.times)]
        metafunc.parametrize("number_of_the_round", range(self.times), ids=names, indirect=True)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        test = re.sub(r"\[round\d+\]|(?<=\[)round\d+-|-round\d+(?=[-\]])", "", report.nodeid)
        self.seconds[test] = max(self.seconds[test], report.duration)  # type: ignore[assignment]
        if report.failed:
            crash = getattr(report.longrepr, "reprcrash", None)
            self.reasons[test][(crash.message if crash else str(report.longrepr)).partition("\n")[0][:200]] += 1

    def summary(self) -> Iterator[str]:
        yield "longest runs: " + ", ".join(f"{test} {seconds:.1f} s" for test, seconds in self.seconds.most_common(5))
        for test, reasons in sorted(self.reasons.items(), key=lambda item: item[1].total(), reverse=True):
            yield f"{reasons.total()} of {self.times}: {test}"
            yield from (f"    {count} x {reason}" for reason, count in reasons.most_common())
        yield f"{len(self.reasons)} of {len(self.seconds)} tests failed"


def hold_again_and_again(core: int) -> None:
    os.sched_setaffinity(0, {core})
    while os.getppid() != 1:
        until = time.monotonic() + random.uniform(0, LONGEST)
        while time.monotonic() < until:
            pass
        time.sleep(random.uniform(0, LONGEST))


@contextlib.contextmanager
def held_cores() -> Iterator[None]:
    programs = [multiprocessing.Process(target=hold_again_and_again, args=(core,)) for core in os.sched_getaffinity(0)]
    for program in programs:
        program.start()
    os.nice(NICER)
    try:
        yield
    finally:
        for program in programs:
            program.kill()
            program.join()


def make(target: str, times: int) -> int:
    """Make a target time and again, say which tests failed, and return how often it did."""
    logs = ROOT / "build" / "under_load"
    logs.mkdir(parents=True, exist_ok=True)
    failures = 0
    for number in range(1, times + 1):
        began = time.monotonic()
        done = subprocess.run(["make", target], cwd=ROOT, capture_output=True, text=True, errors="replace", check=False)
        (logs / f"{target}.{number}.log").write_text(done.stdout + done.stderr)
        failures += done.returncode != 0
        how = "passed" if done.returncode == 0 else "FAILED"
        print(f"make {target}, {number} of {times}: {how} in {time.monotonic() - began:.0f} s", flush=True)
        failed = re.findall(r"^(?:(?:FAILED|ERROR) tests/|\s*\d+ - ).*", done.stdout, re.MULTILINE)
        print(*failed, sep="\n", end="\n" * bool(failed), flush=True)
    return failures


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paths", nargs="*", metavar="PATH", help="as for pytest: a folder, a file or file::test")
    parser.add_argument(
        "--make", metavar="TARGET", help="make this target instead; its output goes to build/under_load/"
    )
    parser.add_argument("--times", type=int, default=30, help="how often each test, or the target, runs (default: 30)")
    given, options = parser.parse_known_args()
    if bool(given.make) == bool(given.paths):
        parser.error("expected paths, or --make TARGET")
    if given.make:
        with held_cores():
            return make(given.make, given.times)
    rounds = Rounds(given.times)
    with held_cores():
        # Processes of xdist would not know this plug-in, and run each test once.
        without = ["-p", "no:cacheprovider", "-p", "no:xdist"]
        sys.path.insert(0, str(ROOT))  # as `python -m pytest` there: ranks find functions of the tests by it
        status = pytest.main([*given.paths, "-q", *without, *options], plugins=[rounds])
    print(*rounds.summary(), sep="\n")
    return int(status)


if __name__ == "__main__":
    sys.exit(main())
