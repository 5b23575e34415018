"""Run a function, a script or a command as real processes with a deadline, and collect what became of them.

A *world* is a number of ranks that were started together. Each rank is a process of its own with RANK,
WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT set; its output goes to a file; its
return value or exception comes back as an `Outcome`. Ranks are forked from a server process that has
imported NumPy and procgroup already, so a world of 4 starts in some 50 ms::

    def add(rank, size, amount):
        dist.init_process_group()
        ...
        return total

    assert run(add, 4, args=(1,)) == [6, 6, 6, 6]          # raises WorldFailed when a rank fails

    with start(add, 4, args=(1,)) as world:                # to interfere while it runs
        world.wait_for_output(0, "ready")
        world.kill(2)
        outcomes = world.wait(timeout=5)
    assert isinstance(outcomes[0].error, PeerLost)

    done = run_command([sys.executable, "-m", "procgroup", "run", "script.py"], timeout=30)

A world that has not ended at its deadline is made to dump the Python stacks of all its threads on all its
ranks, and is killed. `WorldFailed` and `WorldTimeout` show the ends of all outputs, and name the files that have
all of them (see outputs.py). The function must stand at the top of its module.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import importlib.util
import inspect
import multiprocessing
import os
import pickle
import random
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing import forkserver
from multiprocessing.connection import wait as wait_for_sentinels
from pathlib import Path
from typing import Any

import psutil

import outputs
import two_hosts
from waiting import started_calls, stop, wait_until

DEFAULT_TIMEOUT = 120.0
"""Seconds that a world may take when the test does not say."""

_SHOWN_LINES = 60
"""Of the end of a rank's output, in the text of an exception."""
_SHOWN_CHARACTERS = 300
"""Of the arguments of what the ranks do."""

_DUMP_SECONDS = 10.0
_ports = random.SystemRandom()
PORT_NAME = "port-of-a-test-"
"""Begins the names of sockets by which the tests take ports."""
_taken: deque[int] = deque()
"""Descriptors of the names by which this process has its last 64 ports."""
_server = multiprocessing.get_context("forkserver")
_server.set_forkserver_preload(["world", "preloaded"])
# Ranks that are forked from a process with torch start later, and end later: only those that use it are.
_torch_server = forkserver.ForkServer()
_torch_server.set_forkserver_preload(["world", "preloaded", "preloaded_torch"])
_torch_gpus_server = forkserver.ForkServer()
_torch_gpus_server.set_forkserver_preload(["world", "preloaded", "preloaded_torch_gpus"])
_SERVERS: dict[bool | str, Any] = {True: _torch_server, "gpus": _torch_gpus_server}


@dataclass
class Outcome:
    """What became of one rank: its return value, or what it raised, and all that it printed."""

    rank: int
    value: Any = None
    error: BaseException | None = None
    traceback: str = ""
    exit_code: int | None = None
    """As subprocess has it: negative for a signal."""
    output: str = ""
    """stdout and stderr together."""
    file: Path | None = None
    """Where that is, as long as the test runs, and after it when it fails."""

    @property
    def ok(self) -> bool:
        return self.error is None and self.exit_code == 0


class WorldFailed(AssertionError):
    """A rank raised, or ended with another exit status than 0. ``outcomes`` has them all."""

    def __init__(self, outcomes: Sequence[Outcome], headline: str = "a rank failed") -> None:
        self.outcomes = list(outcomes)
        super().__init__(headline + describe(outcomes))


class WorldTimeout(WorldFailed):
    """The world had not ended at its deadline; the outputs end with the stacks of the ranks that hung."""


