"""PyTorch's own tests of torch.distributed, run on Gloo and on procgroup, with three ranks.

They are the tests of ``torch.testing._internal.distributed.distributed_test`` in the installed wheel, which PyTorch
runs on each of its backends. Many of them look at the backend's name to know whether they apply, so that is decided
with Gloo's name always. They are run on procgroup twice: under Gloo's name (PROCGROUP_REPLACE_GLOO), and under its
own. In NCCL's place (PROCGROUP_REPLACE_NCCL) they are run on stand-in GPUs. Every group that a test makes is looked
at, so that none of them is Gloo's in truth.

    python tests/parity/torch_suite.py gloo --write      # run all on Gloo, and write down which pass
    python tests/parity/torch_suite.py replaced          # run those on procgroup under Gloo's name
    python tests/parity/torch_suite.py procgroup test_reduce_sum test_gather
    python tests/parity/torch_suite.py nccl --write      # run all in NCCL's place, and write down which pass
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
PASSES = Path(__file__).with_name("torch_suite_passes.txt")
PASSES_ON_GPUS = Path(__file__).with_name("torch_suite_passes_on_gpus.txt")
SIZE = 3
SECONDS = 120.0
"""What one test may take, and none of those that pass comes near."""

if __name__ == "__main__":
    sys.path.insert(0, str(TESTS))

FEW_RANKS = "that PyTorch skips with fewer than 8 ranks"
MPI_ONLY = "that PyTorch skips but on MPI"

BEYOND_GLOO = ["test_all_to_all", "test_all_to_all_complex", "test_all_to_all_full_group", "test_all_to_all_group"]
"""They pass on procgroup alone: Gloo refuses tensors of different sizes."""

GLOO_BY_NAME = [
    "test_accumulate_gradients_no_sync",
    "test_accumulate_gradients_no_sync_allreduce_hook",
    "test_accumulate_gradients_no_sync_allreduce_with_then_hook",
    "test_accumulate_gradients_no_sync_grad_is_view",
    "test_monitored_barrier_failure_order",
    "test_monitored_barrier_gloo",
    "test_monitored_barrier_gloo_rank_0_timeout",
    "test_monitored_barrier_gloo_subgroup",
    "test_monitored_barrier_wait_all_ranks",
]
"""They cannot pass under another name: they, or torch's monitored_barrier, ask for a backend called "gloo"."""

NCCL = "nccl"
ON = ["gloo", "replaced", "procgroup", NCCL]
"""What the tests are run on: Gloo, procgroup under Gloo's name, under its own, and in NCCL's place on stand-in GPUs."""


@dataclass(frozen=True)
class Verdict:
    """What became of one test on all its ranks."""

    test: str
    outcome: str
    """"passed", "skipped" or "failed"."""
    reason: str = ""
    lifted: str = ""
    """Which rule of PyTorch's would have skipped it, if it were not lifted here."""
    seconds: float = 0.0
    output: str = ""
    """All that the ranks printed, of a test that failed."""


def play(backend: str, tests: Sequence[str] = ()) -> list[Verdict]:
    """Run the tests, or all there are, one after the other, and return what became of each."""
    from torch_gpus import stand_in_torch

    from world import run_command

    with tempfile.TemporaryDirectory(prefix="torch-suite-") as folder:
        Path(folder, "task").write_text(json.dumps({"backend": backend, "tests": list(tests)}))
        path = os.pathsep.join([str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])])
        surroundings = {
            "BACKEND": "nccl" if backend == NCCL else "gloo",
            "PROCGROUP_REPLACE_GLOO": str(int(backend == "replaced")),
            "PYTHONPATH": path,
            "WORLD_SIZE": str(SIZE),
            "MASTER_ADDR": "127.0.0.1",
            "INIT_METHOD": f"file://{folder}/meeting",
            "TEMP_DIR": folder,
            "GLOO_SOCKET_IFNAME": "lo",
            "PYTORCH_PRINT_REPRO_ON_FAILURE": "0",
        }
        if backend == NCCL:
            surroundings |= {**stand_in_torch.environment(gpus=SIZE), "PROCGROUP_REPLACE_NCCL": "1"}
            surroundings["PROCGROUP_REPLACE_GLOO"] = "1"
        ranks = Path(__file__).with_name("torch_suite_ranks.py")
        limit = 120 + SECONDS * (len(tests) or 1000)
        done = run_command([sys.executable, str(ranks), folder], timeout=limit, environment=surroundings)
        assert done.returncode == 0, done.stdout + done.stderr
        return [Verdict(**json.loads(line)) for line in Path(folder, "verdicts").read_text().splitlines()]


