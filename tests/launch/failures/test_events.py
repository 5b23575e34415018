"""torchrun's events of a job's end, for programs that read them."""

from __future__ import annotations

import json
import os
from typing import Any

from launch.conftest import Launcher

FAILS_ON_ONE = """
    import os, sys, time
    if os.environ["RANK"] == "1":
        sys.exit(3)
    time.sleep(60)
"""

# What torch 2.13 gives in each event.
FIELDS = {
    "run_id",
    "global_rank",
    "group_rank",
    "worker_id",
    "role",
    "hostname",
    "state",
    "total_run_time",
    "rdzv_backend",
    "raw_error",
    "metadata",
    "agent_restarts",
    "duration_ms",
}


def events_of(stderr: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in stderr.splitlines() if line.startswith("{")]


def test_each_rank_and_the_agent_have_an_event_when_the_job_has_ended(launcher: Launcher) -> None:
    done = launcher.run("pass", "-n", "2", "--role", "trainer", "--event-log-handler", "console")
    events = events_of(done.stderr)
    assert [event["source"] for event in events] == ["WORKER", "WORKER", "AGENT"]
    assert all(event["name"] == "torchelastic.worker.status.SUCCEEDED" for event in events)
    assert all(set(event["metadata"]) == FIELDS for event in events)
    assert [event["metadata"]["global_rank"] for event in events] == [0, 1, None]
    assert {event["metadata"]["role"] for event in events} == {"trainer"}
    assert {event["metadata"]["hostname"] for event in events} == {os.uname().nodename}
    details = json.loads(events[1]["metadata"]["metadata"])
    assert (details["local_rank"], details["group_world_size"], details["exit_code"]) == (1, 1, 0)


def test_events_say_which_rank_failed_and_which_were_ended_before_the_report(launcher: Launcher) -> None:
    done = launcher.run(FAILS_ON_ONE, "-n", "2", "--event-log-handler=console")
    assert done.returncode == 3
    events = events_of(done.stderr)
    assert [event["metadata"]["state"] for event in events] == ["TERMINATED", "FAILED", "FAILED"]
    assert json.loads(events[1]["metadata"]["metadata"])["exit_code"] == 3
    assert "failed first: exit code 3" in done.stderr.splitlines()[-1]


def test_nothing_is_written_unless_asked_for(launcher: Launcher) -> None:
    assert events_of(launcher.run("pass", "-n", "2").stderr) == []
