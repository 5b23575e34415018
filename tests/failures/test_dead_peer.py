"""A rank's process ends: every other rank gets PeerLost, that names it, in whatever call it is."""

from __future__ import annotations

import faulthandler
import os
import signal
import threading
import time
from typing import Any

import numpy as np
import psutil
import pytest
from failures.waiting_calls import ABSENT, FORMS, TRANSPORTS, allowance, on, perform

import procgroup as dist
from world import Outcome, start, wait_until

transports = pytest.mark.parametrize("transport", TRANSPORTS)

ENDINGS = ["SIGKILL", "SIGTERM", "os._exit", "segmentation fault", "exit without destroy", "exception"]
SIZE = 3


def end(ending: str) -> None:
    """End this process, or return for it to end in order."""
    if ending in ("SIGKILL", "SIGTERM"):
        os.kill(os.getpid(), getattr(signal, ending))
    elif ending == "os._exit":
        os._exit(3)
    elif ending == "segmentation fault":
        faulthandler._sigsegv()  # type: ignore[attr-defined]
    elif ending == "exception":
        raise KeyError("this rank has a mistake")


def lose_a_peer(rank: int, size: int, operation: str, ending: str, delay: float) -> Any:
    dist.init_process_group(timeout=30)
    dist.barrier()
    if rank == ABSENT:
        time.sleep(delay)  # most often the others are in the call by then; it fails in the same way if not
        print(f"end at {time.monotonic()}", flush=True)
        return end(ending)
    if not delay:
        time.sleep(0.3)
    error = catch(operation, async_op=rank == 2)
    moment = time.monotonic()
    later = catch("all_reduce", async_op=False)
    return seen_as_data(error, moment, later, time.monotonic() - moment)


def catch(operation: str, async_op: bool) -> BaseException | None:
    try:
        perform(operation, async_op)
    except dist.DistError as error:
        return error
    return None


def seen_as_data(error: BaseException | None, moment: float, later: BaseException | None, took: float) -> Any:
    """Errors built from data do not survive pickling in one piece; what is looked at does."""
    return [(type(each).__name__, str(each), vars(each)) if each else None for each in (error, later)], moment, took


def expect_lost(outcomes: list[Outcome], pid: int, operation: str) -> None:
    ended = float(outcomes[ABSENT].output.split("end at ")[1].split()[0])
    for rank in (0, 2):
        assert outcomes[rank].value is not None, f"rank {rank}:\n{outcomes[rank].output}{outcomes[rank].traceback}"
        (error, later), moment, took = outcomes[rank].value
        assert error is not None, f"rank {rank}: {operation} went well without rank {ABSENT}"
        name, text, data = error
        assert name == "PeerLost", f"rank {rank}: {name}: {text}"
        assert (data["peer"], data["pid"]) == (ABSENT, pid), text
        assert data["how"] and data["rank"] == rank and data["size"] == SIZE
        assert f"rank {ABSENT}" in text and str(pid) in text and operation.split()[0] in text
        assert moment - ended < allowance(1.0), f"rank {rank} was notified {moment - ended:.2f} s after the end"
        alone = operation in ("send", "recv")  # a message lost is no harm to calls that have nothing to do with it
        assert later is not None and later[0] in (("GroupBroken", "PeerLost") if alone else ("GroupBroken",)), later
        assert took < allowance(0.2), f"a call on a broken group took {took:.2f} s"
        assert outcomes[rank].exit_code == 0 and not outcomes[rank].output, outcomes[rank].output


def play(transport: str, operation: str, ending: str, delay: float) -> list[Outcome]:
    with start(lose_a_peer, SIZE, args=(operation, ending, delay), environment=on(transport)) as world:
        outcomes = world.wait()
        expect_lost(outcomes, world.pids[ABSENT], operation)
    return outcomes


@transports
@pytest.mark.parametrize("operation", FORMS)
def test_a_killed_peer_is_named_in_every_operation(transport: str, operation: str) -> None:
    play(transport, operation, "SIGKILL", delay=0.2)


@transports
@pytest.mark.parametrize("ending", ENDINGS)
def test_every_ending_is_noticed(transport: str, ending: str) -> None:
    play(transport, "all_reduce", ending, delay=0.2)


@transports
@pytest.mark.parametrize("operation", ["all_reduce", "recv", "send"])
@pytest.mark.parametrize("ending", ["SIGKILL", "exit without destroy"])
def test_a_peer_that_ended_before_the_call_is_named_in_it(transport: str, operation: str, ending: str) -> None:
    play(transport, operation, ending, delay=0.0)


@pytest.mark.slow
@transports
@pytest.mark.parametrize("operation", FORMS)
@pytest.mark.parametrize("ending", ENDINGS)
@pytest.mark.parametrize("delay", [0.0, 0.2])
def test_every_ending_in_every_operation(transport: str, operation: str, ending: str, delay: float) -> None:
    play(transport, operation, ending, delay)


def receive_from_anyone(rank: int, size: int) -> Any:
    dist.init_process_group(timeout=30)
    dist.barrier()
    if rank == 1:
        time.sleep(0.2)
        end("SIGKILL")
    with pytest.raises(dist.PeerLost) as caught:
        dist.recv(np.zeros(4))
    return caught.value.peer


