"""Other threads and forked children of a rank: they neither disturb its calls nor hide its death."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from failures.waiting_calls import FORMS, TRANSPORTS, allowance, on, perform

import procgroup as dist
from world import run, start

transports = pytest.mark.parametrize("transport", TRANSPORTS)


def turn_of_the_interpreter() -> float:
    """How long this thread waits for a busy one to give Python to it: 5 ms, and longer where cores are busy too."""
    started = time.monotonic()
    for _ in range(20):
        time.sleep(0)
    return (time.monotonic() - started) / 20


def call_beside_a_busy_thread(rank: int, size: int, busy: list[int]) -> tuple[float, float]:
    dist.init_process_group(timeout=20)
    stop = threading.Event()

    def count() -> None:
        number = 0
        while not stop.is_set():
            number += 1

    thread = threading.Thread(target=count)
    if rank in busy:
        thread.start()
    turn = turn_of_the_interpreter()
    dist.barrier()
    started = time.monotonic()
    for length in [1, 1000, 100_000] * 30:
        array = np.ones(length)
        dist.all_reduce(array)
        assert (array == size).all()
        work: Any = dist.all_reduce(array, async_op=True)
        work.wait()
    took = time.monotonic() - started
    turn = max(turn, turn_of_the_interpreter())
    stop.set()
    if rank in busy:
        thread.join()
    return took / 180, turn


@transports
@pytest.mark.parametrize("busy", [[0], [0, 1]])
def test_a_busy_python_thread_does_not_stall_calls(transport: str, busy: list[int]) -> None:
    seen = run(call_beside_a_busy_thread, 2, args=(busy,), timeout=40, environment=on(transport))
    per_call, turn = (max(values) for values in zip(*seen, strict=True))
    assert per_call < max(0.05, 10 * turn), f"{per_call:.3f} s per call, {turn:.4f} s for a turn"


def call_from_many_threads(rank: int, size: int, threads: int, length: int) -> None:
    """All threads make the same calls, so that it does not matter whose meets whose."""
    dist.init_process_group(timeout=20)
    failed: list[BaseException] = []

    def call() -> None:
        try:
            for turn in range(15):
                array = np.ones(length)
                work = dist.all_reduce(array, async_op=turn % 3 == 0)
                if work:
                    work.wait()
                assert (array == size).all()
        except BaseException as error:
            failed.append(error)

    workers = [threading.Thread(target=call) for _ in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not failed, failed


@transports
@pytest.mark.parametrize("length", [1, 100_000])
def test_threads_that_call_one_group_at_once_are_each_served(transport: str, length: int) -> None:
    run(call_from_many_threads, 3, args=(3, length), environment=on(transport))


def send_and_receive_from_threads(rank: int, size: int) -> None:
    dist.init_process_group(timeout=20)
    wrong: list[Any] = []

    def exchange(tag: int) -> None:
        for turn in range(50):
            got = np.zeros(10)
            if rank == 0:
                dist.send(np.full(10, turn), 1, tag=tag)
                dist.recv(got, 1, tag=tag)
            else:
                got = np.zeros(10, np.int64)
                dist.recv(got, 0, tag=tag)
                dist.send(np.full(10, float(turn)), 0, tag=tag)
            if (got != turn).any():
                wrong.append((tag, turn, got))

    workers = [threading.Thread(target=exchange, args=(tag,)) for tag in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not wrong, wrong


@transports
def test_threads_have_conversations_of_their_own_by_tag(transport: str) -> None:
    run(send_and_receive_from_threads, 2, environment=on(transport))


def in_a_child(function: Callable[[], None]) -> int:
    """Run a function in a forked child; return its exit status."""
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            function()
            status = 0
        except BaseException as error:
            print(f"child: {type(error).__name__}: {error}", flush=True)
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def refuse_every_operation() -> None:
    assert not dist.is_initialized() or dist.get_rank() == 0
    for operation in FORMS:
        for async_op in (False, True):
            try:
                perform(operation, async_op)
            except dist.ForkedProcessError as error:
                assert "fork" in str(error)
            else:
                raise AssertionError(f"{operation} went through in a forked child")
    dist.destroy_process_group()
    dist.destroy_process_group()


def fork_in_mid_call(rank: int, size: int) -> None:
    dist.init_process_group(timeout=20)
    array = np.ones(50_000)
    works: list[Any] = []
    if rank == 0:
        works.append(dist.all_reduce(array, async_op=True))
        assert in_a_child(refuse_every_operation) == 0
        assert not works[0].is_completed()
        dist.send(np.ones(1), 1)
    else:
        dist.recv(np.ones(1), 0)
        works.append(dist.all_reduce(array, async_op=True))
    works[0].wait()
    assert (array == size).all()
    for _ in range(20):
        dist.all_reduce(array)
        array[:] = 1


@transports
def test_a_forked_child_is_refused_and_its_parent_and_peer_go_on(transport: str) -> None:
    run(fork_in_mid_call, 2, environment=on(transport))


def use_a_work_in_a_child(rank: int, size: int) -> None:
    dist.init_process_group(timeout=20)
    array = np.ones(50_000)
    if rank == 0:
        work: Any = dist.all_reduce(array, async_op=True)
        other: Any = dist.irecv(np.ones(1), 1)
        future = work.get_future()

        def wait_in_the_child() -> None:
            for wait in (work.wait, future.wait, future.exception, other.get_future().wait, other.result):
                with pytest.raises(dist.ForkedProcessError):
                    wait()
            assert work.is_completed() and not work.is_success()
            assert isinstance(work.exception(), dist.ForkedProcessError)

        assert in_a_child(wait_in_the_child) == 0
        assert not work.is_completed()
        dist.send(np.ones(1), 1)
        future.wait()
        other.wait()
    else:
        dist.recv(np.ones(1), 0)
        dist.all_reduce(array)
        dist.send(np.ones(1), 0)
    assert (array == size).all()


@transports
def test_a_work_of_the_parent_has_completed_with_an_error_in_a_child(transport: str) -> None:
    run(use_a_work_in_a_child, 2, environment=on(transport))


def fork_children_that_exit_in_order(rank: int, size: int) -> None:
    """As multiprocessing does it: the child runs its exit functions."""
    dist.init_process_group(timeout=20)
    array = np.ones(1000)
    for _ in range(5):
        pid = os.fork()
        if pid == 0:
            import atexit

            atexit._run_exitfuncs()
            os._exit(0)
        dist.all_reduce(array)
        assert os.waitpid(pid, 0)[1] == 0
    dist.barrier()


@transports
def test_a_child_that_exits_sends_nothing(transport: str) -> None:
    run(fork_children_that_exit_in_order, 3, environment=on(transport))


def call_in_one_thread_and_fork_in_another(rank: int, size: int) -> None:
    dist.init_process_group(timeout=30)
    stop = threading.Event()
    failed: list[int] = []

    def fork_often() -> None:
        while not stop.is_set() and not failed:
            if status := in_a_child(lambda: None):
                failed.append(status)

    forking = threading.Thread(target=fork_often)
    if rank == 0:
        forking.start()
    for _ in range(100):
        array = np.ones(20_000)
        dist.all_reduce(array)
        assert (array == size).all()
    stop.set()
    if rank == 0:
        forking.join()
    assert not failed


@transports
def test_forks_at_any_moment_of_a_call_do_no_harm(transport: str) -> None:
    run(call_in_one_thread_and_fork_in_another, 2, timeout=40, environment=on(transport))


def leave_a_child_and_die(rank: int, size: int) -> Any:
    dist.init_process_group(timeout=20)
    dist.barrier()
    if rank == 1:
        pid = os.fork()
        if pid == 0:
            time.sleep(60)
            os._exit(0)
        print(f"child {pid} end at {time.monotonic()}", flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(dist.PeerLost) as caught:
        dist.all_reduce(np.ones(4))
    return caught.value.peer, caught.value.pid, time.monotonic()


@transports
def test_a_child_that_lives_on_does_not_hide_its_parents_death(transport: str) -> None:
    with start(leave_a_child_and_die, 2, environment=on(transport)) as world:
        try:
            outcomes = world.wait()
        finally:
            words = world.output(1).split()
            os.kill(int(words[1]), signal.SIGKILL)
    assert outcomes[0].ok, outcomes[0].traceback
    peer, pid, moment = outcomes[0].value
    assert (peer, pid) == (1, world.pids[1])
    assert moment - float(words[4]) < allowance(1.0)
