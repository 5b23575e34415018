"""Ranks that are killed or stopped in the middle of any collective: the others name the rank that they lost or await.

Each collective is called over and over, so that the rank ends at any moment of it. The worlds of all collectives run
at the same time: they wait more than they work.
"""

from __future__ import annotations

import re
import signal
import time
from contextlib import ExitStack
from typing import Any

import pytest
from failures.waiting_calls import TRANSPORTS, on
from operation_table import COLLECTIVES, OPERATIONS, Part

import procgroup as dist
from world import start

SIZE = 3
VICTIM = 1
AT_ONCE = 4
"""Worlds that run at the same time."""

transports = pytest.mark.parametrize("transport", TRANSPORTS)


def part_of(name: str, rank: int, count: int) -> Part:
    """Return a rank's part in a call in which the victim gives to all, or takes as all do."""
    root = VICTIM if OPERATIONS[name].root == "source" else 0
    return Part(name, rank, SIZE, root=root, count=count, dtype="float32")


def call_until_it_fails(rank: int, size: int, name: str, count: int, limit: float) -> tuple[str, Any, str]:
    """Return the error's type, the ranks that it names and its text."""
    dist.init_process_group(timeout=limit)
    dist.barrier()
    part = part_of(name, rank, count)
    print("calling", flush=True)
    try:
        while True:
            part.start(dist)
            dist.barrier()  # a rank that only sends, as in gather, must not run ahead without end
    except dist.PeerLost as error:
        seen = "PeerLost", [error.peer], str(error)
    except dist.PeerFailed as error:
        seen = "PeerFailed", [error.peer, *error.missing], str(error)
    except dist.CollectiveTimeout as error:
        seen = "CollectiveTimeout", sorted(error.missing), str(error)
    print("told", flush=True)
    return seen


def play(names: list[str], transport: str, count: int, number: int, limit: float) -> dict[str, list[Any]]:
    """Interfere with the victim of each world while it calls; return what the survivors saw."""
    seen = {}
    with ExitStack() as worlds:
        running = {
            name: worlds.enter_context(
                start(call_until_it_fails, SIZE, args=(name, count, limit), environment=on(transport))
            )
            for name in names
        }
        for order, world in enumerate(running.values()):
            world.wait_for_output(VICTIM, "calling")
            time.sleep(0.003 * order)  # at another moment of each
            world.kill(VICTIM, number)
        for name, world in running.items():
            for rank in range(SIZE):
                if rank != VICTIM:
                    world.wait_for_output(rank, "told", 60)
            if number == signal.SIGSTOP:  # rank 0 keeps its store up for it
                world.kill(VICTIM, signal.SIGKILL)
            outcomes = world.wait(60)
            seen[name] = [(outcome.value, outcome.traceback) for outcome in outcomes if outcome.rank != VICTIM]
    return seen


def expect_lost(seen: dict[str, list[Any]]) -> None:
    for name, survivors in seen.items():
        for value, traceback in survivors:
            assert value is not None, f"{name}: {traceback}"
            assert value[:2] == ("PeerLost", [VICTIM]), f"{name}: {value}"


def expect_late(seen: dict[str, list[Any]], transport: str) -> None:
    """A survivor whose time is up names the victim; one that is notified first names both that one and the victim.

    Beside the victim it may name the other survivor, if that one has not done its part either: it waits, too. What
    comes from the victim by way of another rank is that one's to send, which may then be named alone: a broadcast over
    TCP comes to rank 0 by way of rank 2, and everything from the victim's host to rank 2 by way of rank 0. Nobody else
    names that one alone, not even when another's time limit passes first.
    """
    for name, survivors in seen.items():
        for rank, (value, traceback) in zip((0, 2), survivors, strict=True):
            assert value is not None, f"{name}: {traceback}"
            kind, ranks, text = value
            by_relay = {"tcp": name == "broadcast" and rank == 0, "spanning": rank == 2}.get(transport, False)
            awaited = {VICTIM, 2 - rank} if by_relay else {VICTIM}
            if kind == "PeerFailed":
                assert ranks[0] != VICTIM and awaited & set(ranks[1:]), f"{name}: {value}"
                assert re.search(f"while it waited for ranks? {ranks[1]}\\b", text), f"{name}: {value}"
            else:
                assert kind == "CollectiveTimeout" and awaited & set(ranks), f"{name}: {value}"


def batches() -> list[list[str]]:
    return [COLLECTIVES[first : first + AT_ONCE] for first in range(0, len(COLLECTIVES), AT_ONCE)]


@transports
@pytest.mark.parametrize("names", batches(), ids=lambda names: names[0])
def test_a_rank_that_is_killed_in_any_collective_is_named(transport: str, names: list[str]) -> None:
    expect_lost(play(names, transport, 50_000, signal.SIGKILL, 60))


@pytest.mark.slow
@transports
@pytest.mark.parametrize("count", [1, 3000, 1_000_000])
@pytest.mark.parametrize("name", COLLECTIVES)
def test_a_rank_that_is_killed_at_any_size_is_named(transport: str, name: str, count: int) -> None:
    for _ in range(5):
        expect_lost(play([name], transport, count, signal.SIGKILL, 60))


@pytest.mark.slow
@transports
@pytest.mark.parametrize("names", batches(), ids=lambda names: names[0])
@pytest.mark.parametrize("count", [10, 300_000])
def test_a_rank_that_is_stopped_in_any_collective_is_named_at_the_deadline(
    transport: str, names: list[str], count: int
) -> None:
    expect_late(play(names, transport, count, signal.SIGSTOP, 3.0), transport)


def be_interrupted(rank: int, size: int, name: str, count: int) -> str:
    """All ranks but the victim wait in the collective until Ctrl-C; the victim does not come."""
    dist.init_process_group(timeout=120)
    dist.barrier()
    if rank == VICTIM:
        time.sleep(120)
    try:
        print("calling", flush=True)
        part_of(name, rank, count).start(dist)
    except KeyboardInterrupt:
        print("told", flush=True)
        return "interrupted"
    return "not interrupted"


@pytest.mark.slow
@transports
@pytest.mark.parametrize("name", COLLECTIVES)
def test_ctrl_c_ends_the_wait_in_any_collective(transport: str, name: str) -> None:
    with start(be_interrupted, SIZE, args=(name, 300_000), environment=on(transport)) as world:
        world.wait_for_output(0, "calling")
        world.wait_until_asleep(0)
        world.kill(0, signal.SIGINT)
        world.wait_for_output(0, "told")
        world.kill(VICTIM, signal.SIGKILL)  # the other one is notified of the interrupt or of this, and ends
        assert world.wait(60)[0].value == "interrupted"