@transports
def test_a_receive_from_anyone_fails_when_nobody_is_left(transport: str) -> None:
    with start(receive_from_anyone, 2, environment=on(transport)) as world:
        assert world.wait()[0].value == 1


def be_killed_in_a_stream_of_calls(rank: int, size: int) -> Any:
    dist.init_process_group(timeout=30)
    array = np.ones(200_000)
    with pytest.raises(dist.PeerLost) as caught:
        while True:
            array[:] = 1
            dist.all_reduce(array)
            assert (array == size).all(), "a call that went well has the right result"
            print(".", end="", flush=True)
    return caught.value.peer, time.monotonic()


@transports
def test_a_kill_amid_busy_calls_is_named_by_all(transport: str) -> None:
    with start(be_killed_in_a_stream_of_calls, 4, environment=on(transport)) as world:
        world.wait_for_output(0, "....")
        killed = time.monotonic()
        world.kill(2)
        outcomes = world.wait()
    for rank in (0, 1, 3):
        assert outcomes[rank].ok, outcomes[rank].traceback
        peer, moment = outcomes[rank].value
        assert peer == 2 and moment - killed < allowance(1.0)


def wait_with_a_limit(rank: int, size: int) -> Any:
    dist.init_process_group(timeout=30)
    dist.barrier()
    if rank == ABSENT:
        os.kill(os.getpid(), signal.SIGSTOP)
    started = time.monotonic()
    with pytest.raises(dist.DistError) as caught:
        dist.all_reduce(np.ones(3), timeout=1.5)
    took = time.monotonic() - started
    print("over", flush=True)
    return type(caught.value).__name__, getattr(caught.value, "missing", None), took


@transports
def test_a_stopped_peer_is_not_dead_and_the_deadline_ends_the_call(transport: str) -> None:
    with start(wait_with_a_limit, 2, environment=on(transport)) as world:
        world.wait_for_output(0, "over")
        world.kill(ABSENT)
        name, missing, took = world.wait()[0].value
    assert (name, missing) == ("CollectiveTimeout", (ABSENT,))
    assert 1.4 < took < 1.5 + allowance(0.5)


def be_late(rank: int, size: int) -> None:
    dist.init_process_group(timeout=30)
    dist.barrier()
    array = np.ones(1000)
    if rank == ABSENT:
        os.kill(os.getpid(), signal.SIGSTOP)
    dist.all_reduce(array)
    assert (array == size).all()


@transports
def test_a_peer_that_is_stopped_and_goes_on_does_no_harm(transport: str) -> None:
    with start(be_late, 3, environment=on(transport)) as world:
        process = psutil.Process(world.pids[ABSENT])
        wait_until(lambda: process.status() == psutil.STATUS_STOPPED)
        time.sleep(1.0)  # longer than a rank that has ended stays unnoticed
        world.kill(ABSENT, signal.SIGCONT)
        assert all(outcome.ok for outcome in world.wait())


def survive_many_outstanding(rank: int, size: int) -> Any:
    dist.init_process_group(timeout=30)
    dist.barrier()
    if rank == ABSENT:
        time.sleep(60)
    works: list[Any] = [dist.all_reduce(np.ones(100), async_op=True) for _ in range(30)]
    print("issued", flush=True)
    futures = [work.get_future() for work in works]
    errors = []
    for work in works:
        with pytest.raises((dist.PeerLost, dist.GroupBroken)) as caught:
            work.wait()
        errors.append(type(caught.value).__name__)
        assert work.is_completed() and not work.is_success() and work.exception() is not None
        with pytest.raises(dist.DistError):
            work.result()
    assert all(isinstance(future.exception(5), dist.DistError) for future in futures)
    dist.destroy_process_group()
    return errors[0]


@transports
def test_all_outstanding_works_fail_with_the_peer(transport: str) -> None:
    with start(survive_many_outstanding, 3, environment=on(transport)) as world:
        for rank in (0, 2):
            world.wait_for_output(rank, "issued")
        world.kill(ABSENT)
        outcomes = world.wait()
    for rank in (0, 2):
        assert outcomes[rank].ok, outcomes[rank].traceback
        assert outcomes[rank].value == "PeerLost"


LARGE = 1 << 21
"""Elements of an array that is written over a while."""


def lose_a_peer_once_the_array_is_written(rank: int, size: int) -> Any:
    """Rank 0 kills the absent rank as soon as a call has written to its array; return what the error says of that."""
    dist.init_process_group(timeout=30)
    victim = [os.getpid()]
    dist.broadcast_object_list(victim, ABSENT)
    array = np.ones(LARGE)

    def kill_when_written() -> None:
        while (array[::1024] == 1).all():
            time.sleep(0)
        os.kill(victim[0], signal.SIGKILL)

    if rank == 0:
        threading.Thread(target=kill_when_written, daemon=True).start()
    while True:
        array[:] = 1
        try:
            dist.all_reduce(array)
        except dist.DistError as error:
            return error.intact, bool((array == 1).all())  # type: ignore[attr-defined]


@transports
def test_an_array_that_was_written_is_never_said_to_be_intact(transport: str) -> None:
    with start(lose_a_peer_once_the_array_is_written, SIZE, environment=on(transport)) as world:
        outcomes = world.wait()
    for rank in (0, 2):
        assert outcomes[rank].ok, outcomes[rank].traceback
        says_intact, is_intact = outcomes[rank].value
        assert is_intact or not says_intact
