"""Start the launcher on a script that a test writes down, to its end or for interference."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from bridged_hosts import Switch, connected
from launch.agents import SOON, Job, elastic, is_running, wait_until
from world import free_port, run_command

Done = subprocess.CompletedProcess[str]


class Launcher:
    """Runs scripts under the launcher in a directory of their own."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def script(self, source: str, name: str = "script.py") -> Path:
        path = self.directory / name
        path.write_text(textwrap.dedent(source))
        return path

    def run(
        self,
        source: str,
        *flags: str,
        arguments: tuple[str, ...] = (),
        environment: dict[str, str] | None = None,
        command: str = "run",
        **more: object,
    ) -> Done:
        """Run a script to its end: ``flags`` are the launcher's, ``arguments`` the script's."""
        line = [sys.executable, "-m", "procgroup", command, *flags, str(self.script(source)), *arguments]
        return run_command(line, environment=environment, directory=None, **more)  # type: ignore[arg-type]


@dataclass
class Running:
    """A launcher at work; its output goes to files."""

    process: subprocess.Popen[bytes]
    directory: Path

    @property
    def stdout(self) -> str:
        return (self.directory / "stdout").read_text(errors="replace")

    @property
    def stderr(self) -> str:
        return (self.directory / "stderr").read_text(errors="replace")

    def wait_for(self, text: str, count: int = 1, timeout: float = 120) -> None:
        """Wait until the launcher has shown ``text`` on stdout so often."""
        wait_until(lambda: self.stdout.count(text) >= count, timeout, lambda: self.stdout + self.stderr)

    def wait_for_message(self, text: str) -> None:
        """Wait until the launcher has said ``text`` on stderr."""
        wait_until(lambda: text in self.stderr, 45, lambda: self.stdout + self.stderr)

    def pids(self, word: str = "pid") -> list[int]:
        """Return the numbers that stand behind ``word`` in what the ranks have printed."""
        return [int(line.split(f"{word} ")[1].split()[0]) for line in self.stdout.splitlines() if f"{word} " in line]


@pytest.fixture
def launcher(tmp_path: Path) -> Launcher:
    return Launcher(tmp_path)


@pytest.fixture
def start_launcher(tmp_path: Path) -> Iterator[Callable[..., Running]]:
    """Start the launcher and go on while it works; what is left of it is killed at the end."""
    started: list[Running] = []

    def start(source: str, *flags: str, command: tuple[str, ...] = ("-m", "procgroup", "run")) -> Running:
        directory = tmp_path / str(len(started))
        directory.mkdir()
        script = Launcher(directory).script(source)
        with (directory / "stdout").open("wb") as stdout, (directory / "stderr").open("wb") as stderr:
            process = subprocess.Popen(
                [sys.executable, *command, *flags, str(script)], stdin=subprocess.DEVNULL, stdout=stdout, stderr=stderr
            )
        started.append(Running(process, directory))
        return started[-1]

    yield start
    for running in started:
        for pid in [*running.pids(), *running.pids("child")]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        running.process.kill()
        running.process.wait()


@pytest.fixture
def gone() -> Callable[[list[int]], None]:
    """Expect that processes end; those of the tests would live for 60 s by themselves."""

    def check(pids: list[int]) -> None:
        wait_until(lambda: not any(map(is_running, pids)), 20, lambda: f"alive: {list(filter(is_running, pids))}")

    return check


@pytest.fixture
def make_job(tmp_path: Path) -> Iterator[Callable[..., Job]]:
    """Make jobs of several agents; what is left of them is killed at the end."""
    made: list[Job] = []

    def make(*flags: str, **more: str) -> Job:
        made.append(Job(tmp_path / f"job-{len(made)}", flags, **more))
        return made[-1]

    yield make
    for job in made:
        job.close()


@pytest.fixture
def elastic_flags(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[..., list[str]]:
    """Return the flags of an elastic job on this host; the parameter is the back-end: c10d or file."""
    endpoint = f"127.0.0.1:{free_port()}" if request.param == "c10d" else str(tmp_path / "meeting")
    return lambda nodes, conf=SOON: elastic(nodes, endpoint, request.param, conf)


@pytest.fixture
def switch() -> Iterator[Switch]:
    """Three hosts, as network namespaces on one switch."""
    with connected(3) as made:
        yield made
