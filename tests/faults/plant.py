"""Plant one fault at a time in a copy of the sources, run the tests there, and say which of them finds it.

::

    python tests/faults/plant.py --check                          # do all patches still apply?
    python tests/faults/plant.py --list
    python tests/faults/plant.py --tier quick --tier test         # all faults, one after another; resumes
    python tests/faults/plant.py broadcast_root_never_waits --tier test --command "make native-tests"
    python tests/faults/plant.py --table build/faults/table.md    # of what has been run so far

A fault is a file in patches/: a sentence on the fault and its consequence, then a unified diff. The name ``none``
stands for the sources without a fault, whose tests must pass for the others to mean anything.

The copy, its virtual environment and what is built in it are kept in build/faults/tree between faults and runs, so only
what a patch touches is compiled again. The environment sees the packages of the Python that runs this script, which
needs those of ``make develop``. What was found is appended to build/faults/results.jsonl; a fault that is there with
the same patch, tier and command is not run again.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import selectors
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PATCHES = Path(__file__).resolve().parent / "patches"
WORK = ROOT / "build" / "faults"

NO_FAULT = "none"
TIERS = {"quick": ("make quick", 900.0), "test": ("make test", 3600.0)}
"""The command of each tier, and the seconds from its first test on after which it is ended."""

BUILD_SECONDS = 3600.0
"""The seconds in which the first test must begin: the first time, all native tests are built."""

MOST_TEXT = 160
"""Characters of a failure's text that are kept."""

_SECONDS_TO_SHOW_WHY = 5.0
"""How long the command goes on when a native test has failed, so that it shows the output of that test."""

_ANSI = re.compile(r"\x1b\[[0-9;]*m")
_CTEST_BEGINS = re.compile(r"^Test project ")
_CTEST_ENDED = re.compile(r"^\s*(?:\d+/\d+ Test\s+#\d+:|Start\s+\d+:|\d+% tests passed)")
_CTEST_FAILED = re.compile(r"^\s*\d+/\d+ Test\s+#\d+: (\S+) [^*]*\*\*\*(\w+)")
_CTEST_LISTED = re.compile(r"^\s*\d+ - (\S+) \((\w+)\)")
_PYTEST_FAILED = re.compile(r"^(?:FAILED|ERROR) (tests/\S+?\.py(?:::\w+)*(?:\[.*?\])?)(?: - (.*))?$")
_PYTEST_TEXT = re.compile(r"^E   +(.*)$")
_NATIVE_CASE = re.compile(r"^  in the (?:case|test): (.*)$")


@dataclass
class Fault:
    """A patch: what it does, and the files that it touches."""

    name: str
    patch: Path | None

    @property
    def text(self) -> str:
        return self.patch.read_text() if self.patch else ""

    @property
    def sentence(self) -> str:
        return " ".join(self.text.partition("\n--- a/")[0].split())

    @property
    def files(self) -> list[str]:
        return re.findall(r"^\+\+\+ b/(\S+)", self.text, re.MULTILINE)

    @property
    def digest(self) -> str:
        return hashlib.sha256(self.text.encode()).hexdigest()[:12]


@dataclass
class Row:
    """What became of one fault in one tier."""

    fault: str
    files: list[str]
    tier: str
    command: str
    patch: str
    """The digest of the patch that was applied."""
    found: bool
    by: str
    """The first test that failed: a node id of pytest, or ``native:`` and a name of ctest; else how the run ended."""
    seconds: float
    """From the first test on."""
    text: str
    """The first line of the failure."""


class CannotRun(Exception):
    """The copy cannot be made, patched or built; says why."""


def faults() -> list[Fault]:
    return [Fault(path.stem, path) for path in sorted(PATCHES.glob("*.patch"))]


def problems() -> list[str]:
    """Return one line for each patch that does not apply to these sources, or says nothing about itself."""
    found = []
    for fault in faults():
        if not fault.sentence:
            found.append(f"{fault.name}: begin it with a sentence on the fault and its consequence")
        done = _apply(fault, ROOT, "--check")
        if done.returncode != 0:
            found.append(f"{fault.name}: does not apply any more: {' '.join(done.stderr.split())}")
    return found


