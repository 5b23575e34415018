"""benchmarks/gpu.py on the stand-ins of NCCL and CUDA's driver: what it reports, and how it ends when a rank ends."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

import psutil
import pytest
from nccl import stand_ins

from world import run_command

COMMAND = [sys.executable, str(Path(__file__).parents[2] / "benchmarks" / "gpu.py"), "--seconds", "60"]
ONE_WAY = ["all_reduce", "all_gather", "reduce_scatter", "broadcast"]

if shutil.which(os.environ.get("CXX", "g++")) is None:
    pytest.skip("the stand-ins are C++ libraries", allow_module_level=True)


@pytest.fixture(scope="module")
def environment() -> dict[str, str]:
    return {**stand_ins.environment(), "PROCGROUP_STAND_IN_NCCL_VERSION": "23203"}


def ranks_of(driver: int) -> Sequence[psutil.Process]:
    return [child for child in psutil.Process(driver).children() if "spawn_main" in " ".join(child.cmdline())]


@pytest.mark.skipif(find_spec("cupy") is not None, reason="CuPy has no stand-in")
def test_every_operation_of_the_installed_peers_is_in_the_table_and_in_the_json(
    tmp_path: Path, environment: dict[str, str]
) -> None:
    report = tmp_path / "gpu.json"
    chosen = ["--sizes", "8", "4K", "--turns", "2", "--peers", "procgroup", "cupy", "bare", "--json", str(report)]
    done = run_command([*COMMAND, *chosen], environment=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "cupy was left out: CuPy is not installed" in done.stdout
    wanted = [
        (ranks, operation, size, peer)
        for ranks, operations in ((1, ONE_WAY), (2, [*ONE_WAY, "send_recv"]))
        for size in (8, 4096)
        for operation in operations
        for peer in ("procgroup", "bare")
    ]
    records = json.loads(report.read_text())
    assert [(one["ranks"], one["operation"], one["bytes"], one["peer"]) for one in records] == wanted
    for one in records:
        assert one["calls"] > 0
        assert all(0 < one[name]["minimum"] <= one[name]["median"] for name in ("host_us", "done_us"))
    rows = re.findall(r"^(\w+) +(8|4K)  (procgroup|bare)( +[\d.,]+){4}$", done.stdout, re.MULTILINE)
    assert [row[:3] for row in rows] == [
        (operation, "8" if size == 8 else "4K", peer) for _, operation, size, peer in wanted
    ]
    assert re.search(
        r"^2 ranks, \d{4}-\d\d-\d\d: stand-in GPU 0, CUDA 13.0, NCCL 2.32.3, procgroup ", done.stdout, re.M
    )


def test_a_rank_that_is_killed_ends_the_run_with_what_was_measured(tmp_path: Path, environment: dict[str, str]) -> None:
    report = tmp_path / "gpu.json"
    sizes = [str(8 * number) for number in range(1, 100)]
    chosen = ["--ranks", "2", "--peers", "procgroup", "bare", "--json", str(report), "--sizes", *sizes]
    with subprocess.Popen(
        [*COMMAND, *chosen],
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as driver:
        assert driver.stdout is not None
        shown = ""
        while "bare" not in shown:
            shown += (line := driver.stdout.readline())
            assert line, driver.communicate()
        ranks = ranks_of(driver.pid)
        assert len(ranks) == 2
        ranks[0].send_signal(signal.SIGKILL)
        _, errors = driver.communicate(timeout=120)
    assert driver.returncode == 1
    assert errors.startswith("Stopped; the rows above are what was measured. ")
    assert re.search(r": rank \d has ended, exit status -9$", errors)
    assert not psutil.wait_procs(ranks, timeout=10)[1], "the other rank runs on"
    measured = [(one["operation"], one["bytes"], one["peer"]) for one in json.loads(report.read_text())]
    assert measured[:2] == [("all_reduce", 8, "procgroup"), ("all_reduce", 8, "bare")]


def test_two_ranks_are_left_out_where_nccl_does_not_let_them_share_a_gpu(environment: dict[str, str]) -> None:
    older = {**environment, "PROCGROUP_STAND_IN_NCCL_VERSION": "22907"}
    done = run_command([*COMMAND, "--ranks", "2", "--sizes", "8", "--peers", "bare"], environment=older)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 ranks were left out: on one GPU they need NCCL 2.30, this is 2.29.7" in done.stdout
