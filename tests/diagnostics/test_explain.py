"""``procgroup explain`` says of a job, live or dead, which rank is the cause, in which line, and who waits for it."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import procgroup as dist
from waiting import Meeting, wait_until_in_a_call
from world import World, run_command, start

CULPRIT = 2
HERE = r"test_explain\.py:\d+"


def explain(directory: Path, *flags: str) -> tuple[int, str]:
    """Run the command on the newest job of a directory; return its exit status and what it prints."""
    command = [sys.executable, "-m", "procgroup", "explain", *flags]
    environment = os.environ | {"PROCGROUP_RECORD_DIR": str(directory)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=250, check=False)
    return done.returncode, done.stdout + done.stderr


def load_batch(fault: str) -> None:
    if fault == "sleeps":
        time.sleep(60)
    elif fault == "waits at a store":
        dist.HashStore().wait(["never set"], timedelta(seconds=60))
    elif fault == "computes":
        while True:
            pass
    elif fault == "holds the lock":
        re.match("(a+)+b", 60 * "a")  # for longer than the universe has been there
    elif fault == "stops":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif fault == "is killed":
        os.kill(os.getpid(), signal.SIGKILL)
    elif fault == "calls something else":
        dist.broadcast(np.ones(2), 0)
    elif fault == "receives":
        dist.recv(np.ones(2), 0)


def train(rank: int, size: int, fault: str) -> None:
    dist.init_process_group()
    for _ in range(3):
        dist.all_reduce(np.ones(4))
    print("trained", flush=True)
    if rank == CULPRIT:
        load_batch(fault)
    dist.all_reduce(np.ones(4))
    dist.destroy_process_group()


def started(tmp_path: Path, fault: str, **variables: str) -> World:
    environment = {"PROCGROUP_RECORD_DIR": str(tmp_path), "PROCGROUP_WAIT_REPORT_SECONDS": "0"} | variables
    return start(train, 4, args=(fault,), environment=environment)


def sentence(tmp_path: Path, *fragments: str) -> str:
    """Return the first line of what is explained, once it has these in it."""
    deadline = time.monotonic() + 40
    while True:
        status, text = explain(tmp_path)
        line = text.splitlines()[0]
        if all(fragment in line for fragment in fragments):
            assert status == 1
            return line
        assert time.monotonic() < deadline, text
        time.sleep(0.2)


@pytest.mark.parametrize(
    ("fault", "transport"),
    [("sleeps", "shm"), ("sleeps", "tcp"), ("computes", "shm"), ("holds the lock", "tcp"), ("waits at a store", "shm")],
)
def test_a_late_rank_is_named_with_its_line_and_those_who_wait(tmp_path: Path, fault: str, transport: str) -> None:
    place, fragment = rf"load_batch at {HERE}, called by train at {HERE}", "it is in load_batch"
    if fault == "holds the lock":
        place, fragment = rf"match at \S+, called by load_batch at {HERE}", "it is in match"
    with started(tmp_path, fault, PROCGROUP_TRANSPORT=transport):
        line = sentence(tmp_path, fragment, "ranks 0, 1, 3 have waited")
    assert re.fullmatch(
        rf"rank 2 never entered all_reduce #4 of group 0 at {HERE}; it is in {place}; "
        r"ranks 0, 1, 3 have waited for \d+\.\d s",
        line,
    ), line


def test_a_stopped_rank_is_said_to_be_stopped_and_its_last_call_is_told(tmp_path: Path) -> None:
    with started(tmp_path, "stops"):
        line = sentence(tmp_path, "ranks 0, 1, 3 have waited")
    assert re.fullmatch(
        r"rank 2 is stopped \(SIGSTOP; pid \d+ on \S+\); it was in no call( for \d+\.\d s)?; its last was "
        rf"all_reduce #3 of group 0 at {HERE}; ranks 0, 1, 3 have waited for it in all_reduce #4 of group 0 "
        rf"at {HERE}, for \d+\.\d s",
        line,
    ), line


def test_after_the_end_of_a_job_the_rank_that_was_killed_is_named(tmp_path: Path) -> None:
    with started(tmp_path, "is killed") as world:
        world.wait()
    line = sentence(tmp_path, "rank 2")
    assert re.fullmatch(
        r"rank 2 is lost: its process \(pid \d+ on \S+\) was killed, or crashed(, \d+\.\d s ago)?; it was in no call; "
        rf"its last was all_reduce #3 of group 0 at {HERE}; all_reduce #4 of group 0 at {HERE} failed on ranks 0, 1, 3",
        line,
    ), line


RAISES = """
import numpy as np
import procgroup as dist

dist.init_process_group()
dist.all_reduce(np.ones(4))
if dist.get_rank() == 2:
    raise ValueError("no such file")
