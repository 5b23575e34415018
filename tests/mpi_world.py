"""Run a function or a program on ranks that mpiexec starts, with a deadline; outcomes are those of tests/world.py.

Each rank is a program of its own that mpiexec has started, so its function joins by itself: `BACKEND` is its name::

    def add(rank, size, amount):
        dist.init_process_group(BACKEND)
        ...
        return total

    assert run(add, 4, mpi="openmpi", args=(1,)) == [6, 6, 6, 6]

    with start(add, 4) as world:                           # to interfere while it runs
        world.kill(2)
        outcomes = world.wait(timeout=5)

A rank that dies, dies alone. An exception of the function ends the rank's program, as it ends a user's.

The MPI libraries are those of launcher_environments.py, which the Makefile installs before the tests.
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib.util
import inspect
import os
import pickle
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

import outputs
import world
from launcher_environments import DIRECTORY
from world import DEFAULT_TIMEOUT, Outcome, WorldFailed

BACKEND = "mpi"
MPIS = ("mpich", "openmpi")

_KEEP_OTHERS = {"mpich": "-disable-auto-cleanup", "openmpi": "--enable-recovery"}
"""The option of mpiexec with which the death of a rank does not end the others."""

_START_SECONDS = 20.0
_END_SECONDS = 5.0


def lacks(mpi: str) -> str:
    """Return what this machine lacks to run ranks under this MPI; "" where it lacks nothing."""
    if importlib.util.find_spec("mpi4py") is None:
        return "mpi4py is not installed"
    program = DIRECTORY / mpi / "bin" / "mpiexec"
    return "" if program.exists() else f"{program} is missing"


def environment_of(mpi: str) -> dict[str, str]:
    """Return the variables with which programs use this MPI."""
    variables = {"LD_LIBRARY_PATH": str(DIRECTORY / mpi / "lib"), "MPI4PY_MPIABI": mpi}
    if mpi == "openmpi":
        variables |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
        variables |= {"PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe", "OMPI_MCA_opal_signal": ""}
    return variables


def mpiexec(mpi: str, size: int, *options: str) -> list[str]:
    """Return the command that starts ``size`` ranks; the program follows."""
    return [str(DIRECTORY / mpi / "bin" / "mpiexec"), *options, "-n", str(size)]


def run_program(
    mpi: str, size: int, program: Path, *arguments: str, timeout: float = DEFAULT_TIMEOUT
) -> subprocess.CompletedProcess[str]:
    """Run a program on ``size`` ranks to the end, whatever mpiexec's exit status."""
    command = [*mpiexec(mpi, size), sys.executable, str(program), *arguments]
    return world.run_command(command, environment=environment_of(mpi), directory=program.parent, timeout=timeout)


class MpiWorld(world.World):
    """Ranks that one mpiexec has started. Leaving it kills those that still run, and mpiexec."""

    def __init__(self, directory: Path, size: int, mpi: str, environment: Mapping[str, str], what: str) -> None:
        super().__init__(directory, [], f"{what} with {mpi}")
        command = [*mpiexec(mpi, size, _KEEP_OTHERS[mpi]), sys.executable, __file__, str(directory)]
        variables = {**os.environ, **environment_of(mpi), **environment}
        with (directory / "mpiexec.output").open("wb") as output:
            self._mpiexec = subprocess.Popen(
                command, env=variables, stdin=subprocess.DEVNULL, stdout=output, stderr=output
            )
        try:
            self._processes = [self._await_start(rank) for rank in range(size)]
        except BaseException:
            self.__exit__()
            raise

    def close(self) -> None:
        super().close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._mpiexec.wait(_END_SECONDS)
        if self._mpiexec.poll() is None:
            for process in [*psutil.Process(self._mpiexec.pid).children(recursive=True), self._mpiexec]:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            self._mpiexec.wait()

    def _await_start(self, rank: int) -> _RankProcess:
        deadline = time.monotonic() + _START_SECONDS
        file = self._directory / f"{rank}.pid"
        while not file.exists():
            if self._mpiexec.poll() is not None or time.monotonic() > deadline:
                output = self._directory / "mpiexec.output"
                text = output.read_text(errors="replace")
                outcome = Outcome(rank, exit_code=self._mpiexec.returncode, output=text, file=output)
                raise WorldFailed([outcome], f"mpiexec did not start rank {rank}")
            time.sleep(0.005)
        return _RankProcess(int(file.read_text()), file.with_suffix(".end"))


