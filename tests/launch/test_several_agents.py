"""The failure report and the logs of a job whose agents are several."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from world import free_port

FAILS_ON_THE_LAST_RANK = """
    import os
    import numpy as np
    import procgroup as dist

    dist.init_process_group()
    print("attempt", os.environ["TORCHELASTIC_RESTART_COUNT"])
    dist.all_reduce(np.ones(3))
    if dist.get_rank() == 3:
        raise ValueError("boom of three")
    dist.all_reduce(np.ones(3))
"""


def run_agents(script: Path, *flags: str) -> list[tuple[int, str, str]]:
    """Run two agents with two ranks each; return their exit statuses, stdouts and stderrs."""
    place = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{free_port()}", "--rdzv-id", "job"]
    command = [sys.executable, "-m", "procgroup", "run", "--nnodes", "2", "-n", "2", *place, *flags, str(script)]
    agents = [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    try:
        outputs = [agent.communicate(timeout=50) for agent in agents]
    finally:
        for agent in agents:
            agent.kill()
    return [(agent.returncode, *output) for agent, output in zip(agents, outputs, strict=True)]


def test_every_agent_ends_with_the_first_failing_rank_s_own_traceback(launcher: Any) -> None:
    logs = launcher.directory / "logs"
    flags = ["--max-restarts", "1", "--log-dir", str(logs)]
    ended = run_agents(launcher.script(FAILS_ON_THE_LAST_RANK), *flags)
    for status, _, stderr in ended:
        assert status == 1
        assert stderr.endswith("ValueError: boom of three\n")
        assert stderr.count(f"logs are kept in {logs}/job") == 1
        report = stderr[stderr.rindex(") failed first: ") :].splitlines()
        assert report[1] == "Traceback (most recent call last):"
        consequences = [line for line in stderr.splitlines() if "failed after that: " in line]
        assert all("rank 3 failed: ValueError" in line for line in consequences)
        assert stderr.splitlines().count(report[1]) == 1, "the others' tracebacks have a prefix"
    host = os.uname().nodename
    shown = "".join(stdout for _, stdout, _ in ended)
    for rank in range(4):
        for attempt in range(2):
            assert f"[rank {rank} {host}] attempt {attempt}\n" in shown
            kept = logs / "job" / f"attempt_{attempt}" / str(rank) / "stdout.log"
            assert kept.read_text() == f"attempt {attempt}\n"
