"""Ctrl-C within half a second: in every wait that is not a call of arrays, which test_interrupts.py has."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from failures.instants import CONNECTING, end_at
from failures.waiting_calls import ABSENT, TRANSPORTS, allowance, on

import procgroup as dist
from world import free_port, start

transports = pytest.mark.parametrize("transport", TRANSPORTS)

SOON = 0.5


def the_first_rank() -> None:
    with dist.rank_first(ABSENT):
        raise AssertionError("rank 1 is not there")


def the_others_at_the_end_of_the_block() -> None:
    with dist.rank_first():
        pass


def issued_calls_when_a_group_is_destroyed() -> None:
    dist.all_reduce(np.ones(1), async_op=True)
    dist.destroy_process_group()


def issued_calls_when_a_subgroup_is_destroyed() -> None:
    made = dist.new_group([0])
    dist.irecv(np.ones(1), ABSENT)
    dist.destroy_process_group(made)
    dist.destroy_process_group()


def a_future() -> None:
    work = dist.irecv(np.ones(1), ABSENT)
    work.get_future().wait()


def a_coalesced_call() -> None:
    with dist._coalescing_manager():
        dist.all_reduce(np.ones(1))
        dist.all_reduce(np.ones(1))


def a_batch_of_messages() -> None:
    for work in dist.batch_isend_irecv([dist.P2POp(dist.irecv, np.zeros(1), ABSENT)]):
        work.wait()


def with_a_second_thread() -> None:
    """Python's lock is taken by turns: the main thread must get it to handle the signal."""
    import threading

    def work() -> None:
        while True:
            sum(range(1000))

    threading.Thread(target=work, daemon=True).start()
    dist.barrier()


WAITS: dict[str, Callable[[], Any]] = {
    "rank_first": the_first_rank,
    "the end of rank_first": the_others_at_the_end_of_the_block,
    "new_group": dist.new_group,
    "new_group of some": lambda: dist.new_group([0, 1]),
    "split_group": lambda: dist.split_group(split_ranks=[[0, 1]]),
    "destroy_process_group": issued_calls_when_a_group_is_destroyed,
    "destroy_process_group of a subgroup": issued_calls_when_a_subgroup_is_destroyed,
    "a future": a_future,
    "monitored_barrier": dist.monitored_barrier,
    "all_gather_object": lambda: dist.all_gather_object([None, None], 1),
    "recv_object_list": lambda: dist.recv_object_list([None], ABSENT),
    "a coalesced call": a_coalesced_call,
    "batch_isend_irecv": a_batch_of_messages,
    "functional": lambda: dist.functional.all_reduce(np.ones(1)),
    "a second thread": with_a_second_thread,
}


def wait_for_an_absent_rank(rank: int, size: int, name: str) -> float:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    dist.init_process_group(timeout=30)
    if rank == ABSENT:
        time.sleep(60)
    with pytest.raises(KeyboardInterrupt):
        print("waiting", flush=True)
        WAITS[name]()
    raised = time.monotonic()
    print("over", flush=True)
    dist.group.WORLD.abort() if dist.group.WORLD is not None else None
    return raised


@transports
@pytest.mark.parametrize("name", WAITS)
def test_an_interrupt_ends_every_wait_for_a_rank(name: str, transport: str) -> None:
    with start(wait_for_an_absent_rank, 2, args=(name,), environment=on(transport)) as world:
        world.wait_for_output(0, "waiting")
        world.wait_until_asleep(0)
        sent = time.monotonic()
        world.kill(0, signal.SIGINT)
        world.wait_for_output(0, "over")
        world.kill(ABSENT)
        outcome = world.wait()[0]
    assert outcome.ok, outcome.traceback
    assert outcome.value - sent < allowance(SOON), f"raised after {outcome.value - sent:.2f} s"


def silent_port() -> tuple[socket.socket, int]:
    """Return a listener that accepts nothing, and its port."""
    listener = socket.create_server(("127.0.0.1", 0))
    return listener, listener.getsockname()[1]


def connect_to_a_silent_port() -> None:
    listener, port = silent_port()
    with listener:
        dist.TCPStore("127.0.0.1", port)


def hosted() -> dist.TCPStore:
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def file_store() -> dist.FileStore:
    return dist.FileStore(os.environ["STORE_FILE"], 2)


