"""Whole programs of torch.distributed - stock DDP, FSDP, DTensor and others - run on Gloo and on procgroup alike.

Each is a function of its rank, the number of ranks and a folder that all ranks share, begins in a new default group of
its backend, and returns tensors and plain values: losses, parameters, what was received. The programs know nothing of
procgroup. What they return must be the same on both, to the bit; where the order of the ranks in a sum shows, because
there are more than two of them, within the tolerance that the program says.

    python tests/parity/torch_programs.py gloo             # run all on Gloo alone
    python tests/parity/torch_programs.py procgroup ddp    # those whose names have "ddp" in them, on both
    python tests/parity/torch_programs.py gpus             # on Gloo, and on procgroup on stand-in GPUs
"""

from __future__ import annotations

import argparse
import json
import os
import pickle
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TESTS = Path(__file__).resolve().parents[1]
SECONDS = 60.0
"""What one program may take."""
ON_GPUS = 1e-5

if __name__ == "__main__":
    sys.path.insert(0, str(TESTS))

GPUS = "gpus"
"""Not a backend: procgroup's, for tensors on stand-in GPUs. It is played without others."""
KINDS = ["collectives", "groups", "ddp", "sharded", "stages"]
Function = Callable[[int, int, Path], Any]


@dataclass(frozen=True)
class Program:
    """A function, or several that run one after the other in groups of their own, each on so many ranks."""

    name: str
    phases: tuple[tuple[int, Function], ...]
    tolerance: float = 0.0
    """How far numbers may be apart, of their size."""


@dataclass
class Played:
    """What became of one program on one backend: what each rank of each phase returned, or what went wrong."""

    program: str
    backend: str
    tolerance: float
    results: list[list[Any]]
    failure: str = ""
    seconds: float = 0.0


def play(kinds: Sequence[str], backends: Sequence[str], *, parts: Sequence[str] = (), sample: int = 0) -> list[Played]:
    """Run programs of these kinds on each of the backends: all, those with a part in their names, or a sample."""
    from torch_gpus import stand_in_torch

    from world import run_command

    with tempfile.TemporaryDirectory(prefix="torch-programs-") as folder:
        Path(folder, "task").write_text(json.dumps([list(kinds), list(backends), list(parts), sample]))
        path = os.pathsep.join([str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])])
        surroundings = {"PYTHONPATH": path, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
        if GPUS in backends:
            surroundings |= stand_in_torch.environment(gpus=8) | {"OMP_NUM_THREADS": "1"}
        ranks = Path(__file__).with_name("torch_programs_ranks.py")
        done = run_command([sys.executable, str(ranks), folder], timeout=1700, environment=surroundings)
        assert done.returncode == 0, done.stdout + done.stderr
        played = sorted(Path(folder).glob("*.played"))
        return [Played(**pickle.loads(file.read_bytes())) for file in played]


def compare(played: Sequence[Played]) -> list[str]:
    """Return what is wrong: programs that failed, and those whose results differ between the backends.

    On GPUs torch composes some operations of others: there the least tolerance is ON_GPUS.
    """
    wrong = [f"{one.backend}: {one.program}: {one.failure}" for one in played if one.failure]
    whole: dict[str, list[Played]] = {}
    for one in played:
        if not one.failure:
            whole.setdefault(one.program, []).append(one)
    for name, (first, *others) in whole.items():
        texts = [(one.backend, difference(first.results, one.results, _tolerance(one))) for one in others]
        wrong += [f"{name} on {first.backend} and {backend}: {text}" for backend, text in texts if text]
    return wrong


def _tolerance(played: Played) -> float:
    return max(played.tolerance, ON_GPUS) if played.backend == GPUS else played.tolerance


def difference(theirs: Any, ours: Any, tolerance: float, where: str = "") -> str:
    """Say where two results differ; "" when they do not."""
    import numpy as np

    if type(theirs) is not type(ours):
        return f"{where}: {theirs!r} and {ours!r}"
    if isinstance(theirs, dict):
        if theirs.keys() != ours.keys():
            return f"{where}: {sorted(theirs)} and {sorted(ours)}"
        pairs = [(theirs[key], ours[key], f"{where}.{key}") for key in theirs]
        return next((text for a, b, place in pairs if (text := difference(a, b, tolerance, place))), "")
    if isinstance(theirs, list | tuple):
        if len(theirs) != len(ours):
            return f"{where}: {len(theirs)} and {len(ours)} values"
        places = [f"{where}[{number}]" for number in range(len(theirs))]
        pairs = list(zip(theirs, ours, places, strict=True))
        return next((text for a, b, place in pairs if (text := difference(a, b, tolerance, place))), "")
    if isinstance(theirs, np.ndarray):
        same_kind = theirs.shape == ours.shape and theirs.dtype == ours.dtype
        if not same_kind or not np.allclose(theirs, ours, rtol=tolerance, atol=tolerance, equal_nan=True):
            return f"{where}: {theirs} and {ours}"
        return ""
    if isinstance(theirs, float):
        return "" if abs(theirs - ours) <= tolerance * max(1.0, abs(theirs)) else f"{where}: {theirs} and {ours}"
    return "" if theirs == ours else f"{where}: {theirs!r} and {ours!r}"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Run programs of torch.distributed on Gloo and on procgroup.")
    parser.add_argument("backend", choices=["gloo", "procgroup", GPUS])
    parser.add_argument("names", nargs="*", help="parts of the programs' names")
    options = parser.parse_args(arguments)
    backends = ["gloo", "procgroup"] if options.backend == "procgroup" else ["gloo"]
    played = play(KINDS, backends, parts=options.names)
    if options.backend == GPUS:
        played += play(KINDS, [GPUS], parts=options.names)
    for one in played:
        print(f"{'failed' if one.failure else 'done':6} {one.seconds:5.1f} s {one.backend:9} {one.program}")
    wrong = compare(played)
    print("\n".join(wrong))
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
