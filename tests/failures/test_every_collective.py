"""Ranks that are killed or stopped in the middle of any collective: the others are told whom they lost or wait for.

Each collective is called over and over, so that the rank ends at any moment of it. The worlds of all collectives run
at the same time: they wait more than they work.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest
from failures.operations import TRANSPORTS, on

import procgroup as dist
from world import start

pytestmark = pytest.mark.timeout(120)

SIZE = 3
VICTIM = 1
AT_ONCE = 4
"""Worlds that run at the same time."""

transports = pytest.mark.parametrize("transport", TRANSPORTS)


def ones(count: int) -> Any:
    return np.ones(count, np.float32)


def lists(count: int) -> list[Any]:
    return [ones(count) for _ in range(SIZE)]


COLLECTIVES: dict[str, Callable[[int, int], Any]] = {
    "all_reduce": lambda count, rank: dist.all_reduce(ones(count)),
    "scan": lambda count, rank: dist.scan(ones(count)),
    "exscan": lambda count, rank: dist.exscan(ones(count)),
    "reduce": lambda count, rank: dist.reduce(ones(count), 0),
    "broadcast": lambda count, rank: dist.broadcast(ones(count), VICTIM),
    "gather": lambda count, rank: dist.gather(ones(count), None if rank else lists(count), 0),
    "all_gather": lambda count, rank: dist.all_gather(lists(count), ones(count)),
    "all_gather_single": lambda count, rank: dist.all_gather_single(ones(count * SIZE), ones(count)),
    "scatter": lambda count, rank: dist.scatter(ones(count), lists(count) if rank == VICTIM else None, VICTIM),
    "reduce_scatter": lambda count, rank: dist.reduce_scatter(ones(count), lists(count)),
    "reduce_scatter_single": lambda count, rank: dist.reduce_scatter_single(ones(count), ones(count * SIZE)),
    "all_to_all": lambda count, rank: dist.all_to_all(lists(count), lists(count)),
    "all_to_all_single": lambda count, rank: dist.all_to_all_single(ones(count * SIZE), ones(count * SIZE)),
    "barrier": lambda count, rank: dist.barrier(),
}
"""Those that every rank must come to, so that no survivor can go on without the victim for ever."""


def call_until_it_fails(rank: int, size: int, verb: str, count: int, limit: float) -> tuple[str, Any, str]:
    """Return the error's type, the ranks that it names and its text."""
    dist.init_process_group(timeout=limit)
    dist.barrier()
    print("calling", flush=True)
    try:
        while True:
            COLLECTIVES[verb](count, rank)
            dist.barrier()  # a rank that only sends, as in gather, must not run ahead without end
    except (dist.PeerLost, dist.PeerFailed) as error:
        seen = type(error).__name__, [error.peer], str(error)
    except dist.CollectiveTimeout as error:
        seen = "CollectiveTimeout", sorted(error.missing), str(error)
    print("told", flush=True)
    return seen


def play(verbs: list[str], transport: str, count: int, number: int, limit: float) -> dict[str, list[Any]]:
    """Interfere with the victim of each world while it calls; return what the survivors saw."""
    seen = {}
    with ExitStack() as worlds:
        running = {
            verb: worlds.enter_context(
                start(call_until_it_fails, SIZE, args=(verb, count, limit), environment=on(transport))
            )
            for verb in verbs
        }
        for order, world in enumerate(running.values()):
            world.wait_for_output(VICTIM, "calling")
            time.sleep(0.003 * order)
            world.kill(VICTIM, number)
        for verb, world in running.items():
            for rank in range(SIZE):
                if rank != VICTIM:
                    world.wait_for_output(rank, "told", 60)
            if number == signal.SIGSTOP:  # rank 0 keeps its store up for it
                world.kill(VICTIM, signal.SIGKILL)
            outcomes = world.wait(60)
            seen[verb] = [(outcome.value, outcome.traceback) for outcome in outcomes if outcome.rank != VICTIM]
    return seen


def expect_lost(seen: dict[str, list[Any]]) -> None:
    for verb, survivors in seen.items():
        for value, traceback in survivors:
            assert value is not None, f"{verb}: {traceback}"
            assert value[:2] == ("PeerLost", [VICTIM]), f"{verb}: {value}"


def expect_late(seen: dict[str, list[Any]], transport: str) -> None:
    """A survivor whose time is up names the victim; one that hears of it first names both that one and the victim.

    A broadcast over TCP comes to rank 0 by way of rank 2, so rank 0 may rightly say that it waits for that one.
    """
    for verb, survivors in seen.items():
        awaited = {VICTIM, 2} if (verb, transport) == ("broadcast", "tcp") else {VICTIM}
        for value, traceback in survivors:
            assert value is not None, f"{verb}: {traceback}"
            name, ranks, text = value
            if name == "PeerFailed":
                assert ranks != [VICTIM], f"{verb}: {value}"
                assert any(f"while it waited for rank {rank}" in text for rank in awaited), f"{verb}: {value}"
            else:
                assert name == "CollectiveTimeout" and awaited & set(ranks), f"{verb}: {value}"


def batches() -> list[list[str]]:
    names = list(COLLECTIVES)
    return [names[first : first + AT_ONCE] for first in range(0, len(names), AT_ONCE)]


@transports
@pytest.mark.parametrize("verbs", batches(), ids=lambda verbs: verbs[0])
def test_a_rank_that_is_killed_in_any_collective_is_named(transport: str, verbs: list[str]) -> None:
    expect_lost(play(verbs, transport, 50_000, signal.SIGKILL, 60))


@pytest.mark.slow
@transports
@pytest.mark.parametrize("count", [1, 3000, 1_000_000])
@pytest.mark.parametrize("verb", COLLECTIVES)
def test_a_rank_that_is_killed_at_any_size_is_named(transport: str, verb: str, count: int) -> None:
    for _ in range(5):
        expect_lost(play([verb], transport, count, signal.SIGKILL, 60))


@pytest.mark.slow
@transports
@pytest.mark.parametrize("verbs", batches(), ids=lambda verbs: verbs[0])
@pytest.mark.parametrize("count", [10, 300_000])
def test_a_rank_that_is_stopped_in_any_collective_is_named_at_the_deadline(
    transport: str, verbs: list[str], count: int
) -> None:
    expect_late(play(verbs, transport, count, signal.SIGSTOP, 3.0), transport)


def be_interrupted(rank: int, size: int, verb: str, count: int) -> str:
    """All ranks but the victim wait in the collective until Ctrl-C; the victim does not come."""
    dist.init_process_group(timeout=120)
    dist.barrier()
    if rank == VICTIM:
        time.sleep(120)
    try:
        print("calling", flush=True)
        COLLECTIVES[verb](count, rank)
    except KeyboardInterrupt:
        print("told", flush=True)
        return "interrupted"
    return "not interrupted"


@pytest.mark.slow
@transports
@pytest.mark.parametrize("verb", COLLECTIVES)
def test_ctrl_c_ends_the_wait_in_any_collective(transport: str, verb: str) -> None:
    with start(be_interrupted, SIZE, args=(verb, 300_000), environment=on(transport)) as world:
        world.wait_for_output(0, "calling")
        time.sleep(0.5)
        world.kill(0, signal.SIGINT)
        world.wait_for_output(0, "told", 10)
        world.kill(VICTIM, signal.SIGKILL)  # the other one is told of the interrupt or of this, and ends
        assert world.wait(60)[0].value == "interrupted"
