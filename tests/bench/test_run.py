from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import two_hosts

ROOT = Path(__file__).resolve().parent.parent.parent


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / "run.py"), *arguments],
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )


@pytest.mark.skipif(shutil.which("g++") is None, reason="the limit is a C++ program")
@pytest.mark.parametrize("ranks", ["2", "3", "4"])
def test_the_limit_gives_right_sums_and_times_that_grow_with_the_size(tmp_path: Path, ranks: str) -> None:
    report = tmp_path / "report.json"
    # 60 fills one flag line and 4 bytes more; 100,004 is no whole number of chunks, segments or cache lines.
    sizes = "8,60,64K,100004,3M"
    done = run("--peers", "limit", "--ranks", ranks, "--sizes", sizes, "--rounds", "2", "--seconds", "0.01",
               "--json", str(report))  # fmt: skip
    assert done.returncode == 0, done.stderr
    (found,) = json.loads(report.read_text())
    assert found["left_out"] == {}
    assert [one["bytes"] for one in found["sizes"]] == [8, 60, 65536, 100004, 3 << 20]
    medians = [one["peers"]["limit"]["median_ns"] for one in found["sizes"]]
    assert 0 < medians[0] < medians[-1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--sizes", "8,7"], "expected a size like 8, 64K or 1M"),
        (["--peers", "limit,nccl"], "unknown peers nccl; known are procgroup, gloo"),
        (["--ranks", "1"], "expected at least 2 ranks"),
        (["--op", "alltoall"], "unknown operations alltoall; known are all_reduce"),
    ],
)
def test_what_cannot_be_measured_is_refused_before_anything_starts(arguments: list[str], message: str) -> None:
    done = run(*arguments)
    assert done.returncode == 2
    assert message in done.stderr


@pytest.mark.parametrize("text", ["2", "0+1", "1+x", "1+1+1"])
def test_a_layout_names_the_ranks_of_two_hosts(text: str) -> None:
    done = run("--hosts", text)
    assert done.returncode == 2
    assert "expected the ranks of two hosts, such as 2+2" in done.stderr


@pytest.mark.skipif(bool(two_hosts.lacks()), reason=two_hosts.lacks())
def test_ranks_of_two_hosts_are_measured() -> None:
    done = run(
        "--hosts", "2+1", "--peers", "procgroup,procgroup-tcp", "--sizes", "8", "--rounds", "1", "--seconds", "0.01"
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "3 ranks on" in done.stdout