class _RankProcess:
    """A process that is not a child of this one, with what `world.World` uses of a multiprocessing.Process."""

    def __init__(self, pid: int, end: Path) -> None:
        self.pid, self._end = pid, end
        try:
            self.sentinel = os.pidfd_open(pid)
        except ProcessLookupError:  # it has ended already
            self.sentinel, other_end = os.pipe()
            os.close(other_end)

    def __del__(self) -> None:
        os.close(self.sentinel)

    @property
    def exitcode(self) -> int | None:
        """None while the process runs; negative for a signal."""
        if self.is_alive():
            return None
        deadline = time.monotonic() + _END_SECONDS
        while not self._end.exists() and time.monotonic() < deadline:
            time.sleep(0.005)
        return int(self._end.read_text())

    def is_alive(self) -> bool:
        return not self.wait(0)

    def wait(self, timeout: float) -> bool:
        """Return whether the process has ended within ``timeout`` seconds."""
        poll = select.poll()
        poll.register(self.sentinel, select.POLLIN)
        return bool(poll.poll(timeout * 1000))

    def kill(self) -> None:
        world._signal(self.pid, signal.SIGKILL)

    def join(self) -> None:
        self.wait(_END_SECONDS)


def start(
    function: Callable[..., Any],
    size: int,
    *,
    mpi: str = "mpich",
    args: Sequence[Any] = (),
    environment: Mapping[str, str] | None = None,
) -> MpiWorld:
    """Start ``function(rank, size, *args)``, which stands at the top of its module, on ``size`` ranks."""
    directory = outputs.new_directory()
    where = (inspect.getfile(function), function.__qualname__)
    (directory / "call").write_bytes(pickle.dumps((where, size, tuple(args))))
    return MpiWorld(directory, size, mpi, environment or {}, world.text_of(function, size, args, environment))


def run(
    function: Callable[..., Any],
    size: int,
    *,
    mpi: str = "mpich",
    args: Sequence[Any] = (),
    timeout: float = DEFAULT_TIMEOUT,
    environment: Mapping[str, str] | None = None,
) -> list[Any]:
    """Run ``function(rank, size, *args)`` on ``size`` ranks and return what each returned; raise WorldFailed."""
    outcomes = attempt(function, size, mpi=mpi, args=args, timeout=timeout, environment=environment)
    if not all(outcome.ok for outcome in outcomes):
        raise WorldFailed(outcomes, f"{world.text_of(function, size, args, environment)} with {mpi}: a rank failed")
    return [outcome.value for outcome in outcomes]


def attempt(
    function: Callable[..., Any],
    size: int,
    *,
    mpi: str = "mpich",
    args: Sequence[Any] = (),
    timeout: float = DEFAULT_TIMEOUT,
    environment: Mapping[str, str] | None = None,
) -> list[Outcome]:
    """Run as `run` does, but return the outcomes, also of ranks that failed."""
    with start(function, size, mpi=mpi, args=args, environment=environment) as ranks:
        return ranks.wait(timeout)


def _be_rank(directory: str) -> None:
    """Run the function in a child, and wait for its end.

    MPICH's mpiexec kills all ranks, whatever its options, when a process that it has started ends by a signal.
    """
    rank = next(int(os.environ[name]) for name in ("PMI_RANK", "OMPI_COMM_WORLD_RANK") if name in os.environ)
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # by which MPICH's mpiexec notifies of a rank that has ended
    if pid := os.fork():
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        _, status = os.waitpid(pid, 0)
        _write(directory, f"{rank}.end", str(os.waitstatus_to_exitcode(status)).encode())
        os._exit(0)
    output = os.open(Path(directory, f"{rank}.output"), os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.dup2(output, 1)
    os.dup2(output, 2)
    faulthandler.enable()
    _write(directory, f"{rank}.pid", str(os.getpid()).encode())
    where, size, args = pickle.loads(Path(directory, "call").read_bytes())
    try:
        value = world._find(*where)(rank, size, *args)
        pickle.loads(result := pickle.dumps((value, None, "")))
    except BaseException as error:
        _write(directory, f"{rank}.result", world._pickled_error(error))
        raise
    _write(directory, f"{rank}.result", result)


def _write(directory: str, name: str, content: bytes) -> None:
    """Make a file that has all of its content from the start."""
    partial = Path(directory, f"{name}.partial")
    partial.write_bytes(content)
    partial.rename(Path(directory, name))


if __name__ == "__main__":
    _be_rank(sys.argv[1])