STORES: dict[str, Callable[[], dist.Store]] = {
    "TCPStore": hosted,
    "FileStore": file_store,
    "HashStore": dist.HashStore,
    "PrefixStore": lambda: dist.PrefixStore("prefix", hosted()),
}
STORE_WAITS: dict[str, Callable[[dist.Store], Any]] = {
    "get": lambda store: store.get("key"),
    "wait": lambda store: store.wait(["key"]),
    "multi_get": lambda store: store.multi_get(["key", "other"]),
    "get_unless": lambda store: store.get_unless(["key"], "other"),
    "queue_pop": lambda store: store.queue_pop("key"),
    "barrier": lambda store: store.barrier("key", 2),
}
STARTS: dict[str, Callable[[], Any]] = {
    "a store that no process hosts": lambda: dist.TCPStore("127.0.0.1", free_port()),
    "a store that does not answer": connect_to_a_silent_port,
    "the workers of a store": lambda: dist.TCPStore("127.0.0.1", 0, 2, is_master=True),
    "rank 0, which hosts the store": lambda: dist.init_process_group(rank=1, world_size=2),
    "the other rank": lambda: dist.init_process_group(rank=0, world_size=2),
    "the other rank at a file": lambda: dist.init_process_group(
        init_method=f"file://{os.environ['STORE_FILE']}", rank=0, world_size=2
    ),
    "the other rank at tcp": lambda: dist.init_process_group(
        init_method=f"tcp://127.0.0.1:{free_port()}", rank=0, world_size=2
    ),
}


def be_interrupted(rank: int, size: int, kind: str, name: str) -> float:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    store = STORES[kind]() if kind else None
    with pytest.raises(KeyboardInterrupt):
        print("waiting", flush=True)
        STARTS[name]() if store is None else STORE_WAITS[name](store)
    raised = time.monotonic()
    print("over", flush=True)
    return raised


def expect_interrupt(tmp_path: Path, kind: str, name: str) -> None:
    environment = {"STORE_FILE": str(tmp_path / "store")}
    with start(be_interrupted, 1, args=(kind, name), environment=environment) as world:
        world.wait_for_output(0, "waiting")
        world.wait_until_asleep(0)
        sent = time.monotonic()
        world.kill(0, signal.SIGINT)
        outcome = world.wait()[0]
        ended = time.monotonic()
    assert outcome.ok, outcome.traceback
    assert outcome.value - sent < allowance(SOON), f"raised after {outcome.value - sent:.2f} s"
    assert ended - sent < allowance(2 * SOON), f"ended after {ended - sent:.2f} s"


@pytest.mark.parametrize("name", STORE_WAITS)
@pytest.mark.parametrize("kind", STORES)
def test_an_interrupt_ends_every_wait_on_a_store(kind: str, name: str, tmp_path: Path) -> None:
    expect_interrupt(tmp_path, kind, name)


@pytest.mark.parametrize("name", STARTS)
def test_an_interrupt_ends_the_start_of_a_group(name: str, tmp_path: Path) -> None:
    expect_interrupt(tmp_path, "", name)


def start_while_one_is_stopped(rank: int, size: int, instant: tuple[str, str]) -> float:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if rank == ABSENT:
        end_at(*instant, "stop")
    with pytest.raises(KeyboardInterrupt):
        print("waiting", flush=True)
        dist.init_process_group(timeout=30)
    raised = time.monotonic()
    print("over", flush=True)
    return raised


@pytest.mark.parametrize("instant", CONNECTING, ids=" ".join)
def test_an_interrupt_ends_every_step_in_which_the_ranks_connect(instant: tuple[str, str]) -> None:
    with start(start_while_one_is_stopped, 2, args=(instant,)) as world:
        world.wait_for_output(ABSENT, "moment")
        world.wait_until_asleep(0)
        sent = time.monotonic()
        world.kill(0, signal.SIGINT)
        world.wait_for_output(0, "over")
        world.kill(ABSENT)
        outcome = world.wait()[0]
    assert outcome.ok, outcome.traceback
    assert outcome.value - sent < allowance(SOON), f"raised after {outcome.value - sent:.2f} s"


def end_while_the_others_go_on(rank: int, size: int) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    dist.init_process_group(timeout=30)
    dist.barrier()
    if rank == ABSENT:
        time.sleep(60)
    print("waiting", flush=True)


def end_with_an_issued_call(rank: int, size: int) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    dist.init_process_group(timeout=30)
    if rank == ABSENT:
        time.sleep(60)
    dist.all_reduce(np.ones(1), async_op=True)
    print("waiting", flush=True)


@pytest.mark.parametrize("function", [end_while_the_others_go_on, end_with_an_issued_call])
def test_an_interrupt_ends_the_wait_at_the_end_of_a_process(function: Callable[[int, int], None]) -> None:
    with start(function, 2) as world:
        world.wait_for_output(0, "waiting")
        world.wait_until_idle()
        assert world.is_alive(0), "it waits for rank 1"
        sent = time.monotonic()
        world.kill(0, signal.SIGINT)
        world.wait_for_end([0])
        ended = time.monotonic()
        world.kill(ABSENT)
        world.wait()
    assert ended - sent < allowance(2 * SOON), f"ended after {ended - sent:.2f} s"
