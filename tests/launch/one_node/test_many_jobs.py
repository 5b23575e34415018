"""Many jobs of two ranks that start at once on one host and run beside each other, by each way to start one."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from launch.agents import wait_until

PROGRAM = """
import os, pathlib, sys, time
import numpy
import procgroup as dist

def show_sum(rank, directory, job):
    dist.init_process_group(rank=rank, world_size=2)
    total = numpy.array([job + rank])
    dist.all_reduce(total)
    print("sum", total[0], flush=True)
    while not pathlib.Path(directory, "finish").exists():
        time.sleep(0.02)
    dist.barrier()
    dist.destroy_process_group()

if __name__ == "__main__":
    arguments = sys.argv[-2], int(sys.argv[-1])
    if "RANK" in os.environ:
        show_sum(int(os.environ["RANK"]), *arguments)
    else:
        dist.spawn(show_sum, arguments, nprocs=2)
"""

COMMANDS = [
    pytest.param(["-m", "procgroup", "run", "--nproc-per-node", "2"], id="procgroup run"),
    pytest.param(
        ["-m", "procgroup.launch", "--nproc-per-node", "2"], id="python -m procgroup.launch", marks=pytest.mark.slow
    ),
    pytest.param([], id="procgroup.spawn"),
]


@contextmanager
def running(command: list[str], directory: Path, number: int) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Start so many jobs; the output of each goes to a file that has its number."""
    script = directory / "program.py"
    script.write_text(PROGRAM)
    jobs: list[subprocess.Popen[bytes]] = []
    try:
        for job in range(number):
            with (directory / str(job)).open("wb") as output:
                line = [sys.executable, *command, str(script), str(directory), str(job)]
                jobs.append(subprocess.Popen(line, stdin=subprocess.DEVNULL, stdout=output, stderr=output))
        yield jobs
    finally:
        for each in jobs:
            each.kill()
            each.wait()


@pytest.mark.parametrize("number", [5, pytest.param(64, marks=[pytest.mark.slow, pytest.mark.timeout(400)])])
@pytest.mark.parametrize("command", COMMANDS)
def test_many_jobs_start_at_once_on_one_host(tmp_path: Path, command: list[str], number: int) -> None:
    def shown(job: int) -> str:
        return (tmp_path / str(job)).read_text()

    def all_run() -> bool:
        assert [job.poll() for job in jobs] == [None] * number, "".join(map(shown, range(number)))
        return all(shown(job).count(f"sum {2 * job + 1}\n") == 2 for job in range(number))

    seconds = 40 if number < 64 else 200
    with running(command, tmp_path, number) as jobs:
        wait_until(all_run, seconds, lambda: "".join(map(shown, range(number))))
        (tmp_path / "finish").touch()
        assert [job.wait(seconds) for job in jobs] == [0] * number, "".join(map(shown, range(number)))
