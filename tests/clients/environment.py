"""An environment of its own for each client: a virtual environment below build/clients, made from pinned requirements.

It is made once and kept until the requirements, or Python, change. procgroup itself is not installed into it but found
beside it, as it is installed for the tests: so a change of procgroup counts at once, and the runs on stock Gloo do
without it.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.metadata
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CLIENTS = Path(__file__).resolve().parent
BUILD = ROOT / "build" / "clients"


def python_of(client: str) -> Path:
    """Return the Python of a client's environment; make the environment where it is missing or old."""
    requirements = (CLIENTS / client / "requirements.txt").read_text() + "\n".join(_requirements_of_procgroup())
    folder = BUILD / client
    python = folder / "bin" / "python"
    stamp = folder / "made-from"
    made_from = hashlib.sha256(f"{sys.version}\n{requirements}".encode()).hexdigest()
    BUILD.mkdir(parents=True, exist_ok=True)
    with (BUILD / f"{client}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not stamp.exists() or stamp.read_text() != made_from:
            shutil.rmtree(folder, ignore_errors=True)
            subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
            _install(python, requirements)
            stamp.write_text(made_from)
    return python


def _install(python: Path, requirements: str) -> None:
    pinned = python.parents[1] / "requirements.txt"
    pinned.write_text(requirements)
    pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    done = subprocess.run([*pip, "--requirement", str(pinned)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    if done.returncode != 0:
        raise RuntimeError(f"pip could not install {pinned}:\n{done.stdout.decode(errors='replace')}")


def version_of(client: str, package: str) -> str:
    """Return the version of a package in a client's environment."""
    program = f"import importlib.metadata as metadata; print(metadata.version({package!r}))"
    return subprocess.run([python_of(client), "-c", program], check=True, capture_output=True, text=True).stdout.strip()


def installed_procgroup() -> Path:
    """Return a folder for PYTHONPATH that holds procgroup, and nothing else, as it is installed for the tests.

    It is one of links, because what is compiled is apart from the Python sources in an installation in place.
    """
    import procgroup
    from procgroup import _native

    assert procgroup.__file__ is not None and _native.__file__ is not None
    metadata = Path(str(importlib.metadata.distribution("procgroup").locate_file(".")))
    folder = BUILD / "installed"
    parts = [*Path(_native.__file__).parent.iterdir(), *Path(procgroup.__file__).parent.iterdir()]
    links = {"procgroup" / Path(one.name): one for one in parts}
    links |= {Path(one.name): one for one in metadata.glob("procgroup-*.dist-info")}
    (folder / "procgroup").mkdir(parents=True, exist_ok=True)
    for link, target in links.items():
        place = folder / link
        if not place.is_symlink() or place.readlink() != target:
            place.unlink(missing_ok=True)
            place.symlink_to(target)
    return folder


def _requirements_of_procgroup() -> list[str]:
    """Return what procgroup needs, without its extras."""
    return [one for one in importlib.metadata.requires("procgroup") or [] if "extra ==" not in one]
