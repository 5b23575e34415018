"""Start the agents of one job side by side, on this host or on several, and watch the ranks that they run.

Every rank runs PROGRAM: it joins the default group, adds 1 over all ranks, shows a line that says where it is and what
the sum was, and then takes orders until the job is to finish. A round is one start of all ranks; its ranks are the
processes that have shown their line and are alive: a round of 3 runs when exactly ranks 0, 1 and 2 of 3 are alive. ::

    job = Job(directory, static(2))
    start_all(job, 2)
    first = job.wait_for_round(2)
    job.order(1, "sys.exit(17)")
    job.wait_for_round(2, restarts=1, after=first)
    assert job.finish() == [0, 0]
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

import world
from waiting import wait_until

PROGRAM = """
import json, os, pathlib, signal, sys, time
import numpy
import procgroup as dist

orders = pathlib.Path(sys.argv[1])
rank = int(os.environ["RANK"])
dist.init_process_group()
total = numpy.ones(1)
dist.all_reduce(total)
elastic = {name: text for name, text in os.environ.items() if name.startswith("TORCHELASTIC")}
shown = dict(pid=os.getpid(), rank=rank, size=int(os.environ["WORLD_SIZE"]), node=int(os.environ["GROUP_RANK"]),
             restarts=int(elastic["TORCHELASTIC_RESTART_COUNT"]), total=int(total[0]), environment=dict(os.environ))
print("runs", json.dumps(shown), flush=True)
while not (orders / "finish").exists():
    order = orders / f"rank-{rank}"
    if order.exists():
        text = order.read_text()
        order.unlink()
        exec(text)
    time.sleep(0.02)
dist.destroy_process_group()
"""

MARK = "LAUNCH_TEST_JOB"
"""The variable that names the job's directory in every process of the job."""

SOON = "keep_alive_interval=0.3,last_call_timeout=1"
"""For --rdzv-conf: a silent node is lost after 1.5 s, and a job of fewer than MAX nodes begins after 1 s."""

WITHIN = 30.0
"""Seconds until agents have done what is to be done: 1 to 3 where nothing else runs."""


@dataclass(frozen=True)
class Start:
    """What a rank has shown of itself when it began."""

    pid: int
    rank: int
    size: int
    node: int
    restarts: int
    total: int
    environment: dict[str, str]


class Agent:
    """A launcher at work on one node; its output goes to files."""

    def __init__(self, process: subprocess.Popen[bytes], directory: Path) -> None:
        self.process = process
        self.directory = directory

    @property
    def stdout(self) -> str:
        return (self.directory / "stdout").read_text(errors="replace")

    @property
    def stderr(self) -> str:
        return (self.directory / "stderr").read_text(errors="replace")

    @property
    def output(self) -> str:
        ended = self.process.poll()
        state = "at work" if ended is None else f"ended with status {ended}"
        return f"\n--- agent {self.directory.name}, {state}\n{_without_environment(self.stdout)}{self.stderr}"

    def starts(self) -> list[Start]:
        """Return the ranks that this agent has started so far, in all rounds."""
        lines = (line.split("] runs ", 1) for line in self.stdout.splitlines(keepends=True) if line.endswith("\n"))
        return [Start(**json.loads(found[1])) for found in lines if len(found) == 2]

    def running(self) -> list[Start]:
        """Return its ranks that are alive."""
        return [start for start in self.starts() if is_running(start.pid)]

    def held(self) -> dict[str, int]:
        """Return how many descriptors, threads and descendants it has now."""
        process = psutil.Process(self.process.pid)
        children = len(process.children(recursive=True))
        return {"descriptors": process.num_fds(), "threads": process.num_threads(), "children": children}

    def wait_for(self, text: str, within: float = WITHIN) -> None:
        """Wait until the agent has shown ``text``, on stdout or stderr."""
        wait_until(lambda: text in self.stdout + self.stderr, within, lambda: f"no {text!r} in {self.output}")

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def wait(self, within: float = WITHIN) -> int:
        """Wait for the agent's end and return its exit status."""
        wait_until(lambda: self.process.poll() is not None, within, lambda: self.output)
        return self.process.wait()


