"""What happens in one scenario: all of it follows from a seed, but for the instant at which a signal arrives.

A *plan* has the ranks and where they run, the groups, the calls, and one fault: what goes wrong, on which rank (the
*victim*), and at which moment.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from failures.instants import CONNECTING, JOINING
from numpy.random import Generator, default_rng
from operation_table import EVERY_RANK, OPERATIONS
from seeded_cases import Case

LAYOUTS = {"shm": 4, "tcp": 3, "spanning": 2, "hosts": 3, "toy": 1}
"""How the ranks are connected, and how often: "spanning" makes two hosts of one by name, "hosts" are two network
namespaces, and "toy" is a backend that is written against the interface of backends."""

DEATHS = ("kill", "term", "crash", "os_exit", "exit", "leave")
""""crash": by an access to no memory, or by abort()."""
EXCEPTIONS = ("raise", "interrupt", "abort")
ABSENCES = ("stop", "pause", "sleep", "compute", "hold")
"""Faults that only a deadline ends. A pause ends, by SIGCONT, when all others have raised; "hold" waits in C code that
keeps the interpreter's lock, so that no other thread of the program runs Python."""
WRONG_CALLS = ("dtype", "size", "op", "root", "other")
WRONG_ORDERS = ("skip", "swap", "twice")
WRONG_GROUPS = ("omit", "members")
"""The victim does not make a group that the others make, or makes one with a member more or less."""
CUTS = ("unplug", "silence")
"""Of the cable between two hosts. When it is unplugged the hosts notice; when it is silent, packets vanish."""
SHORT_CUTS = ("replug", "speak_again")
"""The same cuts, healed long before the deadline: TCP sends again what was lost."""
HARMLESS = ("none", "hiccup", *SHORT_CUTS)
"""A hiccup is a pause that ends long before the deadline."""

SIGNALLED = ("kill", "term", "stop", "pause", "hiccup", "interrupt", *CUTS, *SHORT_CUTS)
"""What happens from outside, at an instant that no rank chooses."""

ENDLESS = ("stop", "sleep", "compute", "hold", "abort")
"""After these a victim does not end by itself."""

BY_THEMSELVES = ("raise", "exit", "os_exit", "crash", "leave", "abort", "sleep", "compute", "hold")
"""What a program does before one of its calls."""

_ANYWHERE = ("kill", "term", "crash", "os_exit", "raise", "exit", "stop", "sleep", "hold")

FAULTS_AT = {
    "before": ("os_exit", "raise", "sleep"),
    "join": ("kill", "crash", "raise", "exit", "stop", "hold"),
    "meet": ("kill", "term", "stop", "pause", "hiccup", "speak_again"),
    "groups": (*_ANYWHERE, *WRONG_GROUPS, "hiccup", *SHORT_CUTS),
    "calls": (*DEATHS, *EXCEPTIONS, *ABSENCES, *WRONG_CALLS, *WRONG_ORDERS, *CUTS, "hiccup", *SHORT_CUTS),
    "leave": (*_ANYWHERE, *HARMLESS),
    "shutdown": ("kill", "crash", "os_exit", "raise", "stop", "sleep", "hold"),
}
MOMENTS = {"before": 1, "join": 2, "meet": 2, "groups": 2, "calls": 12, "leave": 3, "shutdown": 2}
"""When the fault comes, and how often: before the rank joins, in init_process_group ("join": before a certain request
to the store, "meet": at any time from its start on), while groups are made, during calls, while the ranks leave (with
destroy_process_group or by the end of the program), and in an exit function."""

LONG = 60.0
OPERATIONS_PLAYED = (*EVERY_RANK, "send", "send")
"""A "send" is a message from one rank to another; the rest of the group has no part in it."""
DTYPES = ("int32", "float32", "float64")
"""Of these the toy backend reduces as NumPy does."""
OPS = ("SUM", "MIN", "MAX")
LEAVING = ("destroy", "end", "exit")


@dataclass(frozen=True)
class Call:
    number: int
    group: int
    """The index of the group in the plan."""
    case: Case
    """Of a message from one rank to another, the case of the sender."""
    as_objects: bool = False
    """Whether the blocks of an all_gather are gathered as objects."""

    @property
    def is_collective(self) -> bool:
        """Whether all ranks make the call, and it is compared with those of the others: messages are counted apart."""
        return self.case.operation not in ("ring", "send") and not self.as_objects

    def case_of(self, rank: int, size: int) -> Case | None:
        """Return the case of a group rank; None where the rank has no part in the call."""
        if self.case.operation != "send":
            return self.case
        sender = (self.case.root + 1) % size
        if rank == self.case.root:
            return replace(self.case, operation="recv", root=sender)
        return self.case if rank == sender else None

    def is_unlike(self, other: Call) -> bool:
        """Return whether a rank that makes the other call in the place of this one makes a mistake that shows."""
        return self.is_collective and other.is_collective and _shown(self.case) != _shown(other.case)


