"""``procgroup bench``: what it measures, prints and writes, and what it refuses before anything starts."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

from procgroup.diagnostics.bench import command, report
from world import run_command

QUICK = ["--rounds", "2", "--seconds", "0.01", "--timeout", "60"]


def bench(directory: Path, *arguments: str) -> str:
    done = run_command(
        [sys.executable, "-m", "procgroup", "bench", *arguments, *QUICK], directory=directory, timeout=250
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_it_prints_a_table_and_writes_every_round_without_rich(tmp_path: Path) -> None:
    (tmp_path / "rich.py").write_text("raise ImportError('rich is not installed')")
    peers = "procgroup,procgroup-symmetric"
    shown = bench(tmp_path, "--op", "all_reduce,barrier", "--sizes", "8,64K", "--peers", peers, "--json", "all.json")
    assert re.search(r"^all_reduce, float32, 2 ranks on \d+ cores?$", shown, re.MULTILINE)
    assert re.search(r"^ +8  procgroup +[\d.,]+ +[\d.,]+$", shown, re.MULTILINE)
    row = r"^ +64K  procgroup-symmetric +[\d.,]+ +[\d.,]+ +[\d.,]+ +[\d.,]+ to \S+  (ahead|behind|open)$"
    assert re.search(row, shown, re.MULTILINE)
    reports = json.loads((tmp_path / "all.json").read_text())
    assert [(report["operation"], report["dtype"], report["ranks"]) for report in reports] == [
        ("all_reduce", "float32", 2),
        ("barrier", "float32", 2),
    ]
    assert [size["bytes"] for size in reports[0]["sizes"]] == [8, 65536]
    assert [len(peer["rounds"]) for peer in reports[0]["sizes"][1]["peers"].values()] == [2, 2]


def test_it_draws_and_measures_another_dtype_on_more_ranks(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    arguments = [
        "--op",
        "all_gather,reduce_scatter",
        "-n",
        "3",
        "--dtype",
        "int64",
        "--sizes",
        "8,1K",
        "--peers",
        "procgroup",
    ]
    shown = bench(tmp_path, *arguments, "--plot", "times.svg")
    assert "reduce_scatter, int64, 3 ranks" in shown
    assert "ratio" not in shown, "one peer alone compares nothing"
    assert (tmp_path / "times.svg").stat().st_size > 1000


@pytest.mark.slow
@pytest.mark.torch
def test_gloo_takes_part_where_pytorch_is_installed(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    (tmp_path / "rich.py").write_text("raise ImportError('rich is not installed')")
    shown = bench(tmp_path, "--op", "all", "--sizes", "8,64K", "--peers", "procgroup,gloo")
    for operation in command.OPERATIONS:
        assert f"{operation}, float32, 2 ranks" in shown
    assert len(re.findall(r"^ +\d+K?  gloo ", shown, re.MULTILINE)) == 2 * (len(command.OPERATIONS) - 1) + 1


def refusal(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    with pytest.raises(SystemExit) as ended:
        command.main(arguments)
    assert ended.value.code == 2
    return capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--op", "alltoall"], "unknown operations alltoall; known are all_reduce"),
        (["--peers", "procgroup,nccl"], "unknown peers nccl; known are procgroup, gloo, mpi"),
        (["--sizes", "12", "--dtype", "float64"], "whole elements of 8 bytes; got '12'"),
        (["--ranks", "1"], "expected at least 2 ranks and 1 round"),
        (["--json", "nowhere/a.json"], "there is no directory"),
    ],
)
def test_what_cannot_be_measured_is_refused(
    arguments: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert sentence in refusal(capsys, *arguments)


def test_a_rank_of_a_job_is_told_to_run_it_without_a_launcher(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", "0")
    assert "starts its own ranks: run it once, without a launcher" in refusal(capsys)


def test_a_picture_without_matplotlib_is_refused_before_anything_is_measured(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(report, "find_spec", lambda name: None)
    assert "pip install matplotlib" in refusal(capsys, "--plot", "times.png")


def test_a_peer_that_was_asked_for_and_is_not_installed_is_a_failure(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command.installed, "find_spec", lambda name: None)
    monkeypatch.setattr(command.signal, "signal", lambda *_: None)
    assert command.main(["--peers", "gloo,mpi", *QUICK]) == 1
    shown = capsys.readouterr().out
    assert "gloo was left out: PyTorch, which brings Gloo, is not installed" in shown
    assert "mpi was left out: mpi4py is not installed" in shown