class World:
    """Ranks that were started together. Use as a context manager: leaving it kills those that still run."""

    def __init__(self, directory: Path, processes: Sequence[Any], what: str) -> None:
        self.what = what
        """What the ranks do, for the texts of errors."""
        self._directory = directory
        self._processes = list(processes)

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self._processes]

    def is_alive(self, rank: int) -> bool:
        return bool(self._processes[rank].is_alive())

    def kill(self, rank: int, number: int = signal.SIGKILL) -> None:
        """Send a signal to one rank; wait until it has stopped where that is to stop it."""
        pid = self._processes[rank].pid
        stop(pid) if number == signal.SIGSTOP else os.kill(pid, number)

    def output(self, rank: int) -> str:
        """Return what a rank has printed so far."""
        return self._output_file(rank).read_text(errors="replace")

    def wait_for_output(self, rank: int, text: str, timeout: float = DEFAULT_TIMEOUT) -> None:
        """Wait until a rank has printed ``text``."""
        deadline = time.monotonic() + timeout
        while text not in self.output(rank):
            if not self.is_alive(rank) and text not in self.output(rank):
                headline = f"{self.what}: rank {rank} ended before it printed {text!r}"
                raise WorldFailed([self._outcome(rank)], headline)
            if time.monotonic() > deadline:
                raise self._time_out(f"rank {rank} did not print {text!r} within {timeout:g} s")
            time.sleep(0.005)

    def wait_for_call(self, rank: int, operation: str, timeout: float = DEFAULT_TIMEOUT) -> None:
        """Wait until a rank is in a call of this operation, as its flight record has it."""
        self._wait_until(
            lambda: operation in started_calls(self.pids[rank]), f"rank {rank} is not in {operation}", timeout
        )

    def wait_until_asleep(self, rank: int, timeout: float = DEFAULT_TIMEOUT) -> None:
        """Wait until the main thread of a rank waits in the kernel, for whatever."""
        process = psutil.Process(self.pids[rank])
        awake = f"rank {rank} does not wait"
        self._wait_until(lambda: process.status() == psutil.STATUS_SLEEPING, awake, timeout)

    def wait_until_idle(self, timeout: float = DEFAULT_TIMEOUT) -> None:
        """Wait until all threads of all ranks wait in the kernel at the same moment: all have done what they can.

        Two looks one after the other have found none that runs or has run in between.
        """

        def is_idle() -> bool:
            before = self._activity()
            return before is not None and before == self._activity()

        self._wait_until(is_idle, "the ranks are not idle", timeout)

    def _activity(self) -> dict[str, str] | None:
        """Return how often each thread has left its core; None where one runs, or could."""
        switches = {}
        for rank in filter(self.is_alive, range(len(self.pids))):
            for path in Path(f"/proc/{self.pids[rank]}/task").glob("*/status"):
                with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                    _, state, *_, voluntary, forced = re.split(r"\n(?=State|(?:non)?voluntary)", path.read_text())
                    if not state.startswith(("State:\tS", "State:\tT")):
                        return None
                    switches[str(path)] = voluntary + forced
        return switches

    def wait_for_end(self, ranks: Sequence[int], timeout: float = DEFAULT_TIMEOUT) -> None:
        """Wait until these ranks have ended, whatever the others do."""
        running = f"not all of ranks {list(ranks)} have ended"
        self._wait_until(lambda: not any(self.is_alive(rank) for rank in ranks), running, timeout)

    def _wait_until(self, condition: Callable[[], bool], lack: str, timeout: float) -> None:
        try:
            wait_until(condition, timeout, lack)
        except TimeoutError:
            raise self._time_out(f"{lack} after {timeout:g} s") from None

    def wait(self, timeout: float = DEFAULT_TIMEOUT) -> list[Outcome]:
        """Wait until every rank has ended and return the outcomes in rank order; raise WorldTimeout."""
        deadline = time.monotonic() + timeout
        while running := [process for process in self._processes if process.exitcode is None]:
            left = deadline - time.monotonic()
            if left <= 0:
                raise self._time_out(f"still running after {timeout:g} s")
            wait_for_sentinels([process.sentinel for process in running], left)
        return self.outcomes()

    def outcomes(self) -> list[Outcome]:
        """Return what has become of every rank so far."""
        return [self._outcome(rank) for rank in range(len(self._processes))]

    def close(self) -> None:
        for process in self._processes:
            if process.exitcode is None:
                process.kill()
            process.join()

    def __enter__(self) -> World:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
        outputs.end(self._directory)

    def _time_out(self, headline: str) -> WorldTimeout:
        hung = [rank for rank, process in enumerate(self._processes) if process.exitcode is None]
        for rank in hung:
            _signal(self._processes[rank].pid, signal.SIGCONT, signal.SIGABRT)
        deadline = time.monotonic() + _DUMP_SECONDS
        while any(self._processes[rank].exitcode is None for rank in hung) and time.monotonic() < deadline:
            time.sleep(0.01)
        self.close()
        return WorldTimeout(self.outcomes(), f"{self.what}: {headline}; still running: ranks {hung}")

    def _output_file(self, rank: int) -> Path:
        return self._directory / f"{rank}.output"

    def _outcome(self, rank: int) -> Outcome:
        outcome = Outcome(
            rank, exit_code=self._processes[rank].exitcode, output=self.output(rank), file=self._output_file(rank)
        )
        with contextlib.suppress(FileNotFoundError):
            result = (self._directory / f"{rank}.result").read_bytes()
            outcome.value, parts, outcome.traceback = pickle.loads(result)
            outcome.error = _rebuild(*parts) if parts else None
        return outcome


