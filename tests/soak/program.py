"""The program of each rank of a scenario: it makes the calls of the plan until one fails, or to their end, and leaves.

What it sees it writes to a pipe, one line of JSON for each event, which the death of the process cannot take back.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import json
import os
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from failures import instants
from groups.toy_backend import StoreBackend
from numpy.random import Generator, default_rng
from seeded_cases import CasePart, values

import oracle
import procgroup as dist
from procgroup.api.default_group import current
from soak.named import named_by
from soak.plan import BY_THEMSELVES, HARMLESS, LONG, SIGNALLED, WRONG_GROUPS, Call, Plan

OUTSTANDING = 4
"""How many asynchronous calls may be outstanding at once."""


class Events:
    """What this rank has seen, for the process that watches it."""

    def __init__(self, pipe: int) -> None:
        self._pipe = pipe
        self.has_told_error = False

    def tell(self, what: str, **data: Any) -> None:
        own, of_all = run_delays()
        line = json.dumps({"what": what, "moment": time.monotonic(), "own_delay": own, "delay": of_all, **data})
        os.write(self._pipe, line.encode() + b"\n")


def run_delays() -> tuple[float, float]:
    """Return for how many seconds the main thread, and all threads together, have waited for a core, so far."""
    delays = {}
    for thread in Path("/proc/self/task").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            delays[int(thread.name)] = int((thread / "schedstat").read_text().split()[1]) / 1e9
    return delays[os.getpid()], sum(delays.values())


class OnGroup:
    """The functions of the library on one group, with group ranks."""

    ReduceOp = dist.ReduceOp

    def __init__(self, group: Any) -> None:
        self.group, self.irecv = group, group.irecv

    def __getattr__(self, name: str) -> Any:
        return getattr(self.group, name)

    def all_gather_object(self, gathered: list[Any], own: Any) -> None:
        dist.all_gather_object(gathered, own, group=self.group)

    def isend(self, array: Any, destination: int, tag: int = 0) -> Any:
        return self.group.send(array, destination, tag, True)


class ObjectsPart(CasePart):
    """One rank's part in an all_gather of objects, which grow with the rank."""

    def start(self, dist: Any, async_op: bool = False, **how: Any) -> None:
        self.gathered: list[Any] = [None] * self.size
        dist.all_gather_object(self.gathered, self._object(self.rank))

    def wrong(self) -> str:
        return "; ".join(
            f"object of {source}: {got}"
            for source, got in enumerate(self.gathered)
            if got.keys() != {source} or oracle.difference(got[source], self._object(source)[source], to_the_bit=True)
        )

    def _object(self, source: int) -> dict[int, Any]:
        return {source: values(self.case, source, 0, self.case.count + source)}


class Issued:
    """A call of this rank, and what has become of it."""

    def __init__(self, call: Call, group: Any, part: CasePart) -> None:
        self.call, self.group, self.part = call, group, part
        self.moment = time.monotonic()

    def __str__(self) -> str:
        objects = " as objects" if self.call.as_objects else ""
        return f"call {self.call.number} on group {self.group.members}: {self.part.case}{objects}"


def play(plan: Plan, rank: int, pipe: int) -> None:
    """Be one rank; what ends it ends the program."""
    events = Events(pipe)
    random = default_rng([plan.seed, 2, rank])
    before = possessions()
    events.tell("start")
    way = _run(plan, rank, events, random)
    if way == "destroy":
        gc.collect()
        events.tell("destroyed", left=sorted((possessions() - before).elements()))
    elif way == "exit":
        sys.exit(int(events.has_told_error))


def _run(plan: Plan, rank: int, events: Events, random: Generator) -> str:
    """Do what the plan says until the rank leaves; return how it leaves."""
    is_victim = rank == plan.victim
    if is_victim:
        _plant(plan, events, "late")
        if plan.moment == "before":
            go_wrong(plan, events)
    try:
        groups = _start(plan, events, is_victim)
        if is_victim:
            _plant(plan, events, "early")
        Calls(plan, rank, groups, events).make()
        if plan.has_end:
            dist.barrier()
        events.tell("done")
    except dist.DistError as error:
        _tell(events, error, "")
        way = str(random.choice(["destroy", "raise", "end", "exit"]))
        if way == "raise":
            raise
        if way == "destroy":  # while the exception is handled, which the others are notified of
            dist.destroy_process_group()
        return way
    way = str(random.choice(["destroy", "end", "exit"]))
    events.tell("leaving")
    if is_victim and plan.moment == "leave" and plan.fault not in SIGNALLED:
        go_wrong(plan, events)
    if way == "destroy":
        dist.destroy_process_group()
    return way


def _start(plan: Plan, events: Events, is_victim: bool) -> list[Any]:
    """Make the groups of the plan; return them, the world first."""
    if is_victim and plan.moment == "join":
        instants.end_at(*plan.instant, partial(go_wrong, plan, events))
    if plan.layout == "toy":
        dist.Backend.register_backend("toy", StoreBackend)
    backend = "toy" if plan.layout == "toy" else None
    dist.init_process_group(
        backend, timeout=plan.timeout if plan.moment in ("before", "join", "meet", "groups") else LONG
    )
    events.tell("joined")
    groups = [current()]
    for members, is_wrong in plan.groups_of_the_victim() if is_victim else ((one, False) for one in plan.groups[1:]):
        if is_wrong and plan.fault in WRONG_GROUPS:
            events.tell("fault")
        elif is_wrong:
            go_wrong(plan, events)
        if members:
            groups.append(dist.new_group(list(members)))
    dist.barrier()
    for group in groups:
        if dist.get_rank(group) >= 0:
            group.set_timeout(plan.timeout)
    events.tell("calling")
    return groups


