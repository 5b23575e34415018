"""Play scenarios: fork the ranks of each, strike, watch until all have ended, and look for what they have left."""

from __future__ import annotations

import contextlib
import json
import os
import re
import selectors
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import two_hosts
from forked_ranks import be_a_program, die_with_parent, kill_leftovers
from soak.plan import CUTS, ENDLESS, SHORT_CUTS, SIGNALLED, Plan
from two_hosts import Host
from world import free_port, rank_environment

HANG_SECONDS = 45.0
"""How long a scenario may take before its ranks count as hanging."""
TICK = 0.1
MARKS = {"meet": "start", "groups": "joined", "calls": "calling", "leave": "leaving"}
"""What the victim says when it has come to the moment of a strike."""
STRIKES = {"interrupt": signal.SIGINT, "kill": signal.SIGKILL, "term": signal.SIGTERM}
"""The signals that end the victim; others stop it."""


@dataclass
class Seen:
    """What was seen of one rank. Moments are those of time.monotonic()."""

    rank: int
    pid: int
    events: list[dict[str, Any]] = field(default_factory=list)
    status: int | None = None
    """The exit status, negative for a signal; None where the rank had to be killed because it hung."""
    ended: float = 0.0
    delay: float = 0.0
    """How long its main thread has waited for a core, in seconds."""
    output: str = ""

    def first(self, what: str) -> dict[str, Any] | None:
        return next((event for event in self.events if event["what"] == what), None)

    def all(self, what: str) -> list[dict[str, Any]]:
        return [event for event in self.events if event["what"] == what]


@dataclass
class Scene:
    """What was seen of one scenario."""

    ranks: list[Seen]
    struck: float | None = None
    resumed: float | None = None
    released: float | None = None
    """When the victim was killed because all others had ended, or had said that they wait for it."""
    left: list[str] = field(default_factory=list)
    """Processes, sockets and files that were there when all ranks had ended."""
    delay: float = 0.0
    """How long the watcher itself has waited for a core, in seconds."""

    def fault(self, plan: Plan) -> float | None:
        told = self.ranks[plan.victim].all("fault")
        return told[0]["moment"] if told else self.struck


def start(plan: Plan, place: Path, hosts: Sequence[Host]) -> tuple[int, int] | list[tuple[int, int]]:
    """Fork the ranks. Returns the pids and pipes of all; and in each rank its number and the end of its pipe."""
    shutil.rmtree(place, ignore_errors=True)
    (place / "files").mkdir(parents=True)
    started = []
    port = free_port()
    for rank in range(plan.size):
        reading, writing = os.pipe()
        pid = os.fork()
        if pid == 0:
            die_with_parent()
            _settle(plan, rank, place, port, hosts)
            return rank, writing
        os.close(writing)
        started.append((pid, reading))
    return started


def _settle(plan: Plan, rank: int, place: Path, port: int, hosts: Sequence[Host]) -> None:
    transport = {"toy": "auto", "hosts": "auto"}.get(plan.layout, plan.layout)
    variables = rank_environment(rank, plan.size, port, {"PROCGROUP_TRANSPORT": transport, "TMPDIR": f"{place}/files"})
    if plan.layout == "hosts":
        variables |= two_hosts.environments(hosts, plan.hosts)[rank]
    # All sockets of a host's namespace are this scenario's.
    namespace = variables.get("WORLD_NAMESPACE", hosts[0].namespace) if hosts else ""
    be_a_program(variables, place / f"{rank}.output", namespace)