def start(
    function: Callable[..., Any],
    size: int,
    *,
    args: Sequence[Any] = (),
    environment: Mapping[str, str] | None = None,
    environments: Sequence[Mapping[str, str]] | None = None,
    torch: bool | str = False,
) -> World:
    """Start ``function(rank, size, *args)`` on ``size`` ranks; ``environments`` adds variables rank by rank.

    WORLD_NAMESPACE among them is the network namespace in which a rank runs. With ``torch`` the ranks have imported it
    already; with "gpus" its device "cuda" is that of torch_gpus/stand_in_torch.py.
    """
    if "<locals>" in function.__qualname__:
        raise TypeError(f"{function.__qualname__} must stand at the top of its module, so that a process can find it")
    directory = outputs.new_directory()
    port = free_port()
    processes = []
    for rank in range(size):
        variables = rank_environment(rank, size, port, environment)
        variables.update(environments[rank] if environments else {})
        where = (inspect.getfile(function), function.__qualname__)
        process = _server.Process(target=_be_rank, args=(str(directory), rank, size, where, tuple(args), variables))
        (directory / f"{rank}.output").touch()
        with _forked_from(_SERVERS.get(torch, forkserver._forkserver)):
            process.start()
        processes.append(process)
    return World(directory, processes, text_of(function, size, args, environment))


def text_of(function: Callable[..., Any], size: int, args: Sequence[Any], environment: Mapping[str, str] | None) -> str:
    """Return a call of a function on all ranks as text; of many arguments the first are shown."""
    arguments = ", ".join(["rank", str(size), *map(repr, args)])
    shown = arguments if len(arguments) <= _SHOWN_CHARACTERS else f"{arguments[:_SHOWN_CHARACTERS]}..."
    settings = "".join(f", {name}={value}" for name, value in (environment or {}).items())
    return f"{function.__qualname__}({shown}){settings}"


@contextlib.contextmanager
def _forked_from(server: Any) -> Iterator[None]:
    """Let processes start from this server, which is started too where it does not run."""
    _ensure_running(server)
    before = forkserver.connect_to_new_process
    forkserver.connect_to_new_process = server.connect_to_new_process
    try:
        yield
    finally:
        forkserver.connect_to_new_process = before


def run(
    function: Callable[..., Any],
    size: int,
    *,
    args: Sequence[Any] = (),
    timeout: float = DEFAULT_TIMEOUT,
    environment: Mapping[str, str] | None = None,
    environments: Sequence[Mapping[str, str]] | None = None,
    torch: bool | str = False,
) -> list[Any]:
    """Run ``function(rank, size, *args)`` on ``size`` ranks and return what each returned; raise WorldFailed."""
    outcomes = attempt(
        function, size, args=args, timeout=timeout, environment=environment, environments=environments, torch=torch
    )
    if not all(outcome.ok for outcome in outcomes):
        raise WorldFailed(outcomes, f"{text_of(function, size, args, environment)}: a rank failed")
    return [outcome.value for outcome in outcomes]