dist.all_reduce(np.ones(4))
"""


def test_after_the_end_of_a_job_the_rank_that_raised_is_named_with_its_exception(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(RAISES)
    environment = os.environ | {"PROCGROUP_RECORD_DIR": str(tmp_path)}
    command = [sys.executable, "-m", "procgroup", "run", "--nproc-per-node", "4", str(program)]
    assert run_command(command, timeout=250, environment=environment).returncode == 1
    line = sentence(tmp_path, "rank 2")
    assert re.fullmatch(
        r"rank 2 failed: ValueError: no such file \(program\.py:8\)(, \d+\.\d s ago)?; it was in no call; its last was "
        r"all_reduce #1 of group 0 at program\.py:6; all_reduce #2 of group 0 at program\.py:9 failed on ranks 0, 1, 3",
        line,
    ), line


def test_different_calls_are_told_with_the_line_of_each_rank(tmp_path: Path) -> None:
    with started(tmp_path, "calls something else") as world:
        world.wait()
    line = sentence(tmp_path, "different calls")
    others = rf"all_reduce\(SUM\) of 4 float64 at {HERE}"
    assert re.fullmatch(
        rf"the ranks made different calls as #4 of group 0: rank 0: {others}, rank 1: {others}, "
        rf"rank 2: broadcast of 2 float64 from rank 0 at {HERE}, rank 3: {others}",
        line,
    ), line


def test_all_ranks_are_killed_and_the_records_tell_what_they_did(tmp_path: Path) -> None:
    with started(tmp_path, "sleeps") as world:
        world.wait_for_output(CULPRIT, "trained")
        others = [pid for rank, pid in enumerate(world.pids) if rank != CULPRIT]
        wait_until_in_a_call(others, of=4, records=tmp_path)
        for number in (signal.SIGSTOP, signal.SIGKILL):  # so that none sees the end of another
            for rank in range(4):
                world.kill(rank, number)
    status, text = explain(tmp_path, "--json")
    ranks = json.loads(text)["ranks"]
    assert status == 1 and [rank["state"] for rank in ranks] == ["lost"] * 4
    for rank in ranks:
        states = [call["state"] for call in rank["calls"]]
        assert states == ["completed"] * 3 + ["started"] * (rank["rank"] != CULPRIT)
        for call in rank["calls"]:
            assert call["op"] == "all_reduce" and call["bytes"] == 32 and re.search(HERE, call["line"])
            assert call["group"]["name"] == "0" and call["group"]["members"] == [0, 1, 2, 3]
            assert 0 < call["issued"] <= call["started"] and (call["ended"] >= call["started"] or not call["ended"])


def succeed(rank: int, size: int, meeting: Meeting) -> None:
    dist.init_process_group()
    for step in range(20):
        if rank == 1:
            meeting.wait_for(f"step {step}")
            time.sleep(0.01)  # rank 0 waits for it meanwhile
        else:
            meeting.reach(f"step {step}")
        dist.all_reduce(np.ones(4))
    work: Any = dist.all_reduce(np.ones(4), async_op=True)
    work.wait()
    dist.send(np.ones(4), 1) if rank == 0 else dist.recv(np.ones(4), 0)
    dist.destroy_process_group()


@pytest.fixture(name="ended", scope="module")
def fixture_ended(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The records of a job of two ranks that has ended well."""
    directory, meeting = tmp_path_factory.mktemp("records"), Meeting(tmp_path_factory.mktemp("meeting"))
    with start(succeed, 2, args=(meeting,), environment={"PROCGROUP_RECORD_DIR": str(directory)}) as world:
        assert all(outcome.ok for outcome in world.wait())
    return directory


def test_nothing_is_wrong_with_a_job_that_ended_in_order(ended: Path) -> None:
    status, text = explain(ended)
    assert status == 0 and re.match(r"all 2 ranks of job \w+ left in order\n", text), text


def test_the_rank_that_comes_last_is_told_with_what_that_costs(ended: Path) -> None:
    _, text = explain(ended)
    found = re.search(
        r"rank 1 is the last in (\d+) of 21 calls of all_reduce; the others wait (\S+) (m?)s for it, (\S+) %", text
    )
    assert found and int(found[1]) >= 15 and 20 < float(found[4]) <= 100, text
    assert float(found[2]) / (1000 if found[3] else 1) > 0.1, text


def test_the_trace_has_every_call_with_its_line_and_times(ended: Path, tmp_path: Path) -> None:
    file = tmp_path / "trace.json"
    explain(ended, "--trace", str(file))
    events = [event for event in json.loads(file.read_text())["traceEvents"] if event["ph"] == "X"]
    for rank in (0, 1):
        names = [event["name"] for event in events if event["pid"] == rank]
        message = "send #1" if rank == 0 else "recv #1"
        assert sorted(names) == sorted([*(f"all_reduce #{number}" for number in range(1, 22)), message])
    for event in events:
        assert event["ts"] >= 0 and event["dur"] >= 0 and re.search(HERE, event["args"]["line"])
        assert event["cat"] == ("message" if event["name"] in ("send #1", "recv #1") else "collective")


def test_jobs_are_listed_and_found_by_the_beginning_of_their_name_and_as_directories(ended: Path) -> None:
    name = next(ended.iterdir()).name
    status, text = explain(ended, "--list")
    assert status == 0 and text.startswith(name) and "2 of 2 ranks" in text
    for which in (name[:4], str(ended / name)):
        assert explain(ended, which)[0] == 0
    status, text = explain(ended, "another")
    assert (status, text) == (2, f"procgroup explain: there is no flight record of job 'another' (kept in {ended})\n")


def test_a_job_is_found_by_its_run_id(tmp_path: Path) -> None:
    records, meeting = tmp_path / "records", tmp_path / "meeting"
    meeting.mkdir()
    variables = {"PROCGROUP_RECORD_DIR": str(records), "TORCHELASTIC_RUN_ID": "nightly"}
    with start(succeed, 2, args=(Meeting(meeting),), environment=variables) as world:
        assert all(outcome.ok for outcome in world.wait())
    status, text = explain(records, "nightly")
    assert status == 0 and text.startswith("all 2 ranks of job nightly left in order")


def test_a_file_that_is_no_record_is_reported(tmp_path: Path) -> None:
    job = tmp_path / "job"
    job.mkdir()
    (job / "0-1.record").write_bytes(b"\xfe" * 200_000)
    status, text = explain(tmp_path, str(job))
    assert status == 2 and "0-1.record: this is not a flight record of procgroup" in text
    (job / "0-1.record").write_bytes(b"pgflight")
    status, text = explain(tmp_path, str(job))
    assert status == 2 and "cut short" in text
