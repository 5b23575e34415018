"""Smoke programs: for each name that procgroup has, a program that fails when the name does nothing.

A program is a function without arguments, called on two ranks that are threads of one process or, with
``ranks=0``, in one thread without a process group. Replacing a name by something that does nothing must make
its program fail.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import EnumType
from typing import Any

import procgroup
from procgroup.api import default_group
from procgroup.testing import run_ranks

Program = Callable[[], None]


@dataclass(frozen=True)
class Smoke:
    """The program of one name, and where it runs."""

    program: Program
    ranks: int

    def run(self) -> None:
        """Run the program; raise what any rank raised."""
        if self.ranks:
            run_ranks(self.program, self.ranks)
        else:
            run_in_thread(self.program)


SMOKE: dict[str, Smoke] = {}


def shows(*names: str, ranks: int = 2) -> Callable[[Program], Program]:
    """Say which names a program shows: names of procgroup, or of its classes as "Store.set"."""

    def register(program: Program) -> Program:
        for name in names:
            assert name not in SMOKE, name
            SMOKE[name] = Smoke(program, ranks)
        return program

    return register


def run_in_thread(program: Program) -> None:
    """Run a program that makes a default group of its own, beside whatever this process has."""
    raised: list[BaseException] = []

    def target() -> None:
        default_group.use_own_slot()
        try:
            program()
        except BaseException as error:
            raised.append(error)
        finally:
            if default_group.slot().group is not None:
                procgroup.destroy_process_group()

    thread = threading.Thread(target=target)
    thread.start()
    thread.join()
    if raised:
        raise raised[0]


def find(name: str) -> tuple[Any, str]:
    """Return what has a name, and its last part: the module procgroup or one of its classes."""
    owner, _, last = name.rpartition(".")
    return (getattr(procgroup, owner) if owner else procgroup), last


@contextmanager
def doing_nothing(name: str) -> Iterator[None]:
    """Put something that does nothing in a name's place."""
    owner, last = find(name)
    current = getattr(owner, last)
    kept = vars(owner).get(last)  # as it is stored: a property, a classmethod
    set_anyhow(owner, last, nothing_like(current))
    try:
        yield
    finally:
        if kept is None:
            delattr(owner, last)
        else:
            set_anyhow(owner, last, kept)


def set_anyhow(owner: Any, name: str, value: Any) -> None:
    """Set an attribute, also of an Enum, which guards its members."""
    if isinstance(owner, EnumType):
        type.__setattr__(owner, name, value)
    else:
        setattr(owner, name, value)


def nothing_like(value: Any) -> Any:
    """Return a function, class or exception that does nothing; None for what cannot be called."""
    if isinstance(value, type) and issubclass(value, BaseException):
        return type("Nothing", (Exception,), {})
    if isinstance(value, type):
        return type("Nothing", (), {"__init__": do_nothing, "__getattr__": lambda self, name: do_nothing})
    return do_nothing if callable(value) else None


def do_nothing(*_arguments: Any, **_keywords: Any) -> None:
    """Take anything and return None."""
