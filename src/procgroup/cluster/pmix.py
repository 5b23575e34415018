"""Broadcast a text from rank 0 to all tasks of an Open MPI job, through the PMIx server of Open MPI's mpiexec.

Only libpmix, which Open MPI 5 contains, implements the protocol. A process of its own uses it for this broadcast
(pmix_client), because libpmix cannot be initialised again in a process that has finalised it.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from pathlib import Path

from procgroup.errors import DistNetworkError

_LIBRARY = "libpmix.so.2"
_LONGEST_WAIT_SECONDS = 2_000_000.0  # subprocess waits by poll(), which takes a number of milliseconds of 32 bits
_CLIENT = Path(__file__).with_name("pmix_client.py")


def library() -> str | None:
    """Return the name or path of Open MPI's libpmix; None where there is none, or this process is no task of PMIx."""
    if not (os.environ.get("PMIX_NAMESPACE") and os.environ.get("PMIX_RANK")):
        return None
    prefixes = [os.environ[name] for name in ("PMIX_PREFIX", "OPAL_PREFIX") if os.environ.get(name)]
    directories = [Path(prefix, part) for prefix in prefixes for part in ("lib", "lib/openmpi", "lib64")]
    found = [str(directory / _LIBRARY) for directory in directories if (directory / _LIBRARY).exists()]
    return next(iter(found), None) or _system_library()


def broadcast(path: str, value: str | None, seconds: float) -> str:
    """Broadcast the text of rank 0; the other tasks pass None. All tasks call it. ``path`` is that of ``library``.

    Raises TimeoutError when some task has not called it in time, DistNetworkError when PMIx fails.
    """
    command = [sys.executable, "-I", "-S", str(_CLIENT), path]
    try:
        limit = min(seconds, _LONGEST_WAIT_SECONDS)
        done = subprocess.run(command, input=value or "", capture_output=True, text=True, timeout=limit, check=False)
    except subprocess.TimeoutExpired:
        raise TimeoutError("PMIx has not brought the tasks together in time") from None
    if done.returncode != 0:
        raise DistNetworkError(
            f"PMIx did not bring the tasks of mpiexec (Open MPI) together: {done.stderr.strip() or done.returncode}. "
            "Set MASTER_ADDR to the host of rank 0 and MASTER_PORT to a free port there, on all ranks."
        )
    return done.stdout.strip()


def _system_library() -> str | None:
    """Return the name of the library if the dynamic linker finds it."""
    try:
        ctypes.CDLL(_LIBRARY)
    except OSError:
        return None
    return _LIBRARY
