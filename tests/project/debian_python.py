"""A Python of any Debian release and processor in a folder: packages unpacked, not installed, and entered by chroot.

For tests of wheels on Pythons and processors that this machine does not have. Programs of another processor run under
qemu-user, of Debian's package qemu-user-static.
"""

from __future__ import annotations

import hashlib
import lzma
import os
import platform
import re
import shutil
import stat
import subprocess
import urllib.request
from dataclasses import dataclass
from pathlib import Path

import world

MIRROR = "http://deb.debian.org/debian"
_SECONDS = 60
_OWN = {"x86_64": "amd64", "aarch64": "arm64"}
_EMULATORS = {"amd64": "qemu-x86_64-static", "arm64": "qemu-aarch64-static"}

Index = dict[str, dict[str, str]]


def lacks(architecture: str) -> str:
    """Return what this machine lacks to run a Python of a Debian architecture; "" where it lacks nothing."""
    if os.geteuid() != 0:
        return "chroot is for root only"
    missing = [name for name in ("dpkg-deb", "chroot", *_emulator(architecture)) if shutil.which(name) is None]
    return f"not installed: {', '.join(missing)}" if missing else ""


@dataclass(frozen=True)
class DebianPython:
    """The folder, Debian's name of the processor, and the Python's version: "3.14"."""

    folder: Path
    architecture: str
    version: str

    @property
    def packages(self) -> Path:
        """Where what is put there is imported from."""
        return self.folder / "usr/local/lib" / f"python{self.version}/dist-packages"

    def run(self, *arguments: str, timeout: float = 120, **environment: str) -> subprocess.CompletedProcess[str]:
        """Run this Python with these arguments, in the folder as its root."""
        emulator = [f"/{name}" for name in _emulator(self.architecture)]
        command = ["chroot", str(self.folder), *emulator, f"/usr/bin/python{self.version}", *arguments]
        return world.run_command(command, timeout=timeout, environment={"PYTHONPATH": "", **environment})


def unpack(folder: Path, release: str, architecture: str, version: str) -> DebianPython:
    """Unpack the Python of a release, and what it depends on, into a folder. Raises OSError without a network."""
    for name in ("bin", "sbin", "lib", "lib64"):
        (folder / "usr" / name).mkdir(parents=True)
        (folder / name).symlink_to(f"usr/{name}")
    for name in ("tmp", "dev", "proc"):
        (folder / name).mkdir()
    for name, minor in (("null", 3), ("urandom", 9)):
        os.mknod(folder / "dev" / name, stat.S_IFCHR | 0o666, os.makedev(1, minor))
    index = _index(release, architecture)
    for name in _with_dependencies(index, [f"python{version}", "libstdc++6"]):
        data = _fetch(f"{MIRROR}/{index[name]['Filename']}")
        assert hashlib.sha256(data).hexdigest() == index[name]["SHA256"], name
        (folder / "tmp/package.deb").write_bytes(data)
        contents = subprocess.run(
            ["dpkg-deb", "--fsys-tarfile", str(folder / "tmp/package.deb")], check=True, capture_output=True
        )
        # Packages of older releases have files in /lib, which is a link.
        extract = ["tar", "--extract", "--keep-directory-symlink", "--no-same-owner", "--directory", str(folder)]
        subprocess.run(extract, input=contents.stdout, check=True)
    for name in _emulator(architecture):
        shutil.copy(str(shutil.which(name)), folder / name)
    python = DebianPython(folder, architecture, version)
    python.packages.mkdir(parents=True, exist_ok=True)
    return python


def _emulator(architecture: str) -> list[str]:
    return [] if architecture == _OWN.get(platform.machine()) else [_EMULATORS[architecture]]


def _index(release: str, architecture: str) -> Index:
    text = lzma.decompress(_fetch(f"{MIRROR}/dists/{release}/main/binary-{architecture}/Packages.xz")).decode()
    entries = (dict(re.findall(r"^([\w-]+): (.*)$", entry, re.MULTILINE)) for entry in text.split("\n\n"))
    return {entry["Package"]: entry for entry in entries if entry}


def _with_dependencies(index: Index, packages: list[str]) -> list[str]:
    """Return the packages and all that they depend on, the first of alternatives; virtual packages are left out."""
    found: list[str] = []
    waiting = list(packages)
    while waiting:
        name = waiting.pop()
        if name in found or name not in index:
            continue
        found.append(name)
        depends = f"{index[name].get('Pre-Depends', '')}, {index[name].get('Depends', '')}"
        waiting += [word[0] for clause in depends.split(",") if (word := re.findall(r"[a-z0-9][a-z0-9+.-]*", clause))]
    return found


def _fetch(address: str) -> bytes:
    with urllib.request.urlopen(address, timeout=_SECONDS) as answer:
        return bytes(answer.read())