class Job:
    """The agents of one job. ``flags`` are those that every agent gets."""

    def __init__(self, directory: Path, flags: Sequence[str], program: str = PROGRAM) -> None:
        directory.mkdir()
        self.directory = directory
        self.flags = list(flags)
        self.agents: list[Agent] = []
        self.script = directory / "program.py"
        self.script.write_text(textwrap.dedent(program))

    def start(
        self,
        *flags: str,
        inside: Callable[[Sequence[str]], list[str]] = list,
        environment: dict[str, str] | None = None,
    ) -> Agent:
        """Start an agent. ``inside`` returns the command that runs a command on the agent's host."""
        directory = self.directory / str(len(self.agents))
        directory.mkdir()
        command = [sys.executable, "-m", "procgroup", "run", *self.flags, *flags, str(self.script), str(self.directory)]
        with (directory / "stdout").open("wb") as stdout, (directory / "stderr").open("wb") as stderr:
            process = subprocess.Popen(
                inside(command),
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=stderr,
                env={**os.environ, MARK: str(self.directory), **(environment or {})},
            )
        self.agents.append(Agent(process, directory))
        return self.agents[-1]

    @property
    def output(self) -> str:
        return "".join(agent.output for agent in self.agents)

    def wait_for_round(
        self,
        size: int,
        *,
        restarts: int | None = None,
        after: Sequence[Start] = (),
        agents: Sequence[Agent] | None = None,
        within: float = WITHIN,
    ) -> list[Start]:
        """Wait until exactly the ranks of a world of ``size`` run, none of them of the round ``after``.

        With ``agents`` only the ranks of those count. Returns them in rank order.
        """
        found: list[Start] = []

        def is_complete() -> bool:
            found[:] = [start for agent in agents or self.agents for start in agent.running()]
            found.sort(key=lambda start: start.rank)
            return _is_round(found, size, restarts, {start.pid for start in after})

        wanted = f"no round of {size} ranks" + ("" if restarts is None else f" after {restarts} restarts")
        wait_until(is_complete, within, lambda: f"{wanted}; alive: {_without_environments(found)}{self.output}")
        assert [start.total for start in found] == [size] * size
        return found

    def order(self, rank: int, source: str) -> None:
        """Let the process that is this rank now, or is it next, run a line of Python."""
        written = self.directory / "order"
        written.write_text(source)
        written.rename(self.directory / f"rank-{rank}")

    def finish(self, within: float = WITHIN) -> list[int]:
        """Let all ranks end in order, and return the exit statuses of all agents, in the order of their starts."""
        (self.directory / "finish").touch()
        return self.wait(within)

    def wait(self, within: float = WITHIN) -> list[int]:
        """Wait for the ends of all agents, and for those of all that they have started; return the exit statuses."""
        deadline = time.monotonic() + within
        statuses = [agent.wait(deadline - time.monotonic()) for agent in self.agents]
        wait_until(lambda: not self.processes(), WITHIN, lambda: f"left: {self.processes()}{self.output}")
        return statuses

    def processes(self) -> list[psutil.Process]:
        """Return every process of the job that is alive, agents, ranks and whatever they have started."""
        return [process for process in psutil.process_iter() if _belongs(process, str(self.directory))]

    def close(self) -> None:
        """Kill what is left of the job."""
        for agent in self.agents:
            agent.process.kill()
            agent.process.wait()
        for process in self.processes():
            process.kill()


def static(nodes: int, conf: str = SOON) -> list[str]:
    """Return the flags of a job on this host whose nodes are numbered by hand."""
    address = ("--master-addr", "127.0.0.1", "--master-port", str(world.free_port()))
    return ["--nnodes", str(nodes), *address, "--rdzv-conf", conf]


def elastic(nodes: str, endpoint: str, backend: str = "c10d", conf: str = SOON) -> list[str]:
    """Return the flags of a job whose nodes come and go."""
    rendezvous = ("--rdzv-backend", backend, "--rdzv-endpoint", endpoint, "--rdzv-id", "test")
    return ["--nnodes", nodes, *rendezvous, "--rdzv-conf", conf]


@contextmanager
def one_world_at_a_time(job: Job) -> Iterator[None]:
    """Look at the job's ranks again and again, and fail where some of two rounds were at work at once."""
    seen: list[set[str]] = []
    is_over = threading.Event()

    def look() -> None:
        while not is_over.wait(0.05):
            seen.append({store for process in job.processes() if (store := _store_of(process))})

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()
    assert seen, "nobody looked"
    assert all(len(stores) <= 1 for stores in seen), f"ranks of two rounds at once{job.output}"


def start_all(job: Job, nodes: int, *flags: str) -> list[Agent]:
    """Start the agents of the nodes 0, 1, ... of a static job."""
    return [job.start("--node-rank", str(node), *flags) for node in range(nodes)]


def lose(agent: Agent) -> float:
    """Kill an agent, expect the ends of its ranks, and return the time until which others may take."""
    ranks = agent.running()
    deadline = time.monotonic() + WITHIN
    agent.process.kill()
    wait_until(lambda: not any(is_running(start.pid) for start in ranks), WITHIN, lambda: f"alive: {agent.running()}")
    return deadline


def _is_round(found: Sequence[Start], size: int, restarts: int | None, earlier: set[int]) -> bool:
    return (
        [(start.rank, start.size) for start in found] == [(rank, size) for rank in range(size)]
        and not earlier & {start.pid for start in found}
        and (restarts is None or {start.restarts for start in found} == {restarts})
    )


def _belongs(process: psutil.Process, job: str) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE and process.environ().get(MARK) == job
    except psutil.Error:
        return False


def _store_of(rank: psutil.Process) -> str:
    """Return the store of the round that a process belongs to; "" for one that is no rank."""
    try:
        return rank.environ().get("PROCGROUP_STORE", "")
    except psutil.Error:
        return ""


def _without_environment(text: str) -> str:
    return "".join(line.split(', "environment"')[0].rstrip() + "\n" for line in text.splitlines())


def _without_environments(starts: Sequence[Start]) -> str:
    return str([f"rank {start.rank} of {start.size}, pid {start.pid}" for start in starts])


def is_running(pid: int) -> bool:
    """Return whether a process is alive; one that is only waiting to be collected is not."""
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
