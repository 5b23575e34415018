"""The GPUs that a process may use, as CUDA's driver describes them, in a process of its own.

A driver may wait for a GPU that does not answer, or end its process; and to try a GPU takes some of its memory. None of
this reaches this process. This file is also the program of that process: it prints the description as JSON.
"""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from procgroup.diagnostics.doctor import shared_libraries

_SECONDS = 60
"""The driver's start takes seconds where nothing keeps it awake, and longer with many GPUs."""


class Gpu(NamedTuple):
    """One GPU; ``reaches`` has the numbers of those whose memory it reads and writes without the host."""

    name: str
    has_gate: bool
    reaches: Sequence[int]


class Driver(NamedTuple):
    """The version of CUDA that the driver is for, and the GPUs by number; or why there are none."""

    cuda: str
    gpus: Sequence[Gpu]
    error: str = ""


def is_here(environment: Mapping[str, str] = os.environ, root: Path = Path("/")) -> bool:
    """Return whether this process has loaded the driver's library, or would find it."""
    is_loaded = root == Path("/") and hasattr(ctypes.CDLL(None), "cuInit")
    return is_loaded or bool(shared_libraries.find(["libcuda.so.1"], environment, root))


def describe() -> Driver:
    """Return what the driver says of this process's GPUs; an ``error`` where it does not answer."""
    command = [sys.executable, "-m", __name__]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS, stdin=subprocess.DEVNULL)
        cuda, gpus, error = json.loads(done.stdout.strip().rpartition("\n")[2])
        return Driver(cuda, [Gpu(*one) for one in gpus], error)
    except subprocess.TimeoutExpired:
        return Driver("", (), f"it does not answer within {_SECONDS} s")
    except (OSError, ValueError):
        return Driver("", (), f"it ends its process: {(done.stderr.strip().splitlines() or ['exit status'])[-1]}")


def _describe_here() -> Driver:
    from procgroup import _native

    try:
        count = _native.count_gpus()
        gpus = [
            Gpu(
                _native.gpu_name(number),
                _native.has_gate(number),
                [other for other in range(count) if other != number and _native.can_reach(number, other)],
            )
            for number in range(count)
        ]
        version = _native.cuda_version()
        return Driver(f"{version // 1000}.{version % 1000 // 10}", gpus)
    except RuntimeError as error:
        return Driver("", (), str(error))


if __name__ == "__main__":
    print(json.dumps(_describe_here()))