def leave(folder: str, verdict: Verdict) -> None:
    """Write down one verdict where `play` finds it."""
    with Path(folder, "verdicts").open("a") as file:
        file.write(json.dumps(asdict(verdict)) + "\n")


def _names_in(passes: Path) -> list[str]:
    return [line for line in passes.read_text().splitlines() if line and not line.startswith("#")]


def passing_on(backend: str) -> list[str]:
    """Return the tests that are to pass on one of what they can be run on."""
    if backend == NCCL:
        return _names_in(PASSES_ON_GPUS)
    if backend != "procgroup":
        return _names_in(PASSES)
    return [test for test in _names_in(PASSES) if test not in GLOO_BY_NAME] + BEYOND_GLOO


def page(verdicts: Sequence[Verdict], version: str, backend: str) -> str:
    """Return the text of torch_suite_passes.txt, or of torch_suite_passes_on_gpus.txt."""
    where = "on procgroup in NCCL's place, on stand-in GPUs" if backend == NCCL else "on Gloo, on CPU"
    counts = Counter(verdict.outcome for verdict in verdicts)
    reasons = Counter(verdict.reason for verdict in verdicts if verdict.outcome == "skipped")
    lines = [
        f"# Of PyTorch {version}'s own {len(verdicts)} tests of torch.distributed, these {counts['passed']} pass",
        f"# {where}, with {SIZE} ranks.",
        f"# Written by: python tests/parity/torch_suite.py {backend} --write",
        f"# {counts['skipped']} are skipped:",
        *(f"#   {count} {reason}" for reason, count in reasons.most_common()),
        f"# {counts['failed']} fail:",
        *(f"#   {verdict.test}: {verdict.reason}" for verdict in verdicts if verdict.outcome == "failed"),
    ]
    for lifted in ("", FEW_RANKS, MPI_ONLY):
        passed = [verdict.test for verdict in verdicts if verdict.outcome == "passed" and verdict.lifted == lifted]
        lines += ["", f"# {len(passed)} {lifted or f'that PyTorch runs with {SIZE} ranks'}:", *passed]
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Run PyTorch's own tests of torch.distributed.")
    parser.add_argument("backend", choices=ON)
    parser.add_argument("tests", nargs="*", help="the tests' names; by default those that are to pass")
    parser.add_argument("--all", action="store_true", help="all tests that there are")
    parser.add_argument("--write", action="store_true", help="all tests, and write down which pass")
    parser.add_argument("--output", type=Path, help="where to keep what the ranks of failed tests printed")
    options = parser.parse_args(arguments)
    everything = options.all or options.write
    verdicts = play(options.backend, options.tests or ([] if everything else passing_on(options.backend)))
    if options.write:
        import torch

        passes = PASSES_ON_GPUS if options.backend == NCCL else PASSES
        passes.write_text(page(verdicts, torch.__version__.split("+")[0], options.backend))
    if options.output:
        failed = (verdict for verdict in verdicts if verdict.outcome == "failed")
        options.output.write_text("\n".join(f"=== {verdict.test}\n{verdict.output}" for verdict in failed))
    for verdict in verdicts:
        print(f"{verdict.outcome} {verdict.seconds:5.1f} s {verdict.test} {verdict.reason}")
    print(dict(Counter(verdict.outcome for verdict in verdicts)))
    return int(any(verdict.outcome == "failed" for verdict in verdicts))


if __name__ == "__main__":
    sys.exit(main())
