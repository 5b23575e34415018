"""What each bug program has to lead to, as data.

A program is a function without arguments that every rank runs. It has one bug, and `# BUG` marks the line at which the
guilty rank is when it goes wrong: the line that the errors of the others are to name. The decorators say what those
ranks must raise, and how soon::

    @mismatch()
    def reduce_op_differs() -> None:
        \"\"\"One rank takes the maximum where the others add.\"\"\"
        ...
"""

from __future__ import annotations

import importlib
import inspect
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Program = Callable[[], None]

LINES_ARE_NAMED: bool = True
"""Whether an error that lacks the guilty line is a failure, or only counted in the table."""

TIMEOUT = 3.0
"""Seconds of the programs' calls and starts that are to time out."""
LONG_TIMEOUT = 30.0
"""Seconds of those that are to fail for another reason long before."""
PROMPTLY = 1.0
"""Seconds from a death or from different calls until the other ranks raise."""
AT_THE_DEADLINE = TIMEOUT + 0.5
DEADLOCK_SECONDS = 2.5

MEMORY_GROUPS = Path("/sys/fs/cgroup/memory")

_ONE_HOST = ("shared memory", "network", "mpich", "openmpi", "torch", "gloo")

NO_MPI = dict.fromkeys(("mpich", "openmpi"), "mpiexec assigns the ranks, and its library connects the processes")
NO_TORCH = dict.fromkeys(("torch", "gloo"), "tensors have no such form")
HOSTS_ONLY = dict.fromkeys(_ONE_HOST, "needs two hosts")
NEEDS_MEMORY_GROUPS = dict.fromkeys(
    () if os.access(MEMORY_GROUPS, os.W_OK) else (*_ONE_HOST, "two hosts"), "no memory cgroup can be made here"
)

ENDS_WELL = ""
"""In a list of errors: the rank may also end without one."""


@dataclass(frozen=True)
class Bug:
    """A program and its expectation. Ranks are global."""

    program: Program
    errors: tuple[str, ...]
    """Names of the classes that the victims may raise. Empty: all ranks end well, with the right results."""
    within: float
    """Seconds from the fault to the victims' errors."""
    guilty: tuple[int, ...] = (1,)
    """The ranks at which the fault is. The errors have to name them."""
    victims: tuple[int, ...] | None = None
    """The ranks that have to raise; None: all but the guilty ones, or all where all are guilty."""
    names: tuple[int, ...] | None = None
    """Ranks of which one has to be named, where these are not the guilty ones."""
    size: int = 3
    has_line: bool = True
    """Whether the guilty rank is alive, or was when it failed, so that its line can be known."""
    is_stuck: bool = False
    """Whether the guilty rank never ends by itself."""
    keeps_arrays: bool = False
    """Whether no rank's arrays may have changed."""
    guilty_errors: tuple[str, ...] | None = None
    """What the guilty ranks may raise; None: anything, or nothing."""
    left_out: Mapping[str, str] = field(default_factory=dict)
    """Surroundings in which the program makes no sense, and why."""

    @property
    def name(self) -> str:
        return self.program.__name__

    @property
    def sentence(self) -> str:
        """Return the bug in a user's words."""
        return (self.program.__doc__ or "").partition("\n")[0]

    @property
    def file(self) -> Path:
        return Path(inspect.getfile(self.program))

    @property
    def line(self) -> int:
        """Return the number of the line that is marked."""
        lines, first = inspect.getsourcelines(self.program)
        (marked,) = (number for number, line in enumerate(lines, first) if line.rstrip().endswith("# BUG"))
        return marked

    @property
    def place(self) -> str:
        """Return the guilty line as errors name it: train.py:12."""
        return f"{self.file.name}:{self.line}"

    def must_raise(self) -> tuple[int, ...]:
        if self.victims is not None:
            return self.victims
        return tuple(rank for rank in range(self.size) if rank not in self.guilty) or self.guilty

    def names_the_right_ones(self, named: set[int], reader: int) -> bool:
        """Return whether an error of rank ``reader`` that names these ranks names the right ones."""
        if self.names is not None:
            return not named.isdisjoint(self.names)
        return set(self.guilty) - {reader} <= named


_registered: dict[str, Bug] = {}


def all_bugs() -> dict[str, Bug]:
    """Import all files of programs; return the programs by name, in the order of the files and their lines."""
    for file in sorted((Path(__file__).parent / "programs").glob("*.py")):
        importlib.import_module(f"bugs.programs.{file.stem}")
    return dict(_registered)


def _register(**expectation: Any) -> Callable[[Program], Program]:
    def register(program: Program) -> Program:
        assert program.__name__ not in _registered, f"two programs are called {program.__name__}"
        _registered[program.__name__] = Bug(program, **expectation)
        return program

    return register


def mismatch(*errors: str, **expectation: Any) -> Callable[[Program], Program]:
    """Mark a program whose ranks make different calls: every rank raises promptly, and no array changes."""
    kinds = errors or ("CollectiveMismatch",)
    return _register(
        **{"errors": kinds, "within": PROMPTLY, "keeps_arrays": True, "guilty_errors": kinds} | expectation
    )


def death(*errors: str, **expectation: Any) -> Callable[[Program], Program]:
    """Mark a program one of whose ranks ends without a word: the others raise promptly."""
    return _register(**{"errors": errors or ("PeerLost",), "within": PROMPTLY, "has_line": False} | expectation)


def failure(*errors: str, **expectation: Any) -> Callable[[Program], Program]:
    """Mark a program that ends with an exception on one rank: the others raise promptly, with its line."""
    return _register(**{"errors": errors or ("PeerFailed",), "within": PROMPTLY} | expectation)


def absence(*errors: str, **expectation: Any) -> Callable[[Program], Program]:
    """Mark a program one of whose ranks never comes: the others raise at their deadline."""
    kinds = errors or ("CollectiveTimeout", "PeerFailed")
    return _register(**{"errors": kinds, "within": AT_THE_DEADLINE, "is_stuck": True} | expectation)


def deadlock(*errors: str, **expectation: Any) -> Callable[[Program], Program]:
    """Mark a program whose ranks wait for each other in a cycle: they raise long before their deadline."""
    return _register(**{"errors": errors or ("Deadlock",), "within": DEADLOCK_SECONDS} | expectation)


def harmless(**expectation: Any) -> Callable[[Program], Program]:
    """Mark a program that has the right results on all ranks, whatever a user may fear."""
    return _register(**{"errors": (), "within": TIMEOUT, "guilty_errors": (), "has_line": False} | expectation)