@dataclass(frozen=True)
class Plan:
    seed: int
    layout: str
    hosts: tuple[int, ...]
    """The host of each rank."""
    moment: str
    fault: str
    victim: int
    groups: tuple[tuple[int, ...], ...]
    """Members; the first group is the world."""
    number: int
    """The call before which the program of the victim goes wrong; the number of calls where the fault comes later."""
    seconds: float
    """Of what comes from outside: how long after the victim has come to the moment."""
    instant: tuple[str, str]
    """In init_process_group: the request to the store before which the victim goes wrong."""
    timeout: float
    """Of the calls, and of starting where that is the moment."""

    @classmethod
    def of(cls, seed: int) -> Plan:
        random = default_rng(seed)
        moment = chosen(random, MOMENTS)
        layout = chosen(random, LAYOUTS)
        fault = chosen(random, dict.fromkeys(FAULTS_AT[moment], 1))
        if fault in (*CUTS, *SHORT_CUTS):
            layout = "hosts"
        if layout == "toy" and moment in ("before", "join", "meet"):
            layout = "shm"  # the same start
        size = int(random.choice([2, 3, 4, 5, 6], p=[0.2, 0.3, 0.3, 0.1, 0.1]))
        hosts = tuple(_hosts(random, layout, size))
        # Rank 0 hosts the store, by which the toy backend moves everything.
        victim = int(random.integers(1 if layout == "toy" else 0, size))
        some = [_members(random, size) for _ in range(int(random.integers(3)))] if size > 2 else []
        if moment == "groups" and not any(fault not in WRONG_GROUPS or victim in members for members in some):
            some = [tuple(range(size))]
        return cls(
            seed=seed,
            layout=layout,
            hosts=hosts,
            moment=moment,
            fault=fault,
            victim=victim,
            groups=(tuple(range(size)), *some),
            number=int(random.integers(25)),
            seconds=float(random.random() * random.choice([0.003, 0.03])),
            instant=(*JOINING, *CONNECTING)[random.integers(len(JOINING) + len(CONNECTING))],
            timeout=float(random.choice(_timeouts(moment, fault))),
        )

    @property
    def size(self) -> int:
        return len(self.hosts)

    @property
    def has_end(self) -> bool:
        """Whether the ranks make so many calls and then leave. Otherwise they go on until one fails.

        In init_process_group the instant of the fault may not come: some requests to the store are made by some ranks.
        """
        return self.moment in ("join", "leave", "shutdown") or self.fault in HARMLESS

    @property
    def may_go_unnoticed(self) -> bool:
        """Whether the others may have nothing more to do with the victim when it goes wrong."""
        return self.moment in ("leave", "shutdown") or self.fault in HARMLESS

    @property
    def place(self) -> int:
        """Return which group after the world the victim goes wrong before, where that is the moment."""
        places = range(1, len(self.groups))
        own = [place for place in places if self.fault not in WRONG_GROUPS or self.victim in self.groups[place]]
        return own[self.number % len(own)]

    def groups_of_the_victim(self) -> Iterator[tuple[tuple[int, ...], bool]]:
        """Yield the groups after the world that the victim makes, () for one that it leaves out, and where it errs."""
        for place, members in enumerate(self.groups[1:], 1):
            is_wrong = self.moment == "groups" and self.fault not in SIGNALLED and place == self.place
            if is_wrong and self.fault in WRONG_GROUPS:
                other = [rank for rank in range(self.size) if rank != self.victim][self.number % (self.size - 1)]
                members = tuple(sorted({*members} ^ {other})) if self.fault == "members" else ()
            yield members, is_wrong

    def on_one_host(self) -> Plan:
        """Return the plan for a machine that cannot have two hosts: a cable that is cut is a rank that is stopped."""
        fault = "stop" if self.fault in CUTS else "hiccup" if self.fault in SHORT_CUTS else self.fault
        return replace(self, layout="spanning", fault=fault)

    def calls(self) -> Iterator[Call]:
        random = default_rng([self.seed, 1])
        number = 0
        while not self.has_end or number < self.number:
            group = int(random.integers(len(self.groups)))
            count = int(random.choice([random.integers(40), random.integers(3000), random.integers(60_000)]))
            root = int(random.integers(len(self.groups[group])))
            # Not random.choice: of texts, it loses the exception of a signal's handler that runs inside.
            name, dtype, op = (texts[random.integers(len(texts))] for texts in (OPERATIONS_PLAYED, DTYPES, OPS))
            as_objects = name == "all_gather" and bool(random.random() < 0.5)
            yield Call(number, group, Case(name, dtype, count, op, root, seed=number % 100), as_objects)
            number += 1

    def calls_of_the_victim(self) -> Iterator[tuple[Call, bool]]:
        """Yield the calls that the victim makes, and whether it goes wrong with this one."""
        calls, is_due = self.calls(), self.fault in (*WRONG_CALLS, *WRONG_ORDERS)
        ahead = next(calls, None)
        while ahead is not None:
            call, ahead = ahead, next(calls, None)
            if not is_due or call.number < self.number or self.victim not in self.groups[call.group]:
                yield call, False
            elif self.fault in WRONG_CALLS and (wrong := _wrong(call, self.fault, len(self.groups[call.group]))):
                is_due = False
                yield replace(call, case=wrong), True
            elif self.fault in WRONG_ORDERS and ahead and ahead.group == call.group and call.is_unlike(ahead):
                is_due = False
                if self.fault == "skip":
                    yield ahead, True
                else:
                    yield from ((ahead, True), (call, False)) if self.fault == "swap" else ((call, False), (call, True))
                    if self.fault == "twice":
                        yield ahead, False
                ahead = next(calls, None)
            else:
                yield call, False

    def __str__(self) -> str:
        where = f"on hosts {self.hosts}, " if self.layout in ("hosts", "spanning") else ""
        at = f" {' '.join(self.instant)}" if self.moment == "join" else ""
        return (
            f"seed {self.seed}: {self.fault} of rank {self.victim} at {self.moment}{at}, call {self.number}, "
            f"{self.seconds * 1000:.1f} ms; {self.size} ranks, {self.layout}, {where}groups {list(self.groups[1:])}, "
            f"timeout {self.timeout:g} s"
        )