def _apply(fault: Fault, tree: Path, *options: str) -> subprocess.CompletedProcess[str]:
    # Below another checkout git would look for the files of that one, and find nothing to do.
    environment = os.environ | {"GIT_CEILING_DIRECTORIES": str(tree.parent)}
    command = ["git", "apply", *options, str(fault.patch)]
    return subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True, check=False)


class Tree:
    """The copy of the sources that faults are planted in."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.python = path / ".venv" / "bin" / "python"
        self._packages = [entry for entry in sys.path if Path(entry).name in ("site-packages", "dist-packages")]
        programs = [
            str(Path(sys.executable).parent),
            *(str(Path(entry).parents[2] / "bin") for entry in self._packages),
        ]
        self._programs = os.pathsep.join([*programs, os.environ["PATH"]])

    @property
    def environment(self) -> dict[str, str]:
        """What the builds and the tests get: the tools of this environment, ccache, an end at the first failure."""
        environment = os.environ | {"PATH": self._programs, "PYTEST_ADDOPTS": "-x"}
        environment.pop("PYTHONPATH", None)
        if shutil.which("ccache"):
            environment |= {"CMAKE_CXX_COMPILER_LAUNCHER": "ccache", "CCACHE_BASEDIR": str(self.path)}
            environment |= {"CCACHE_NOHASHDIR": "1", "CCACHE_SLOPPINESS": "pch_defines,time_macros"}
        return environment

    def reset(self) -> None:
        """Make the tracked files equal to those of the checkout; a file that is equal keeps its time."""
        listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True)
        wanted = [name for name in listed.stdout.split("\0") if name and not name.startswith("tests/faults/")]
        for name in wanted:
            source, target = ROOT / name, self.path / name
            if not source.is_file() or (target.is_file() and target.read_bytes() == source.read_bytes()):
                continue
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(source, target)  # with the time of now, so that it is compiled again
        for folder in ("src", "native", "tests"):
            for path in (self.path / folder).rglob("*"):
                if path.suffix in (".py", ".pyi", ".hpp", ".cpp") and not (ROOT / path.relative_to(self.path)).exists():
                    path.unlink()

    def plant(self, fault: Fault) -> None:
        if fault.patch is None:
            return
        done = _apply(fault, self.path)
        if done.returncode != 0:
            raise CannotRun(f"does not apply: {done.stderr.strip()}")

    def build(self) -> None:
        """Install the copy in place in its environment; after the first time this compiles what has changed."""
        if not self.python.exists():
            self._make_environment()
        done = subprocess.run(
            ["make", "develop"],
            cwd=self.path,
            env=self.environment,
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
        )
        if done.returncode != 0:
            raise CannotRun(f"does not build: {_first_error(done.stdout + done.stderr)}")

    def _make_environment(self) -> None:
        """Let the Makefile find in .venv what it would install, and in build/ what tests have made."""
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(self.path / ".venv")], check=True)
        (site,) = (self.path / ".venv" / "lib").glob("python*/site-packages")
        (site / "zz_packages.pth").write_text("".join(f"{entry}\n" for entry in self._packages))
        for name in ("cmake", "ctest", "ninja"):
            program = shutil.which(name, path=self._programs)
            if program is None:
                raise CannotRun(f"{name} is not installed; run this script by the Python of `make develop`")
            (self.path / ".venv" / "bin" / name).symlink_to(program)
        (self.path / "build").mkdir(exist_ok=True)
        for name in ("launchers", "stand-ins"):
            if (ROOT / "build" / name).exists():
                (self.path / "build" / name).symlink_to(ROOT / "build" / name)


def _first_error(output: str) -> str:
    lines = [line.strip() for line in output.splitlines() if re.search(r"\berror\b", line, re.IGNORECASE)]
    return (lines or output.strip().splitlines() or ["it said nothing"])[0][:MOST_TEXT]


class Verdict:
    """What the lines of a run say: when its tests began, and which test failed first."""

    def __init__(self) -> None:
        self.began_at: float | None = None
        self.failed_at: float | None = None
        self.by = ""
        self.text = ""
        self._shows_why = False

    def read(self, line: str) -> None:
        line = _ANSI.sub("", line).rstrip()
        if _CTEST_BEGINS.match(line) or "test session starts" in line:
            self.began_at = self.began_at or time.monotonic()
        if _CTEST_ENDED.match(line):
            self._shows_why = False
        if failed := _CTEST_FAILED.match(line):
            self._shows_why = not self.by
            self._found(f"native:{failed[1]}", failed[2])
        elif listed := _CTEST_LISTED.match(line):
            self._found(f"native:{listed[1]}", listed[2])
        elif failed := _PYTEST_FAILED.match(line):
            self._found(failed[1], self.text or failed[2] or "")
        elif self._shows_why and (case := _NATIVE_CASE.match(line)):
            self.text += f" ({case[1]})"
            self._shows_why = False
        elif self._shows_why and line and not line.startswith(" "):
            self.text = line  # the check that failed is the last one before the case
        elif not self.by and not self.text and (said := _PYTEST_TEXT.match(line)):
            self.text = said[1]  # whole, where the line in the summary has been cut

    def _found(self, by: str, text: str) -> None:
        if self.by:
            return
        self.by, self.text, self.failed_at = by, text, time.monotonic()


def run(fault: Fault, tier: str, command: str, limit: float, tree: Tree) -> Row:
    """Plant a fault, run the command of a tier in the copy, and return what became of it."""
    row = Row(fault.name, fault.files, tier, command, fault.digest, False, "", 0.0, "")
    tree.reset()
    try:
        tree.plant(fault)
        tree.build()
    except CannotRun as error:
        row.by = row.text = str(error)
        return row
    (WORK / "logs").mkdir(parents=True, exist_ok=True)
    log = WORK / "logs" / f"{fault.name}.{tier}.log"
    started = time.monotonic()
    verdict, ending = _watch(command, limit, tree, log)
    row.seconds = round((verdict.failed_at or time.monotonic()) - (verdict.began_at or started), 1)
    row.found = bool(verdict.by) or ending != "passed"
    row.by = verdict.by or ending
    row.text = verdict.text.replace(f"{tree.path}/", "")[:MOST_TEXT]
    return row


def _watch(command: str, limit: float, tree: Tree, log: Path) -> tuple[Verdict, str]:
    verdict = Verdict()
    started = time.monotonic()
    process = subprocess.Popen(
        shlex.split(command),
        cwd=tree.path,
        env=tree.environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    ending = ""
    try:
        with log.open("w") as file:
            for line in _lines(process):
                if line:
                    file.write(line)
                    file.flush()
                    verdict.read(line)
                now = time.monotonic()
                if verdict.failed_at and verdict.by.startswith("native:"):
                    if now - verdict.failed_at > _SECONDS_TO_SHOW_WHY:
                        break
                elif now > (verdict.began_at or started + BUILD_SECONDS) + limit:
                    ending = f"not at its end after {limit:g} s"
                    break
            else:
                process.wait()
    finally:
        _end(process)
    return verdict, ending or ("passed" if process.returncode == 0 else f"exit status {process.returncode}")


def _lines(process: subprocess.Popen[bytes]) -> Iterator[str]:
    """Yield what a process prints by lines, and an empty line for every second in which nothing comes."""
    assert process.stdout is not None
    descriptor = process.stdout.fileno()
    kept = b""
    with selectors.DefaultSelector() as selector:
        selector.register(descriptor, selectors.EVENT_READ)
        while True:
            if not selector.select(1.0):
                yield ""
                continue
            data = os.read(descriptor, 65536)
            *whole, kept = (kept + data).split(b"\n")
            for line in whole:
                yield line.decode(errors="replace") + "\n"
            if not data:
                yield kept.decode(errors="replace")
                return


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a command and all that it has started."""
    import psutil  # not needed by --check

    try:
        family = psutil.Process(process.pid).children(recursive=True)
    except psutil.Error:
        family = []
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
    for relative in family:
        try:
            relative.kill()
        except psutil.Error:
            continue
    process.wait()


