"""The wheels: their metadata, their licences, what they need, and that they work in clean environments."""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from collections.abc import Iterator
from email.message import Message
from email.parser import HeaderParser
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

import pytest

import world
from project import debian_python

ROOT = Path(__file__).resolve().parents[2]
DIST = ROOT / "dist"
SETTINGS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
LICENCES = {"LICENSE", "licenses/nanobind.txt", "licenses/robin_map.txt", "licenses/llvm.txt"}

WORKS = """
import sys, procgroup as dist, numpy as np
from procgroup.testing import run_ranks

def add():
    number = np.array([dist.get_rank() + 1.0])
    dist.all_reduce(number)
    return number[0]

assert run_ranks(add, 2) == [3.0, 3.0]
store = dist.TCPStore("127.0.0.1", 0, is_master=True)
client = dist.TCPStore("127.0.0.1", store.port, is_master=False)
client.set("key", b"value")
assert store.get("key") == b"value"
print("works on", sys.version_info.major, sys.version_info.minor)
"""

PROGRAM = """
import os, numpy as np, procgroup as dist
dist.init_process_group(timeout=100)
number = np.array([dist.get_rank() + 1.0])
dist.all_reduce(number)
os.write(1, f"rank {dist.get_rank()} has {number[0]}\\n".encode())
dist.destroy_process_group()
"""


def built_by_make() -> Path | None:
    """Return the wheel that make has built to install it, where it is there."""
    return next(iter(sorted((ROOT / "build" / "wheel").glob("*.whl"))), None)


def released() -> list[Path]:
    return sorted(DIST.glob("*.whl"))


@pytest.fixture
def wheel() -> Iterator[zipfile.ZipFile]:
    path = built_by_make()
    if path is None:
        pytest.skip("make has built no wheel here")
    with zipfile.ZipFile(path) as file:
        yield file


def header(wheel: zipfile.ZipFile, name: str) -> Message:
    (path,) = (path for path in wheel.namelist() if path.endswith(f".dist-info/{name}"))
    return HeaderParser().parsestr(wheel.read(path).decode())


# --- of every wheel ---


def check_contents(wheel: zipfile.ZipFile) -> None:
    """Check what holds for every wheel, whatever it is for."""
    facts = header(wheel, "METADATA")
    assert facts["Name"] == "procgroup" and facts["Version"] == SETTINGS["version"]
    assert facts["License-Expression"] == "Apache-2.0"
    assert set(facts.get_all("License-File", [])) == LICENCES
    licences = {path.partition(".dist-info/licenses/")[2] for path in wheel.namelist()}
    assert licences >= LICENCES
    always = [need for need in facts.get_all("Requires-Dist", []) if "extra ==" not in need]
    assert [re.match(r"\w+", need)[0] for need in always] == ["numpy"]  # type: ignore[index]
    assert "Typing :: Typed" in facts.get_all("Classifier", [])
    assert "procgroup/py.typed" in wheel.namelist() and "procgroup/_native.pyi" in wheel.namelist()
    (program,) = (entry for entry in wheel.infolist() if entry.filename == "procgroup/die_with_parent")
    assert program.external_attr >> 16 & 0o111, "the program that starts a rank cannot be executed"
    (entry_points,) = (path for path in wheel.namelist() if path.endswith("entry_points.txt"))
    assert "pgrun=procgroup.__main__:run" in wheel.read(entry_points).decode().replace(" ", "")
    (native,) = (path for path in wheel.namelist() if path.endswith(".so"))
    for folder in (str(ROOT), "/tmp/", "/home/", str(Path(sys.prefix)), "site-packages"):
        assert folder.encode() not in wheel.read(native), f"the module shows where it was built: {folder}"


def test_the_wheel_that_make_builds_has_what_a_release_needs(wheel: zipfile.ZipFile) -> None:
    check_contents(wheel)
    assert header(wheel, "WHEEL")["Root-Is-Purelib"] == "false"
    (native,) = (path for path in wheel.namelist() if path.endswith(".so"))
    if sys.version_info >= (3, 12) and not sysconfig.get_config_var("Py_GIL_DISABLED"):
        assert "-cp312-abi3-" in str(wheel.filename) and native == "procgroup/_native.abi3.so"
    else:
        assert f"-cp3{sys.version_info.minor}-" in str(wheel.filename) and "cpython" in native


def test_no_module_of_the_package_needs_what_a_plain_installation_lacks() -> None:
    needed: set[str] = set()
    for file in (ROOT / "src").rglob("*.py"):
        for statement in ast.parse(file.read_text()).body:
            if isinstance(statement, ast.Import):
                needed |= {alias.name.partition(".")[0] for alias in statement.names}
            elif isinstance(statement, ast.ImportFrom):
                needed.add(str(statement.module).partition(".")[0])
    others = needed - sys.stdlib_module_names - {"procgroup"}
    # Modules that are imported for users of the others only: plug-ins, jax.jit's part, the benchmark's peers, and the
    # live view, metrics and spans of those who have their libraries.
    assert others <= {"numpy", "torch", "pytest", "jax", "mpi4py", "rich", "prometheus_client", "opentelemetry"}


