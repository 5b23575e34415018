"""Build the wheels of a release into dist/, for x86_64 and aarch64.

There are two for each processor: for Python 3.11, and for the stable ABI of Python 3.12, which all later versions have.
Building needs Python 3.11 and a Python from 3.12 on, with their headers. The compiler is zig's, from PyPI: it compiles
for either processor on either, against the symbols of glibc 2.28 (manylinux_2_28), and links libc++ into the module.
The engine is compiled once for each processor. auditwheel then says what each wheel needs.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
WORK = ROOT / "build" / "wheels"
PROCESSORS = ("x86_64", "aarch64")
PLATFORM = "manylinux_2_28"
GLIBC = "2.28"
TOOLS = ("ziglang==0.17.1", "cmake>=3.26", "ninja", "wheel", "auditwheel")

_TOOLCHAIN = """\
set(CMAKE_SYSTEM_NAME Linux)
set(CMAKE_SYSTEM_PROCESSOR {processor})
set(CMAKE_CXX_COMPILER {folder}/c++)
set(CMAKE_AR {folder}/ar)
set(CMAKE_RANLIB {folder}/ranlib)
set(CMAKE_CXX_FLAGS_INIT "-include stdio.h")  # which nanobind uses, and Python.h of the stable ABI does not include
set(CMAKE_CXX_SCAN_FOR_MODULES OFF)  # or CMake asks for clang-scan-deps, which zig does not have
"""


@dataclass(frozen=True)
class Python:
    """An interpreter whose headers are there: its program, and its minor version."""

    program: str
    minor: int


def main(arguments: Sequence[str] | None = None) -> int:
    """Build what the command line asks for; return 0, or 1 when something is missing or a wheel needs too much."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=ROOT / "dist", metavar="FOLDER")
    parser.add_argument("--processors", default=",".join(PROCESSORS), help="comma-separated")
    parser.add_argument("--pythons", default="", help="programs to build with, comma-separated; found by default")
    options = parser.parse_args(arguments)
    pythons = chosen(list(found(options.pythons.split(",") if options.pythons else candidates())))
    if len(pythons) < 2:
        missing = "a Python from 3.12 on" if [python.minor for python in pythons] == [11] else "Python 3.11"
        print(
            f"{missing} is missing, with venv and the headers (Python.h): install it, or name it and the other with "
            "--pythons /path/to/python3.11,/path/to/python3.12",
            file=sys.stderr,
        )
        return 1
    options.output.mkdir(parents=True, exist_ok=True)
    wheels = [
        build(python, processor, options.output)
        for processor in options.processors.split(",")
        for python in reversed(pythons)
    ]
    allowed = [audit(wheel) for wheel in wheels]
    return 0 if all(allowed) else 1


def candidates() -> Iterator[str]:
    """Return the interpreters that may be there: on the path, and pyenv's."""
    yield sys.executable
    for minor in range(11, 30):
        yield f"python3.{minor}"
    root = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    yield from (str(program) for program in sorted(root.glob("versions/3.*/bin/python")))


def found(programs: Sequence[str] | Iterator[str]) -> Iterator[Python]:
    """Return those that run, with a virtual environment and the headers at hand."""
    probe = (
        "import ensurepip, os, sys, sysconfig, venv; "
        "os.path.exists(sysconfig.get_path('include') + '/Python.h') or sys.exit(1); "
        "sysconfig.get_config_var('Py_GIL_DISABLED') and sys.exit(1); print(sys.version_info.minor)"
    )
    for program in filter(shutil.which, programs):
        done = subprocess.run([program, "-c", probe], capture_output=True, text=True, check=False)
        if done.returncode == 0:
            yield Python(program, int(done.stdout))


def chosen(pythons: Sequence[Python]) -> list[Python]:
    """Return Python 3.11 and the oldest from 3.12 on, as far as they are there."""
    old = [python for python in pythons if python.minor == 11]
    new = sorted((python for python in pythons if python.minor >= 12), key=lambda python: python.minor)
    return old[:1] + new[:1]