def attempt(
    function: Callable[..., Any],
    size: int,
    *,
    args: Sequence[Any] = (),
    timeout: float = DEFAULT_TIMEOUT,
    environment: Mapping[str, str] | None = None,
    environments: Sequence[Mapping[str, str]] | None = None,
    torch: bool | str = False,
) -> list[Outcome]:
    """Run as `run` does, but return the outcomes, also of ranks that failed."""
    with start(function, size, args=args, environment=environment, environments=environments, torch=torch) as world:
        return world.wait(timeout)


def run_command(
    command: Sequence[str],
    *,
    timeout: float = DEFAULT_TIMEOUT,
    environment: Mapping[str, str] | None = None,
    directory: str | os.PathLike[str] | None = None,
    standard_input: str = "",
) -> subprocess.CompletedProcess[str]:
    """Run one command to its end, whatever its exit status; stdout and stderr come back as text.

    At the deadline it and all its descendants dump their stacks and are killed, and WorldTimeout is raised.
    """
    with (
        tempfile.TemporaryFile("w+") as stdout,
        tempfile.TemporaryFile("w+") as stderr,
        subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=stdout,
            stderr=stderr,
            cwd=directory,
            env={**os.environ, "PYTHONFAULTHANDLER": "1", **(environment or {})},
            text=True,
        ) as process,
    ):
        timed_out = False
        try:
            process.communicate(standard_input, timeout=timeout)
        except subprocess.TimeoutExpired:
            timed_out = True
            _dump_and_kill(process.pid)
            process.wait()
        stdout.seek(0)
        stderr.seek(0)
        done = subprocess.CompletedProcess(command, process.returncode, stdout.read(), stderr.read())
    if timed_out:
        file = outputs.new_directory() / "0.output"
        file.write_text(done.stdout + done.stderr)
        outputs.end(file.parent)
        outcome = Outcome(0, exit_code=done.returncode, output=done.stdout + done.stderr, file=file)
        raise WorldTimeout([outcome], f"{' '.join(command)}: still running after {timeout:g} s")
    return done


def without_reports(output: str) -> str:
    """Leave out the lines that say for which ranks a rank waits: on a slow machine they are no fault."""
    report = r"^(\[rank\d+\]: )?procgroup WARNING: (.* (waits|has waited) for|waiting for ranks?) .*\n"
    return re.sub(report, "", output, flags=re.MULTILINE)


def _ensure_running(server: Any) -> None:
    """Start a server where it does not run. Python 3.11 does not tell it our ``sys.path``."""
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    try:
        server.ensure_running()
    finally:
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before


def free_port() -> int:
    """Return a TCP port on which nothing listens, that no other test has, and that no connection or Slurm is given.

    A port is taken by a name of Linux that only one process can have and that goes with it, because two tests that
    were given the same port before either listened would meet in one store.
    """
    while True:
        port = _ports.randrange(10_000, 20_000)
        name = socket.socket(socket.AF_UNIX)
        with contextlib.suppress(OSError), socket.socket() as listener:
            name.bind(f"\0{PORT_NAME}{port}")
            listener.bind(("127.0.0.1", port))
            _taken.append(name.detach())
            if len(_taken) > 64:
                os.close(_taken.popleft())
            return port
        name.close()


