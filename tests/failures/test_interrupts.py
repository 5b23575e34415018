"""Ctrl-C: every call that waits raises KeyboardInterrupt, and the other ranks are notified."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from failures.waiting_calls import ABSENT, COLLECTIVES, FORMS, TRANSPORTS, allowance, on, perform
from groups.toy_backend import StoreBackend

import procgroup as dist
from procgroup.groups.backend import Call
from world import start, wait_until

transports = pytest.mark.parametrize("transport", TRANSPORTS)


def be_interrupted(rank: int, size: int, operation: str, async_op: bool) -> Any:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    dist.init_process_group(timeout=30)
    if rank == ABSENT:
        time.sleep(60)
    caught: BaseException | None = None
    try:
        print("waiting", flush=True)
        if rank == 2 and operation not in COLLECTIVES:
            dist.recv(np.zeros(1), 0)
        else:
            perform(operation, async_op)
    except (KeyboardInterrupt, dist.DistError) as error:
        caught = error
    moment = time.monotonic()
    print("over", flush=True)
    if rank == 0:
        dist.destroy_process_group()
    return type(caught).__name__, getattr(caught, "peer", None), str(caught), moment


def expect_interrupt(transport: str, operation: str, async_op: bool) -> None:
    with start(be_interrupted, 3, args=(operation, async_op), environment=on(transport)) as world:
        world.wait_for_output(0, "waiting")
        world.wait_for_output(2, "waiting")
        world.wait_until_asleep(0)  # most often inside the call, and rightly interrupted if not
        sent = time.monotonic()
        world.kill(0, signal.SIGINT)
        world.wait_for_output(0, "over")
        if not async_op:
            world.wait_for_output(2, "over")
        world.kill(ABSENT)
        outcomes = world.wait()
    assert outcomes[0].ok, outcomes[0].traceback
    name, _, _, moment = outcomes[0].value
    assert name == "KeyboardInterrupt"
    assert moment - sent < allowance(0.5), f"raised after {moment - sent:.2f} s"
    if async_op:
        return  # the interrupted wait leaves its call as it was
    name, peer, text, moment = outcomes[2].value
    assert name in ("PeerFailed", "PeerLost") and peer == 0, text
    assert moment - sent < allowance(1.0), f"the other rank was notified after {moment - sent:.2f} s"


@transports
@pytest.mark.parametrize("operation", FORMS)
def test_an_interrupt_ends_every_blocking_call(transport: str, operation: str) -> None:
    expect_interrupt(transport, operation, async_op=False)


@transports
@pytest.mark.parametrize("operation", ["all_reduce", "recv"])
def test_an_interrupt_ends_a_wait_for_an_async_call(transport: str, operation: str) -> None:
    expect_interrupt(transport, operation, async_op=True)


def be_interrupted_while_joining(rank: int, size: int) -> Any:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if rank == ABSENT:
        time.sleep(60)
    with pytest.raises(KeyboardInterrupt):
        print("waiting", flush=True)
        dist.init_process_group(timeout=30)
    print("over", flush=True)
    assert not dist.is_initialized()
    return time.monotonic()


def test_an_interrupt_ends_the_wait_for_the_other_ranks() -> None:
    with start(be_interrupted_while_joining, 2) as world:
        world.wait_for_output(0, "waiting")
        world.wait_until_asleep(0)
        sent = time.monotonic()
        world.kill(0, signal.SIGINT)
        world.wait_for_output(0, "over")
        world.kill(ABSENT)
        outcome = world.wait()[0]
    assert outcome.ok, outcome.traceback
    assert outcome.value - sent < allowance(0.5)


def be_interrupted_as_the_call_ends(rank: int, size: int, operation: str, signalled: Path, made: Path) -> None:
    def interrupt(number: int, frame: object) -> None:
        signalled.touch()
        wait_until(made.exists)  # what the call waits for comes meanwhile
        raise KeyboardInterrupt

    signal.signal(signal.SIGUSR1, interrupt)
    dist.init_process_group(timeout=30)
    dist.barrier()
    if rank == ABSENT:
        wait_until(signalled.exists)
        dist.send(np.ones(8), 0) if operation == "recv" else perform(operation)
        made.touch()
    else:
        with pytest.raises(KeyboardInterrupt):
            perform(operation)
    dist.barrier()  # the call went well, so the group goes on


@transports
@pytest.mark.parametrize("operation", ["all_reduce", "recv"])
def test_an_interrupt_that_comes_as_a_call_ends_is_raised(transport: str, operation: str, tmp_path: Path) -> None:
    arguments = (operation, tmp_path / "signalled", tmp_path / "made")
    with start(be_interrupted_as_the_call_ends, 2, args=arguments, environment=on(transport)) as world:
        world.wait_for_call(0, operation)
        world.wait_until_asleep(0)
        world.kill(0, signal.SIGUSR1)
        outcomes = world.wait()
    assert all(outcome.ok for outcome in outcomes), [outcome.traceback for outcome in outcomes]


def handle_signals(rank: int, size: int) -> Any:
    handled: list[int] = []

    def handle(number: int, frame: object) -> None:
        handled.append(number)
        print("handled", flush=True)

    signal.signal(signal.SIGUSR1, handle)
    dist.init_process_group(timeout=20)
    if rank == 1:
        wait_until(lambda: handled)
    array = np.ones(3)
    dist.all_reduce(array)
    assert array[0] == size


@transports
def test_a_signal_handler_runs_while_a_call_waits_and_the_call_goes_on(transport: str) -> None:
    with start(handle_signals, 2, environment=on(transport)) as world:
        world.wait_for_call(0, "all_reduce")
        world.kill(0, signal.SIGUSR1)
        world.wait_for_output(0, "handled")
        assert world.is_alive(0)
        world.kill(1, signal.SIGUSR1)
        outcomes = world.wait(20)
    assert all(outcome.ok for outcome in outcomes), [outcome.traceback for outcome in outcomes]


class InterruptedInFloat32(StoreBackend):
    """Ctrl-C is pressed while rank 0 moves float32, in its main thread if that comes to it within half a second."""

    def move(self, call: Call) -> Iterator[int]:
        if self.rank == 0 and call.dtype == "float32":
            began = time.monotonic()
            while threading.current_thread() is not threading.main_thread() and time.monotonic() < began + 0.5:
                yield 1
            # To the process, as a terminal sends it: the library's own threads take no signals.
            os.kill(os.getpid(), signal.SIGINT)
            while time.monotonic() < began + 10:
                yield 1
            raise RuntimeError("the main thread was interrupted outside of this transfer")
        yield from super().move(call)


def wait_for_one_call_of_two(rank: int, size: int, waits_for: str) -> Any:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    dist.Backend.register_backend("interrupted", InterruptedInFloat32)
    dist.init_process_group("interrupted", timeout=30)
    raised = ""
    works: dict[str, Any] = {}
    while not raised:
        try:
            for name in ("float32", "float64"):
                works[name] = works.get(name) or dist.all_reduce(np.ones(1, name), async_op=True)
            works[waits_for if rank == 0 else "float32"].wait()
        except (KeyboardInterrupt, dist.DistError) as error:
            raised = type(error).__name__
    dist.destroy_process_group()
    return raised


@pytest.mark.parametrize("waits_for", ["float32", "float64"])
def test_an_interrupt_inside_a_backend_is_raised_by_the_call_that_is_awaited(waits_for: str) -> None:
    with start(wait_for_one_call_of_two, 2, args=(waits_for,)) as world:
        outcomes = world.wait(20)
    assert outcomes[0].value == "KeyboardInterrupt", outcomes[0]
    assert outcomes[1].value == "PeerFailed", outcomes[1]


class InterruptedWhileItEnds(StoreBackend):
    """Ctrl-C is pressed while rank 0 ends a transfer that has failed."""

    def move(self, call: Call) -> Iterator[int]:
        try:
            while self.rank == 0:
                yield 1
        finally:
            if self.rank == 0:
                signal.raise_signal(signal.SIGINT)
        yield 0


def end_a_transfer(rank: int, size: int) -> Any:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    dist.Backend.register_backend("interrupted", InterruptedWhileItEnds)
    dist.init_process_group("interrupted", timeout=30)
    ignored: list[str] = []
    sys.unraisablehook = lambda raised: ignored.append(f"{raised.err_msg}: {raised.exc_value!r}")
    raised = ""
    try:
        if rank == 0:
            dist.all_reduce(np.ones(1), timeout=1)
        dist.all_reduce(np.ones(1))
    except (KeyboardInterrupt, dist.DistError) as error:
        raised = type(error).__name__
    return raised, ignored


def test_an_interrupt_while_a_transfer_ends_is_raised_and_not_ignored() -> None:
    with start(end_a_transfer, 2) as world:
        outcomes = world.wait(20)
    assert outcomes[0].value == ("KeyboardInterrupt", []), outcomes[0]


def wait_in_a_group_with_nccl(rank: int, size: int) -> Any:
    """Wait for calls of arrays in memory of the host, where no GPU is."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    ignored: list[str] = []
    sys.unraisablehook = lambda raised: ignored.append(f"{raised.err_msg}: {raised.exc_value!r}")
    dist.init_process_group("cpu:gloo,cuda:nccl", timeout=30)
    try:
        dist.all_reduce(np.ones(1))
        print("waiting", flush=True)
        while True:
            dist.all_reduce(np.ones(1))
    except KeyboardInterrupt:
        dist.destroy_process_group()
        return "KeyboardInterrupt", ignored


def test_an_interrupt_of_all_ranks_is_raised_by_each_where_a_group_has_nccl() -> None:
    for _ in range(7):
        with start(wait_in_a_group_with_nccl, 2) as world:
            for rank in range(2):
                world.wait_for_output(rank, "waiting")
            for rank in range(2):
                world.kill(rank, signal.SIGINT)
            outcomes = world.wait(20)
        for outcome in outcomes:
            if outcome.ok:
                assert outcome.value == ("KeyboardInterrupt", []), outcome
            else:  # it was in a call that the other rank's end has ended first
                assert "PeerFailed" in outcome.traceback and "interrupted" in outcome.traceback, outcome
