"""An authority of our own that signs certificates for 127.0.0.1, made by the program openssl."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import NamedTuple


class Certificates(NamedTuple):
    """Paths of PEM files: the authority's certificate, and a certificate with its key."""

    ca: str
    cert: str
    key: str


def lacks() -> str:
    """Return what this machine lacks to make certificates; "" where it lacks nothing."""
    return "" if shutil.which("openssl") else "not installed: openssl"


def make(folder: Path) -> Certificates:
    folder.mkdir()
    (folder / "names").write_text("subjectAltName=IP:127.0.0.1")
    key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
    authority = ("-subj", "/CN=authority", "-days", "2", "-keyout", "ca.key", "-out", "ca.pem")
    signing = ("-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial", "-days", "2", "-extfile", "names")
    _openssl(folder, "req", "-x509", *key, *authority)
    _openssl(folder, "req", *key, "-subj", "/CN=member", "-keyout", "member.key", "-out", "member.csr")
    _openssl(folder, "x509", "-req", "-in", "member.csr", *signing, "-out", "member.pem")
    return Certificates(*(str(folder / name) for name in ("ca.pem", "member.pem", "member.key")))


def _openssl(folder: Path, *arguments: str) -> None:
    subprocess.run(["openssl", *arguments], cwd=folder, check=True, capture_output=True, timeout=120)