class Calls:
    """The calls of one rank, some asynchronous, and what comes of them."""

    def __init__(self, plan: Plan, rank: int, groups: list[Any], events: Events) -> None:
        self.plan, self.rank, self.groups, self.events = plan, rank, groups, events
        self.random = default_rng([plan.seed, 3, rank])
        self.outstanding: list[Issued] = []

    def make(self) -> None:
        for call, is_wrong in self._own_calls():
            members = self.plan.groups[call.group]
            if self.rank not in members:
                continue
            rank, size = members.index(self.rank), len(members)
            if (case := call.case_of(rank, size)) is None:
                continue
            if is_wrong:
                self.events.tell("fault", call=str(case))
            part = (ObjectsPart if call.as_objects else CasePart)(case, rank, size)
            issued = Issued(call, self.groups[call.group], part)
            async_op = bool(self.random.random() < 0.4) or case.operation == "ring"
            self._with_errors(issued, partial(issued.part.start, OnGroup(issued.group), async_op))
            self.outstanding.append(issued)
            while len(self.outstanding) > OUTSTANDING or (self.outstanding and self.random.random() < 0.5):
                self._complete(self.outstanding.pop(int(self.random.integers(len(self.outstanding)))))
        for issued in self.outstanding:
            self._complete(issued)

    def _own_calls(self) -> Iterator[tuple[Call, bool]]:
        if self.rank != self.plan.victim:
            yield from ((call, False) for call in self.plan.calls())
            return
        chooses = self.plan.moment == "calls" and self.plan.fault in BY_THEMSELVES
        for call, is_wrong in self.plan.calls_of_the_victim():
            if call.case.operation == "barrier":
                self.events.tell("barrier", number=call.number)
            if chooses and call.number == self.plan.number:
                if self.plan.fault == "crash":  # of another thread, so that it comes in the middle of a call
                    threading.Timer(self.plan.seconds, go_wrong, (self.plan, self.events)).start()
                else:
                    go_wrong(self.plan, self.events)
            yield call, is_wrong

    def _complete(self, issued: Issued) -> None:
        self._with_errors(issued, issued.part.wait)
        if text := issued.part.wrong():
            self.events.tell("wrong", text=f"{issued}: {text}"[:1000])
        if issued.part.name == "barrier":
            self.events.tell("met", number=issued.call.number, members=issued.group.members)

    def _with_errors(self, issued: Issued, function: Any) -> None:
        """Call the function; say of its error in which call it came, and whether the arrays are as it says."""
        try:
            function()
        except dist.OperationError as error:
            if isinstance(error, dist.CollectiveMismatch) and (text := issued.part.changed()):
                self.events.tell("wrong", text=f"{issued}: changed by a call that does not match: {text}"[:1000])
            _tell(self.events, error, str(issued), issued.moment)
            raise


def _tell(events: Events, error: dist.DistError, call: str, issued: float | None = None) -> None:
    """Say, once, what a call has raised, and which ranks that names."""
    if getattr(error, "is_told", False):
        return
    error.is_told = True  # type: ignore[attr-defined]
    events.has_told_error = True
    kind, named = type(error).__name__, sorted(named_by(error))
    events.tell("error", kind=kind, text=str(error)[:1500], named=named, call=call, issued=issued)


def go_wrong(plan: Plan, events: Events) -> None:
    """Do on the victim what the plan says, if it is anything that a program does by itself."""
    if plan.fault not in HARMLESS:
        events.tell("fault")
        fault = "abort()" if plan.fault == "crash" and plan.number % 2 else plan.fault
        WAYS_TO_GO_WRONG[fault]()


def _raise() -> None:
    raise ValueError("made by the test")


def _leave() -> None:
    dist.destroy_process_group()
    os._exit(0)


def _abort() -> None:
    current().abort()
    time.sleep(LONG)


def _compute() -> None:
    while True:
        pass


def _hold() -> None:
    library, mutex = ctypes.PyDLL(None), ctypes.create_string_buffer(64)  # zeros are a mutex that is not locked
    for _ in range(2):
        library.pthread_mutex_lock(mutex)  # the second time for ever: no signal ends this wait


WAYS_TO_GO_WRONG: dict[str, Callable[[], Any]] = {
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "pause": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "crash": lambda: ctypes.string_at(0),
    "abort()": os.abort,
    "os_exit": lambda: os._exit(3),
    "exit": lambda: sys.exit(3),
    "raise": _raise,
    "leave": _leave,
    "abort": _abort,
    "sleep": lambda: time.sleep(LONG),
    "compute": _compute,
    "hold": _hold,
}


def _plant(plan: Plan, events: Events, when: str) -> None:
    """Let the victim go wrong in an exit function: a late one runs after the library's own, an early one before."""
    if plan.moment == "shutdown" and (when == "late") == bool(plan.number % 2):
        atexit.register(go_wrong, plan, events)


def possessions() -> Counter[str]:
    """Count what this process has: open files and sockets, memory that is shared, threads."""
    has: Counter[str] = Counter()
    for descriptor in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # the one that lists them
            has[f"descriptor {os.readlink(descriptor).partition(':[')[0]}"] += 1
    for line in Path("/proc/self/maps").read_text().splitlines():
        if "s" in line.split()[1]:
            has[f"shared memory {line.partition('/')[2]}"] += 1
    has["thread"] = len(list(Path("/proc/self/task").iterdir()))
    return has
