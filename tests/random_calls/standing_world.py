"""A world of ranks that stays up and is fed one thing to do after the other, so that each costs milliseconds.

Each rank calls ``function(dist, rank, size, task)`` for every task and answers what it returned, or with the text of
what it raised. After an error, or when an answer does not come, the world is replaced by a fresh one.
"""

from __future__ import annotations

import os
import socket
import tempfile
import traceback
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any

from world import World, WorldFailed, describe, start

SECONDS = 60.0
"""How long a rank may take to come, or to answer."""

Function = Callable[[Any, int, int, Any], Any]


class StandingWorld:
    """Ranks that wait for tasks. ``function`` must stand at the top of a module below ``tests``."""

    def __init__(
        self, function: Function, size: int, transport: str, environments: Sequence[Mapping[str, str]] | None = None
    ) -> None:
        self._function, self._size, self._transport = function, size, transport
        self._environments = environments
        self._world: World | None = None
        self._ranks: list[Connection] = []

    def play(self, task: Any) -> list[Any]:
        """Give every rank the task and return their answers; raise AssertionError when one failed or none came."""
        if self._world is None:
            self._start()
        for rank in self._ranks:
            rank.send(task)
        answers: dict[int, Any] = {}
        while len(answers) < self._size:
            missing = [rank for number, rank in enumerate(self._ranks) if number not in answers]
            ready = wait(missing, SECONDS)
            if not ready:
                raise AssertionError(
                    f"no answer from ranks {[self._ranks.index(rank) for rank in missing]}\n{self._end()}"
                )
            for rank in ready:
                answers[self._ranks.index(rank)] = self._answer(rank)
            if any(error for error, _ in answers.values()):
                break  # the others may wait for the rank that failed
        failed = [f"rank {rank}: {error}" for rank, (error, _) in sorted(answers.items()) if error]
        if failed:
            self._end()
            raise AssertionError("\n".join(failed))
        return [answers[rank][1] for rank in range(self._size)]

    def close(self) -> None:
        """Let the ranks leave in order, and fail when one of them does not."""
        for rank in self._ranks:
            rank.close()
        if self._world is not None:
            with self._world as world:
                outcomes = world.wait(SECONDS)
            self._world = None
            if not all(outcome.ok for outcome in outcomes):
                raise WorldFailed(outcomes, f"{world.what}: a rank failed")

    def __enter__(self) -> StandingWorld:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()
        else:
            self._end()

    def _start(self) -> None:
        with tempfile.TemporaryDirectory() as folder, socket.socket(socket.AF_UNIX) as listener:
            listener.bind(f"{folder}/tasks")
            listener.listen(self._size)
            listener.settimeout(SECONDS)
            where = (self._function.__module__, self._function.__qualname__)
            environment = {"PROCGROUP_TRANSPORT": self._transport}
            self._world = start(
                be_rank,
                self._size,
                args=(f"{folder}/tasks", where),
                environment=environment,
                environments=self._environments,
            )
            try:
                came = [Connection(listener.accept()[0].detach()) for _ in range(self._size)]
                by_rank = {connection.recv(): connection for connection in came}
            except (TimeoutError, EOFError) as error:
                raise AssertionError(f"not all ranks came: {self._end()}") from error
        self._ranks = [by_rank[rank] for rank in range(self._size)]

    def _answer(self, rank: Connection) -> Any:
        try:
            return rank.recv()
        except (EOFError, ConnectionResetError):
            return f"it ended{describe(self._world.outcomes()) if self._world else ''}", None

    def _end(self) -> str:
        """Kill the ranks and return what they printed."""
        if self._world is None:
            return ""
        with self._world as world:
            world.close()
            printed = describe(world.outcomes())
        for rank in self._ranks:
            rank.close()
        self._world, self._ranks = None, []
        return printed


def be_rank(rank: int, size: int, address: str, where: tuple[str, str]) -> None:
    """Do what is asked until the test closes the connection."""
    import importlib

    import procgroup as dist

    function = getattr(importlib.import_module(where[0]), where[1])
    with socket.socket(socket.AF_UNIX) as joined:
        joined.connect(address)
        tasks = Connection(os.dup(joined.fileno()))
    tasks.send(rank)
    dist.init_process_group(timeout=SECONDS)
    with tasks:
        while True:
            try:
                task = tasks.recv()
            except (EOFError, ConnectionResetError):
                return
            try:
                answer = ("", function(dist, rank, size, task))
            except Exception:
                answer = (traceback.format_exc(), None)
            tasks.send(answer)