def test_the_licence_of_nanobind_is_that_of_the_installed_one() -> None:
    if find_spec("nanobind") is None:
        pytest.skip("nanobind is not installed")
    (theirs,) = (file for file in metadata.files("nanobind") or [] if file.name == "LICENSE")
    assert theirs.read_text() == (ROOT / "licenses" / "nanobind.txt").read_text()


@pytest.mark.parametrize("program", ["python3.11", "python3.12"])
def test_a_missing_python_is_named_before_anything_is_built(program: str, tmp_path: Path) -> None:
    fake = tmp_path / program
    fake.write_text(f"#!/bin/sh\necho {program.rpartition('.')[2]}\n")
    fake.chmod(0o755)
    command = [sys.executable, str(ROOT / "tools/build_wheels.py"), "--pythons", str(fake), "--output", str(tmp_path)]
    done = world.run_command(command)
    missing = "Python 3.11" if program == "python3.12" else "a Python from 3.12 on"
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith(f"{missing} is missing, with venv and the headers (Python.h): install it")


# --- of a release ---


@pytest.fixture(scope="session")
def release() -> list[Path]:
    """The wheels of this version in dist/, built now where they are not there."""
    if len(released()) < 4:
        try:
            done = world.run_command([sys.executable, str(ROOT / "tools/build_wheels.py")], timeout=3000)
        except world.WorldTimeout as error:
            pytest.skip(f"the wheels were not built in time: {error}")
        if "is missing" in done.stderr:
            pytest.skip(done.stderr)
        assert done.returncode == 0, done.stdout + done.stderr
    return released()


def wheel_for(release: list[Path], tag: str, processor: str) -> Path:
    (found,) = (path for path in release if f"-{tag}-" in path.name and path.name.endswith(f"_{processor}.whl"))
    return found


@pytest.mark.slow
@pytest.mark.timeout(3100)
def test_the_wheels_have_what_a_release_needs(release: list[Path]) -> None:
    names = [path.name.removeprefix(f"procgroup-{SETTINGS['version']}-") for path in release]
    assert sorted(names) == sorted(
        f"{tag}-manylinux_2_28_{processor}.whl"
        for tag in ("cp311-cp311", "cp312-abi3")
        for processor in ("x86_64", "aarch64")
    )
    for path in release:
        with zipfile.ZipFile(path) as file:
            check_contents(file)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("minor", [11, 12, 13, 14])
def test_the_wheel_works_in_a_clean_environment(minor: int, release: list[Path], tmp_path: Path) -> None:
    programs = [
        sys.executable,
        f"python3.{minor}",
        *map(str, Path.home().glob(f".pyenv/versions/3.{minor}*/bin/python")),
    ]
    code = f"import sys; sys.exit(sys.version_info[:2] != (3, {minor}))"
    python = next(
        (each for each in programs if shutil.which(each) and not world.run_command([each, "-c", code]).returncode), ""
    )
    if not python:
        pytest.skip(f"there is no Python 3.{minor} here")
    wheel = wheel_for(release, "cp311-cp311" if minor == 11 else "cp312-abi3", "x86_64")
    subprocess.run([python, "-m", "venv", str(tmp_path / "clean")], check=True)
    inside = tmp_path / "clean" / "bin"
    install = [str(inside / "python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", str(wheel)]
    subprocess.run(install, check=True)
    done = world.run_command([str(inside / "python"), "-c", WORKS], directory=tmp_path)
    assert done.stdout == f"works on 3 {minor}\n", done.stderr
    (tmp_path / "program.py").write_text(PROGRAM)
    run = world.run_command(
        [str(inside / "procgroup"), "run", "--nproc-per-node", "2", "program.py"], directory=tmp_path
    )
    assert "rank 0 has 3.0" in run.stdout and "rank 1 has 3.0" in run.stdout, run.stderr


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("distribution", "architecture", "version"),
    [("sid", "amd64", "3.14"), ("sid", "arm64", "3.14"), ("bookworm", "arm64", "3.11")],
)
def test_the_wheel_works_on_a_debian(
    distribution: str, architecture: str, version: str, release: list[Path], tmp_path: Path
) -> None:
    if lack := debian_python.lacks(architecture):
        pytest.skip(lack)
    try:
        python = debian_python.unpack(tmp_path, distribution, architecture, version)
    except OSError as error:
        pytest.skip(f"Debian's packages cannot be fetched: {error}")
    processor = {"amd64": "x86_64", "arm64": "aarch64"}[architecture]
    wheel = wheel_for(release, "cp311-cp311" if version == "3.11" else "cp312-abi3", processor)
    for path in (wheel, fetch_numpy(tmp_path, processor, version)):
        with zipfile.ZipFile(path) as file:
            file.extractall(python.packages)
    done = python.run("-c", WORKS, timeout=400)
    assert done.stdout == f"works on {version.replace('.', ' ')}\n", done.stderr


def fetch_numpy(folder: Path, processor: str, version: str) -> Path:
    """Return the wheel of NumPy for that processor and Python."""
    platforms = [f"--platform=manylinux_{glibc}_{processor}" for glibc in ("2_28", "2_27", "2_17")]
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:", *platforms]
    command += ["--implementation=cp", f"--python-version={version}", "--dest", str(folder / "numpy"), "numpy"]
    subprocess.run(command, check=True)
    (wheel,) = (folder / "numpy").glob("*.whl")
    return wheel