def rank_environment(rank: int, size: int, port: int, environment: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return this process's environment with the variables of one rank of a world on this host.

    With PROCGROUP_TRANSPORT=spanning, the ranks are by turns on two hosts, as PROCGROUP_HOST_ID makes them.
    """
    environment = dict(environment or {})
    if environment.get("PROCGROUP_TRANSPORT") == "spanning":
        environment.update(PROCGROUP_TRANSPORT="auto", PROCGROUP_HOST_ID=str(_host_of(rank)))
    return {
        **os.environ,
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        **environment,
    }


def placed(transport: str, size: int) -> dict[str, Any]:
    """Return the arguments of run_ranks and connected_groups with which ``size`` ranks use this transport."""
    return {"hosts": [_host_of(rank) for rank in range(size)]} if transport == "spanning" else {"transport": transport}


def _host_of(rank: int) -> int:
    """Return where a rank of a world runs whose transport is "spanning": the ranks are on two hosts by turns."""
    return rank % 2


def _be_rank(
    directory: str, rank: int, size: int, where: tuple[str, str], args: tuple[Any, ...], variables: dict[str, str]
) -> None:
    os.environ.clear()
    os.environ.update(variables)
    output = os.open(Path(directory, f"{rank}.output"), os.O_WRONLY | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    sys.stdout = open(1, "w", buffering=1, closefd=False)
    sys.stderr = open(2, "w", buffering=1, closefd=False)
    faulthandler.enable(sys.stderr)
    failed = True
    try:
        if "WORLD_NAMESPACE" in os.environ:
            two_hosts.enter(os.environ["WORLD_NAMESPACE"])
        value = _find(*where)(rank, size, *args)
        pickle.loads(result := pickle.dumps((value, None, "")))
        failed = False
    except (Exception, KeyboardInterrupt) as error:
        result = _pickled_error(error)
    partial = Path(directory, f"{rank}.partial")
    partial.write_bytes(result)
    partial.rename(Path(directory, f"{rank}.result"))
    atexit._run_exitfuncs()  # multiprocessing ends without them, a program does not
    sys.exit(int(failed))


def _find(file: str, qualname: str) -> Callable[..., Any]:
    specification = importlib.util.spec_from_file_location(Path(file).stem, file)
    assert specification and specification.loader
    module = importlib.util.module_from_spec(specification)
    sys.modules[specification.name] = module
    specification.loader.exec_module(module)
    found: Any = module
    for name in qualname.split("."):
        found = getattr(found, name)
    return found  # type: ignore[no-any-return]


def _pickled_error(error: BaseException) -> bytes:
    """Take an exception apart: pickle cannot rebuild one whose constructor takes other arguments than its args."""
    attributes = {name: value for name, value in vars(error).items() if _can_pickle(value)}
    parts = (type(error), error.args if _can_pickle(error.args) else (str(error),), attributes)
    if not _can_pickle(type(error)):
        parts = (RuntimeError, (repr(error),), {})
    return pickle.dumps((None, parts, traceback.format_exc()))


def _rebuild(kind: type[BaseException], args: tuple[Any, ...], attributes: dict[str, Any]) -> BaseException:
    error = kind.__new__(kind, *args)
    error.args = args
    error.__dict__.update(attributes)
    return error


def _can_pickle(value: Any) -> bool:
    try:
        pickle.loads(pickle.dumps(value))
        return True
    except Exception:
        return False


def describe(outcomes: Sequence[Outcome]) -> str:
    """Return how each rank ended, with the end of its output and the name of the file that has all of it."""
    return "".join(map(_describe, outcomes))


def _describe(outcome: Outcome) -> str:
    end = f"exit status {outcome.exit_code}" if outcome.exit_code else "ok" if outcome.ok else "raised"
    lines = outcome.output.splitlines(keepends=True)
    before = f"({len(lines) - _SHOWN_LINES} lines before these are in that file)\n" if len(lines) > _SHOWN_LINES else ""
    shown = "".join(lines[-_SHOWN_LINES:])
    where = f", printed to {outcome.file}" if outcome.file else ""
    return f"\n--- rank {outcome.rank}: {end}{where}\n{before}{shown}{outcome.traceback}"


def _signal(pid: int, *numbers: int) -> None:
    for number in numbers:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def _dump_and_kill(pid: int) -> None:
    """Let a process and its descendants dump their stacks, one after the other, the youngest first."""
    with contextlib.suppress(psutil.NoSuchProcess):
        family = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
        for process in family:
            _signal(process.pid, signal.SIGSTOP)  # so that nobody reacts to another's end before its own turn
        for process in reversed(family):
            _signal(process.pid, signal.SIGABRT, signal.SIGCONT)
            deadline = time.monotonic() + _DUMP_SECONDS
            while not _has_ended(process) and time.monotonic() < deadline:
                time.sleep(0.01)
            _signal(process.pid, signal.SIGKILL)


def _has_ended(process: psutil.Process) -> bool:
    """Return whether a process is no more; one that its parent, stopped too, has not collected is not."""
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True