def read_results(path: Path) -> list[Row]:
    """Return the rows of a file of results, the last one of each fault and tier."""
    if not path.exists():
        return []
    rows = [Row(**json.loads(line)) for line in path.read_text().splitlines() if line.strip()]
    return list({(row.fault, row.tier): row for row in rows}.values())


def table(rows: Sequence[Row]) -> str:
    """Return the rows as a table in Markdown, with a sum for each tier."""
    tiers = list(dict.fromkeys(row.tier for row in rows))
    of_tier = {tier: [row for row in rows if row.tier == tier and row.fault != NO_FAULT] for tier in tiers}
    sums = [f"{tier}: {sum(row.found for row in some)} of {len(some)} found" for tier, some in of_tier.items()]
    lines = [
        "# Which test finds which fault",
        "",
        "Written by `plant.py --table`.",
        ", ".join(sums) + ".",
        "",
        "| fault | file | tier | found | by | s | first line |",
        "|" + "---|" * 7,
    ]
    for row in sorted(rows, key=lambda row: (row.fault != NO_FAULT, row.fault, row.tier)):
        found = "yes" if row.found else "**no**"
        tier = row.tier if row.command == TIERS[row.tier][0] else f"{row.tier}, by `{row.command}`"
        cells = [row.fault, ", ".join(row.files), tier, found, row.by, f"{row.seconds:g}", row.text]
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help=f"faults to plant (default: all); {NO_FAULT}: the sources as they are")
    parser.add_argument("--tier", action="append", choices=TIERS, help="may be given again (default: quick)")
    parser.add_argument("--command", help="the command of the tier (default: make TIER)")
    parser.add_argument(
        "--limit", type=float, help="seconds for the tests of a command (default: 900 for quick, 3600 for test)"
    )
    parser.add_argument("--again", action="store_true", help="run what has been run already")
    parser.add_argument("--results", type=Path, default=WORK / "results.jsonl")
    parser.add_argument("--table", type=Path, metavar="FILE", help="write the results so far as a table, run nothing")
    parser.add_argument("--check", action="store_true", help="only look whether the patches apply")
    parser.add_argument("--list", action="store_true", help="only list the faults")
    arguments = parser.parse_args()
    if arguments.check:
        found = problems()
        print("\n".join(found) or f"all {len(faults())} patches apply")
        return 1 if found else 0
    if arguments.table:
        arguments.table.write_text(table(read_results(arguments.results)))
        return 0
    known = {fault.name: fault for fault in [Fault(NO_FAULT, None), *faults()]}
    if unknown := sorted(set(arguments.names) - set(known)):
        parser.error(f"there is no fault {', '.join(unknown)}; --list shows them")
    chosen = [known[name] for name in arguments.names or known]
    if arguments.list:
        print("\n".join(f"{fault.name}: {', '.join(fault.files)}: {fault.sentence}" for fault in chosen if fault.patch))
        return 0
    play(chosen, arguments)
    return 0


def play(chosen: Sequence[Fault], arguments: argparse.Namespace) -> None:
    tree = Tree(WORK / "tree")
    done = {(row.fault, row.tier, row.command, row.patch) for row in read_results(arguments.results)}
    arguments.results.parent.mkdir(parents=True, exist_ok=True)
    for tier in arguments.tier or ["quick"]:
        command, limit = arguments.command or TIERS[tier][0], arguments.limit or TIERS[tier][1]
        for fault in chosen:
            if (fault.name, tier, command, fault.digest) in done and not arguments.again:
                continue
            row = run(fault, tier, command, limit, tree)
            with arguments.results.open("a") as file:
                file.write(json.dumps(asdict(row)) + "\n")
            found = "found" if row.found else "NOT FOUND"
            print(f"{fault.name:40} {tier:5} {found:9} {row.seconds:6.1f} s  {row.by}  {row.text}", flush=True)
    tree.reset()


if __name__ == "__main__":
    sys.exit(main())