def chosen(random: Generator, weights: dict[str, int]) -> str:
    """Return one of the texts, each as often as its weight says."""
    shares = [weight / sum(weights.values()) for weight in weights.values()]
    return list(weights)[int(random.choice(len(weights), p=shares))]


def _hosts(random: Generator, layout: str, size: int) -> list[int]:
    if layout == "spanning":
        return [rank % 2 for rank in range(size)]
    if layout != "hosts":
        return [0] * size
    while len(set(hosts := random.integers(2, size=size).tolist())) < 2:
        pass
    return [host ^ hosts[0] for host in hosts]


def _members(random: Generator, size: int) -> tuple[int, ...]:
    return tuple(sorted(random.permutation(size)[: random.integers(2, size + 1)].tolist()))


def _timeouts(moment: str, fault: str) -> tuple[float, ...]:
    """Return the timeouts of which a plan has one."""
    if moment == "before":
        return (1.5,)
    if fault in WRONG_GROUPS:
        return (3.0, LONG)
    if (moment in ("join", "groups") and fault in ABSENCES) or (moment == "meet" and fault not in HARMLESS):
        return (3.0,)
    return (1.0 if fault in (*ABSENCES, *WRONG_ORDERS, *CUTS) else LONG,)


def _wrong(call: Call, fault: str, size: int) -> Case | None:
    """Return the case that a mistake makes of that of a call; None where it cannot be made of this one."""
    changes: dict[str, Any] = {}
    if not call.is_collective:
        return None
    case = call.case
    if fault == "other":
        changes["operation"] = "broadcast" if "all_gather" in case.operation else "all_gather"
    elif fault == "root" and OPERATIONS[case.operation].root:
        changes["root"] = (case.root + 1) % size
    elif fault == "op" and OPERATIONS[case.operation].reduces:
        changes["op"] = OPS[(OPS.index(case.op) + 1) % len(OPS)]
    elif case.count and case.operation != "barrier" and fault in ("dtype", "size"):
        if fault == "dtype":
            changes["dtype"] = DTYPES[(DTYPES.index(case.dtype) + 1) % len(DTYPES)]
        else:
            changes["count"] = case.count + 1
    return replace(case, **changes) if changes else None


def _shown(case: Case) -> tuple[Any, ...]:
    """Return what ranks can see of each other's calls; with one array in the place of a list it is the same call."""
    name = case.operation.removesuffix("_single")
    root, op = case.root if case.row.root else 0, case.op if case.row.reduces else ""
    return (name, root, op) if name == "barrier" else (name, root, op, case.dtype, case.count)
