"""The process that runs PyTorch's tests for `torch_suite`: it imports torch once, and forks the ranks of each test.

A rank does what a process of PyTorch's MultiProcessTestCase does, so a test has new processes and a new group of its
own; what is saved is the import of torch in each of them. Whether a test passed is asked more strictly than there: each
rank must say so.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import sys
import tempfile
import time
import unittest
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from parity import forked, torch_groups
from parity.torch_suite import FEW_RANKS, MPI_ONLY, SECONDS, SIZE, Verdict, leave

Test = Callable[..., Any]


def main(folder: str) -> int:
    task = json.loads(Path(folder, "task").read_text())
    suite = suite_on(task["backend"])
    for test in task["tests"] or unittest.TestLoader().getTestCaseNames(suite):
        leave(folder, judge(suite, test, task["backend"], folder))
    return 0


def suite_on(backend: str) -> Any:
    """Return PyTorch's test case, made for a backend."""
    import torch
    from torch.testing._internal import common_distributed

    torch.set_num_threads(1)
    if backend != "gloo":
        import procgroup.torch_plugin

        procgroup.torch_plugin.register()
    lift_skips(common_distributed)
    from torch.testing._internal.distributed import distributed_test

    if backend == "procgroup":
        rename(distributed_test, backend)

    class Suite(distributed_test.TestDistBackend, distributed_test.DistributedTest._DistTestBase):  # type: ignore[misc]
        pass

    return Suite


def rename(distributed_test: Any, backend: str) -> None:
    """Have the tests use another backend. Which of them apply was decided with Gloo's name, when they were imported."""
    os.environ["BACKEND"] = distributed_test.BACKEND = backend
    for backends in distributed_test.DistTestCases.backend_feature.values():
        if "gloo" in backends:
            backends.add(backend)
    distributed_test.PROFILING_SUPPORTED_BACKENDS.append(backend)
    distributed_test.SEND_RECV_PROFILING_SUPPORTED_BACKENDS.append(backend)


def lift_skips(common_distributed: Any) -> None:
    """Have those tests run too that PyTorch skips with fewer than 8 ranks or without MPI, for no reason of theirs."""
    from torch.testing._internal import common_utils

    skip_if = common_utils.skip_but_pass_in_sandcastle_if

    def lifted(test: Test, why: str) -> Test:
        test.skip_lifted = why  # type: ignore[attr-defined]
        return test

    def skip_unless_lifted(condition: bool, reason: str) -> Callable[[Test], Test]:
        if condition and reason.startswith("Only MPI supports"):
            return lambda test: lifted(test, MPI_ONLY)
        decorated: Callable[[Test], Test] = skip_if(condition, reason)
        return decorated

    common_distributed.skip_if_small_worldsize = lambda test: lifted(test, FEW_RANKS)
    common_utils.skip_but_pass_in_sandcastle_if = skip_unless_lifted


def judge(suite: Any, test: str, backend: str, folder: str) -> Verdict:
    """Run one test on new ranks."""
    method = getattr(suite, test)
    lifted = getattr(method, "skip_lifted", "")
    if getattr(method, "__unittest_skip__", False):
        return Verdict(test, "skipped", method.__unittest_skip_why__, lifted)
    started = time.monotonic()
    with tempfile.TemporaryDirectory(dir=folder) as name:
        place = Path(name)
        for inner in ("barrier", "test_dir", "init_dir"):
            Path(place, inner).mkdir()
        pipes = [multiprocessing.Pipe() for _ in range(SIZE)]
        codes = forked.run(be_rank, SIZE, place, SECONDS, (suite, test, [theirs for _, theirs in pipes]))
        messages = [str(ours.recv()) for ours, _ in pipes if ours.poll()]
        output = forked.output(place, SIZE)
        strangers = torch_groups.strangers(place, "torch" if backend == "gloo" else "procgroup")
    seconds = time.monotonic() - started
    outcome, reason = conclude(codes, messages, output)
    if outcome == "passed" and strangers:
        outcome, reason = "failed", f"there are groups of {strangers}"
    return Verdict(test, outcome, reason, lifted, seconds, output if outcome == "failed" else "")


def be_rank(rank: int, place: Path, suite: Any, test: str, pipes: Sequence[Any]) -> None:
    """Be what PyTorch's test case starts a process for."""
    from torch.testing._internal.distributed import distributed_test

    os.environ["TEMP_DIR"] = str(place)
    os.environ["INIT_METHOD"] = distributed_test.INIT_METHOD = f"file://{place}/init_dir/shared_init_file"
    torch_groups.write_down(Path(place, f"{rank}.groups"))
    suite._run(rank, test, f"{place}/meeting", pipes[rank])


def conclude(codes: Sequence[int], messages: Sequence[str], output: str) -> tuple[str, str]:
    """Say what the exit codes mean, as PyTorch's test case does."""
    from torch.testing._internal.common_distributed import TEST_SKIPS

    if not any(codes):
        return "passed", ""
    skips = {skip.exit_code: skip.message for skip in TEST_SKIPS.values()}
    if len(set(codes)) == 1 and codes[0] in skips:
        said = re.search(r"for following reason: (.*)", output)
        return "skipped", said[1] if said else skips[codes[0]]
    last = {message.strip().splitlines()[-1] for message in messages}
    return "failed", f"exit codes {list(codes)}: {' | '.join(sorted(last))}"


if __name__ == "__main__":
    from parity import torch_suite_ranks as this  # so that there is one of each class

    sys.exit(this.main(sys.argv[1]))
