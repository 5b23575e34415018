"""Where bug programs run, and what is seen of each rank::

with Surroundings() as surroundings:
    seen = surroundings.play(BUGS["dtype_differs"], "two hosts")
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import psutil
from bugs.bug import MEMORY_GROUPS, Bug
from failures.waiting_calls import allowance

import mpi_world
import two_hosts
import world

START_SECONDS = 150.0
"""From the start of the processes to the first line of the program on the last rank."""
EXIT_SECONDS = 5.0
"""From an error, or from the end of the program, to the end of the process."""
MARGIN_SECONDS = 2.0
"""How much later than its limit an error may come before the rank counts as one that hangs."""
GLOO_SECONDS = 4.0

RANKS = Path(__file__).with_name("ranks.py")


@dataclass(frozen=True)
class Surrounding:
    """A library, and how its ranks are started and connected."""

    name: str
    library: str = "procgroup"
    preloaded: str = "procgroup"
    backend: str = ""
    environment: Mapping[str, str] = field(default_factory=dict)
    mpi: str = ""
    on_hosts: bool = False

    def lacks(self) -> str:
        """Return what this machine lacks; "" where it lacks nothing."""
        if self.library == "torch" and importlib.util.find_spec("torch") is None:
            return "PyTorch is not installed"
        if self.mpi:
            return mpi_world.lacks(self.mpi)
        return two_hosts.lacks() if self.on_hosts else ""


SURROUNDINGS = {
    one.name: one
    for one in (
        Surrounding("shared memory", environment={"PROCGROUP_TRANSPORT": "shm"}),
        Surrounding("network", environment={"PROCGROUP_TRANSPORT": "tcp"}),
        Surrounding("two hosts", on_hosts=True),
        Surrounding("mpich", backend="mpi", mpi="mpich"),
        Surrounding("openmpi", backend="mpi", mpi="openmpi"),
        Surrounding("torch", "torch", "torch", "procgroup"),
    )
}
GLOO = Surrounding(
    "gloo",
    "torch",
    "gloo",
    "gloo",
    {"BUG_LONGEST_TIMEOUT": str(GLOO_SECONDS), "TORCH_DEVICE_BACKEND_AUTOLOAD": "0", "GLOO_SOCKET_IFNAME": "lo"},
)
"""torch.distributed with Gloo, to compare with: its programs time out after four seconds."""


@dataclass
class Seen:
    """What was seen of one rank. Moments are those of time.monotonic()."""

    rank: int
    started: float | None = None
    fault: float | None = None
    kind: str = ""
    """The class of the error that left the program; "" where it ended well, or not at all."""
    text: str = ""
    attributes: dict[str, Any] = field(default_factory=dict)
    moment: float | None = None
    """When the program ended, with the error or without; None: never."""
    changed: list[str] = field(default_factory=list)
    """The arrays whose values have changed, of those made since results were last found right."""
    watched: int = 0
    """The number of arrays made since then."""
    status: int | None = None
    """The exit status, negative for a signal; None where the rank had to be killed."""
    ended: float | None = None
    left: list[str] = field(default_factory=list)
    output: str = ""


class Surroundings:
    """The servers from which ranks are forked, each started when it is first needed."""

    def __init__(self) -> None:
        self._servers: dict[str, subprocess.Popen[str]] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        for server in self._servers.values():
            assert server.stdin is not None
            server.stdin.close()
        for server in self._servers.values():
            server.wait()

    def play(self, bug: Bug, surrounding: Surrounding) -> list[Seen]:
        """Run the program; return what was seen of each rank when all have ended or were killed."""
        with tempfile.TemporaryDirectory(prefix="bug-") as directory, contextlib.ExitStack() as stack:
            place = Path(directory)
            environments = stack.enter_context(_environments(bug, surrounding))
            description = {
                "directory": directory,
                "size": bug.size,
                "module": bug.program.__module__,
                "program": bug.name,
                "guilty": bug.guilty,
                "line": bug.line,
                "environments": environments,
            }
            if surrounding.mpi:
                stack.enter_context(_mpiexec(surrounding.mpi, bug.size, description))
            else:
                self._fork(surrounding, description)
            _wait(bug, place)
            return [_look(place, rank) for rank in range(bug.size)]

    def _fork(self, surrounding: Surrounding, description: dict[str, Any]) -> None:
        server = self._servers.get(surrounding.preloaded)
        if server is None:
            server = self._servers[surrounding.preloaded] = subprocess.Popen(
                [sys.executable, str(RANKS), "serve", surrounding.preloaded],
                env={**_environment(), **surrounding.environment},
                stdin=subprocess.PIPE,
                text=True,
            )
        assert server.stdin is not None
        server.stdin.write(json.dumps(description) + "\n")
        server.stdin.flush()


def _environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}


@contextlib.contextmanager
def _environments(bug: Bug, surrounding: Surrounding) -> Iterator[list[dict[str, str]]]:
    """Yield the variables of each rank, in surroundings that last as long."""
    port, store_port = world.free_port(), world.free_port()
    memory = MEMORY_GROUPS / f"bug-{os.getpid()}"
    places: Sequence[Mapping[str, str]] = [{} for _ in range(bug.size)]
    with contextlib.ExitStack() as stack:
        if surrounding.on_hosts:
            hosts = stack.enter_context(two_hosts.joined())
            places = two_hosts.environments(hosts, [rank % 2 for rank in range(bug.size)])
        stack.callback(_remove, memory)
        environments = []
        for rank, place in enumerate(places):
            variables = {
                **surrounding.environment,
                **place,
                "BUG_LIBRARY": surrounding.library,
                "BUG_BACKEND": surrounding.backend,
                "BUG_RANK": str(rank),
                "BUG_SIZE": str(bug.size),
                "BUG_STORE_HOST": place.get("MASTER_ADDR", "127.0.0.1"),
                "BUG_STORE_PORT": str(store_port),
                "BUG_MEMORY_GROUP": str(memory),
            }
            # Under mpiexec a rank adds these to what mpiexec gives it.
            environments.append(
                variables if surrounding.mpi else world.rank_environment(rank, bug.size, port, variables)
            )
        yield environments


def _remove(memory: Path) -> None:
    """Remove a memory cgroup, whose processes may be about to end."""
    deadline = time.monotonic() + 2
    while memory.exists() and time.monotonic() < deadline:
        with contextlib.suppress(OSError):
            memory.rmdir()
        time.sleep(0.01)


@contextlib.contextmanager
def _mpiexec(mpi: str, size: int, description: dict[str, Any]) -> Iterator[None]:
    """Start the ranks under mpiexec; afterwards end what it has started."""
    directory = Path(description["directory"])
    (directory / "world").write_text(json.dumps(description))
    command = mpi_world.mpiexec(mpi, size, mpi_world._KEEP_OTHERS[mpi])
    with (directory / "mpiexec.output").open("wb") as output:
        process = subprocess.Popen(
            [*command, sys.executable, str(RANKS), "join", str(directory)],
            env={**_environment(), **mpi_world.environment_of(mpi)},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
        )
    try:
        yield
    finally:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(EXIT_SECONDS)
        if process.poll() is None:
            for one in [*psutil.Process(process.pid).children(recursive=True), process]:
                with contextlib.suppress(psutil.NoSuchProcess):
                    one.kill()
            process.wait()


def _wait(bug: Bug, directory: Path) -> None:
    """Wait until all ranks have ended; kill a guilty one that never ends, and at the limit all."""
    started = time.monotonic()
    while running := [rank for rank in range(bug.size) if not (directory / f"{rank}.end").exists()]:
        if bug.is_stuck and not set(running) & set(bug.must_raise()):
            _kill(directory, [rank for rank in running if rank in bug.guilty])
        if time.monotonic() > _limit(bug, directory, started):
            _show_stacks(directory, running)
            _kill(directory, running)
        time.sleep(0.01)


def _limit(bug: Bug, directory: Path, started: float) -> float:
    """Return when ranks that still run hang: they had the time for their errors, and then for their ends."""
    moments = [_moments(directory, rank) for rank in range(bug.size)]
    if not all("start" in of_rank for of_rank in moments):
        return started + START_SECONDS
    last = max(moment for of_rank in moments for moment in of_rank.values())
    limit = last + max(allowance(bug.within), bug.within + EXIT_SECONDS) + MARGIN_SECONDS
    for rank in range(bug.size):
        if seen := _read(directory / f"{rank}.seen"):
            limit = max(limit, seen["moment"] + allowance(EXIT_SECONDS) + MARGIN_SECONDS)
    return limit


def _moments(directory: Path, rank: int) -> dict[str, float]:
    """Return when a rank has started, and when it last came to the guilty line."""
    try:
        lines = (directory / f"{rank}.moments").read_text().splitlines()
    except FileNotFoundError:
        return {}
    return {what: float(moment) for what, moment in (line.split() for line in lines)}


def _read(file: Path) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads(file.read_text())
    except FileNotFoundError:
        return {}
    return found


def _kill(directory: Path, ranks: Sequence[int]) -> None:
    for rank in ranks:
        (directory / f"{rank}.killed").touch()
        _signal(directory, rank, signal.SIGKILL)
    deadline = time.monotonic() + EXIT_SECONDS
    while not all((directory / f"{rank}.end").exists() for rank in ranks) and time.monotonic() < deadline:
        time.sleep(0.01)
    for rank in ranks:
        if not (directory / f"{rank}.end").exists():  # mpiexec has killed its keeper, too
            (directory / f"{rank}.end").write_text("{}")


def _show_stacks(directory: Path, ranks: Sequence[int]) -> None:
    for rank in ranks:
        _signal(directory, rank, signal.SIGUSR2)
    time.sleep(0.3)


def _signal(directory: Path, rank: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, FileNotFoundError):
        os.kill(int((directory / f"{rank}.pid").read_text()), number)


def _look(directory: Path, rank: int) -> Seen:
    """Read what a rank and its keeper have written down."""
    moments, seen, end = (
        _moments(directory, rank),
        _read(directory / f"{rank}.seen"),
        _read(directory / f"{rank}.end"),
    )
    killed = (directory / f"{rank}.killed").exists()
    output = directory / f"{rank}.output"
    return Seen(
        rank,
        started=moments.get("start"),
        fault=moments.get("fault"),
        **{name: seen[name] for name in ("kind", "text", "attributes", "moment", "changed", "watched") if seen},
        status=None if killed else end.get("status"),
        ended=None if killed else end.get("moment"),
        left=end.get("left", []),
        output=output.read_text(errors="replace") if output.exists() else "",
    )