class Watch:
    """Strikes as the plan says, and sees what becomes of the ranks."""

    def __init__(self, plan: Plan, place: Path, hosts: Sequence[Host], started: Sequence[tuple[int, int]]) -> None:
        self.plan, self.place, self.hosts = plan, place, hosts
        self.scene = Scene([Seen(rank, pid) for rank, (pid, _) in enumerate(started)])
        self.victim = self.scene.ranks[plan.victim]
        self._pipes = [reading for _, reading in started]
        self._unread = [b""] * plan.size
        self._running = {rank: os.pidfd_open(seen.pid) for rank, seen in enumerate(self.scene.ranks)}
        self._due: list[tuple[float, Callable[[], None]]] = []
        self._selector = selectors.DefaultSelector()
        self._is_cut = False

    def watch(self) -> Scene:
        before, deadline = own_delay(), time.monotonic() + HANG_SECONDS
        for rank, pipe in enumerate(self._pipes):
            os.set_blocking(pipe, False)
            self._selector.register(pipe, selectors.EVENT_READ, (self._read, rank))
            self._selector.register(self._running[rank], selectors.EVENT_READ, (self._collect, rank))
        while self._running and time.monotonic() < deadline:
            for key, _ in self._selector.select(self._seconds_to_wait()):
                function, rank = key.data
                function(rank)
            now = time.monotonic()
            for action in [action for action in self._due if action[0] <= now]:
                self._due.remove(action)
                action[1]()
            if self._is_awaited():
                self.scene.released = time.monotonic()
                self._send(signal.SIGKILL)
        self._end_what_hangs()
        if self._is_cut:
            self._mend_the_cable()
        self.scene.left = _leftovers(self.place / "files", self.hosts)
        for seen in self.scene.ranks:
            seen.output = self._output(seen.rank)
        for pipe in self._pipes:
            os.close(pipe)
        self._selector.close()
        self.scene.delay = own_delay() - before
        return self.scene

    def _seconds_to_wait(self) -> float:
        return max(0.0, min([TICK, *(moment - time.monotonic() for moment, _ in self._due)]))

    def _read(self, rank: int) -> None:
        with contextlib.suppress(BlockingIOError):
            while data := os.read(self._pipes[rank], 65536):
                *lines, self._unread[rank] = (self._unread[rank] + data).split(b"\n")
                for line in lines:
                    self._note(rank, json.loads(line))
            self._selector.unregister(self._pipes[rank])

    def _note(self, rank: int, event: dict[str, Any]) -> None:
        self.scene.ranks[rank].events.append(event)
        others = [seen for seen in self.scene.ranks if seen is not self.victim]
        if self.plan.fault == "pause" and event["what"] == "error" and all(seen.first("error") for seen in others):
            self._due.append((time.monotonic() + 10 * self.plan.seconds, self._resume))
        mark = MARKS.get(self.plan.moment)
        if self.plan.fault not in SIGNALLED or event["what"] != mark:
            return
        # Before a rank has come to its calls, it waits with the longer timeout of a start.
        awaited = self.scene.ranks if self.plan.moment == "calls" else [self.victim]
        if self.scene.ranks[rank] in awaited and all(seen.first(mark) for seen in awaited):
            self._due.append((time.monotonic() + self.plan.seconds, self._strike))

    def _collect(self, rank: int) -> None:
        seen = self.scene.ranks[rank]
        seen.ended, seen.delay = time.monotonic(), own_delay(seen.pid)
        seen.status = os.waitstatus_to_exitcode(os.waitpid(seen.pid, 0)[1])
        self._selector.unregister(self._running[rank])
        os.close(self._running.pop(rank))
        if rank in [key.data[1] for key in self._selector.get_map().values()]:
            self._read(rank)

    def _strike(self) -> None:
        plan = self.plan
        if plan.victim not in self._running:
            return
        self.scene.struck = time.monotonic()
        if plan.fault in (*CUTS, *SHORT_CUTS):
            self._cut_the_cable()
        else:
            self._send(STRIKES.get(plan.fault, signal.SIGSTOP))
        if plan.fault == "hiccup":
            self._due.append((self.scene.struck + 0.05 + 5 * plan.seconds, self._resume))
        if plan.fault in SHORT_CUTS:
            self._due.append((self.scene.struck + 0.05 + 15 * plan.seconds, self._mend_the_cable))

    def _resume(self) -> None:
        self.scene.resumed = time.monotonic()
        self._send(signal.SIGCONT)

    def _send(self, number: int) -> None:
        if self.plan.victim in self._running:
            os.kill(self.victim.pid, number)

    def _is_awaited(self) -> bool:
        """Return whether only the victim's end is left to wait for, and does not come by itself."""
        if self.plan.fault not in ENDLESS or self.scene.released is not None:
            return False
        if self.plan.victim not in self._running or self.scene.fault(self.plan) is None:
            return False
        others = [self.scene.ranks[rank] for rank in self._running if rank != self.plan.victim]
        return all(says_for_whom_it_waits(self._output(seen.rank)) for seen in others)

    def _output(self, rank: int) -> str:
        output = self.place / f"{rank}.output"
        return output.read_text(errors="replace") if output.exists() else ""

    def _cut_the_cable(self) -> None:
        self._is_cut = True
        if self.plan.fault in ("unplug", "replug"):
            _ip(self.hosts[self.plan.number % 2], "link set cable down")
            return
        for number, host in enumerate(self.hosts):
            other = self.hosts[1 - number].address
            _ip(host, f"neigh replace {other} lladdr 02:00:00:00:00:01 nud permanent dev cable")

    def _mend_the_cable(self) -> None:
        self._is_cut = False
        for number, host in enumerate(self.hosts):
            _ip(host, "link set cable up")
            if self.plan.fault in ("silence", "speak_again"):
                _ip(host, f"neigh del {self.hosts[1 - number].address} dev cable")

    def _end_what_hangs(self) -> None:
        for seen in [self.scene.ranks[rank] for rank in self._running]:
            os.kill(seen.pid, signal.SIGCONT)
            os.kill(seen.pid, signal.SIGUSR2)
        if self._running:
            time.sleep(1.0)  # in which they write their stacks
        for rank, descriptor in self._running.items():
            self._read(rank)
            os.kill(self.scene.ranks[rank].pid, signal.SIGKILL)
            os.waitpid(self.scene.ranks[rank].pid, 0)
            os.close(descriptor)


def says_for_whom_it_waits(output: str) -> bool:
    """Return whether a rank has said that it waits for others at its end."""
    return re.search(r"waits for .*\branks? \d", output) is not None


def own_delay(pid: int | str = "self") -> float:
    """Return for how many seconds the main thread of a process has waited for a core, so far."""
    try:
        return int(Path(f"/proc/{pid}/schedstat").read_text().split()[1]) / 1e9
    except (FileNotFoundError, ProcessLookupError):
        return 0.0


def _ip(host: Host, command: str) -> None:
    subprocess.run(["ip", "-n", host.namespace, *command.split()], check=True, capture_output=True)


def _leftovers(files: Path, hosts: Sequence[Host]) -> list[str]:
    """Return the processes, files and sockets that are left a second after the ranks' end; no process is left then."""
    left = [f"process {command}" for command in kill_leftovers()]
    left += [f"file {file.relative_to(files)}" for file in files.rglob("*")]
    for host in hosts:
        with ThreadPoolExecutor(1) as thread:
            thread.submit(two_hosts.enter, host.namespace).result()
            left += thread.submit(_sockets).result()
    return left


def _sockets() -> list[str]:
    """Return the sockets of processes in this thread's namespace; the kernel's own, of ended ones, have no inode."""
    found = []
    for kind, place in (("tcp", 9), ("tcp6", 9), ("unix", 6)):
        with contextlib.suppress(FileNotFoundError):  # without IPv6
            _, *lines = Path(f"/proc/thread-self/net/{kind}").read_text().splitlines()
            found += [f"socket {kind} {line}" for line in lines if line.split()[place] != "0"]
    return found