def build(python: Python, processor: str, output: Path) -> Path:
    """Build one wheel; return its path."""
    print(f"== {processor}, Python 3.{python.minor}{' (stable ABI)' if python.minor > 11 else ''}", flush=True)
    tools = environment(python)
    raw = WORK / f"{processor}-3.{python.minor}"
    shutil.rmtree(raw, ignore_errors=True)
    settings = {
        "cmake.define.CMAKE_TOOLCHAIN_FILE": str(toolchain(tools, processor)),
        "build-dir": str(WORK / f"{processor}-objects"),
        "wheel.reproducible": "true",
    }
    suffix = f".cpython-3{python.minor}-{processor}-linux-gnu.so"
    variables = {
        **os.environ,
        "PATH": f"{tools}/bin:{os.environ['PATH']}",
        "SOURCE_DATE_EPOCH": os.environ.get("SOURCE_DATE_EPOCH") or date_of_commit(),
        # What names the wheel and the module: those of the processor that they are for.
        "_PYTHON_HOST_PLATFORM": f"linux-{processor}",
        "SETUPTOOLS_EXT_SUFFIX": suffix,
    }
    program = f"{tools}/bin/python"
    command = [program, "-m", "pip", "wheel", "--quiet", "--no-build-isolation", "--no-deps", "--wheel-dir", str(raw)]
    command += [f"--config-settings={name}={value}" for name, value in settings.items()]
    subprocess.run([*command, str(ROOT)], env=variables, check=True)
    (wheel,) = raw.glob("*.whl")
    tag = [program, "-m", "wheel", "tags", "--remove", f"--platform-tag={PLATFORM}_{processor}", str(wheel)]
    subprocess.run(tag, env=variables, check=True, stdout=subprocess.DEVNULL)
    (wheel,) = raw.glob("*.whl")
    return Path(shutil.copy(wheel, output / wheel.name))


def environment(python: Python) -> Path:
    """Return a virtual environment of that Python with what builds."""
    tools = WORK / f"tools-3.{python.minor}"
    program = tools / "bin" / "python"
    if not (tools / ".made").exists():
        shutil.rmtree(tools, ignore_errors=True)
        subprocess.run([python.program, "-m", "venv", str(tools)], check=True)
        requires = tomllib.loads((ROOT / "pyproject.toml").read_text())["build-system"]["requires"]
        install = [str(program), "-m", "pip", "install", "--quiet", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*install, *requires, *TOOLS], check=True)
        (tools / ".made").touch()
    return tools


def toolchain(tools: Path, processor: str) -> Path:
    """Write the file that shows CMake zig's compiler for a processor; return it. Both Pythons share it."""
    folder = WORK / f"{processor}-toolchain"
    folder.mkdir(parents=True, exist_ok=True)
    zig = f'exec "{tools}/bin/python" -m ziglang'
    programs = {"c++": f"{zig} c++ -target {processor}-linux-gnu.{GLIBC}", "ar": f"{zig} ar", "ranlib": f"{zig} ranlib"}
    for name, command in programs.items():
        if not (folder / name).exists():
            (folder / name).write_text(f'#!/bin/sh\n{command} "$@"\n')
            (folder / name).chmod(0o755)
    file = folder / "toolchain.cmake"
    file.write_text(_TOOLCHAIN.format(processor=processor, folder=folder))
    return file


def date_of_commit() -> str:
    """Return the time of the last commit, which stands for that of all files: two builds of it are then equal."""
    done = subprocess.run(["git", "log", "-1", "--format=%ct"], cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "315532800"


def audit(wheel: Path) -> bool:
    """Return whether auditwheel finds that the wheel needs no more than its name says."""
    auditwheel = next(WORK.glob("tools-*/bin/auditwheel"))
    done = subprocess.run([str(auditwheel), "show", str(wheel)], capture_output=True, text=True, check=False)
    text = " ".join(done.stdout.split())
    tag = re.search(r'the following platform tag: "(\w+)"', text) or re.search(r"consistent with [^\"]*\"(\w+)\"", text)
    allowed = tag is not None and _glibc(tag[1]) <= _glibc(wheel.stem)
    verdict = f"auditwheel: {tag[1]}" if tag and allowed else f"auditwheel does not agree: {text or done.stderr}"
    print(f"{wheel.name}  {wheel.stat().st_size / 1e6:.1f} MB  {verdict}", flush=True)
    return allowed


def _glibc(text: str) -> tuple[int, ...]:
    match = re.search(r"manylinux_(\d+)_(\d+)", text)
    return (int(match[1]), int(match[2])) if match else (99,)


if __name__ == "__main__":
    sys.exit(main())
