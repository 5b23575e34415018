"""Leaving: in any order, with or without destroy, with calls in flight: status 0, no words, nobody hangs."""

from __future__ import annotations

import atexit
import os
import subprocess
import sys
import time
from contextlib import closing, suppress
from itertools import permutations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from failures.waiting_calls import TRANSPORTS, allowance, on

import procgroup as dist
from procgroup.stores import TCPStore
from world import Outcome, free_port, run, run_command, start, wait_until, without_reports

transports = pytest.mark.parametrize("transport", TRANSPORTS)


MORE_THAN_IS_KEPT = 4075
"""Messages of 16 KiB; the last ones remain in the channel."""


def leave_quietly(outcomes: list[Outcome]) -> None:
    for outcome in outcomes:
        assert outcome.ok, f"rank {outcome.rank}: status {outcome.exit_code}\n{outcome.output}{outcome.traceback}"
        assert without_reports(outcome.output) == "", f"rank {outcome.rank} said: {outcome.output}"


def leave_in_order(rank: int, size: int, order: tuple[int, ...], destroy: bool) -> None:
    dist.init_process_group(timeout=100)
    array = np.ones(1000)
    dist.all_reduce(array)
    assert array[0] == size
    time.sleep(0.1 * order[rank])  # most often they leave in this order, and every order is right
    if destroy:
        dist.destroy_process_group()


@transports
@pytest.mark.parametrize("order", list(permutations(range(3))))
def test_ranks_may_exit_in_any_order_without_destroy(transport: str, order: tuple[int, ...]) -> None:
    with start(leave_in_order, 3, args=(order, False), environment=on(transport)) as world:
        leave_quietly(world.wait())


@transports
@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0)])
def test_ranks_may_destroy_in_any_order(transport: str, order: tuple[int, ...]) -> None:
    with start(leave_in_order, 3, args=(order, True), environment=on(transport)) as world:
        leave_quietly(world.wait())


def leave_at_once(rank: int, size: int) -> None:
    dist.init_process_group(timeout=100)


@transports
def test_ranks_may_exit_right_after_init(transport: str) -> None:
    with start(leave_at_once, 4, environment=on(transport)) as world:
        leave_quietly(world.wait())


def leave_with_work_in_flight(rank: int, size: int) -> None:
    """Every rank has issued the same calls, and nobody waits for them."""
    dist.init_process_group(timeout=100)
    for _ in range(10):
        dist.all_reduce(np.ones(50_000), async_op=True)


@transports
def test_async_work_in_flight_does_not_disturb_an_exit(transport: str) -> None:
    with start(leave_with_work_in_flight, 3, environment=on(transport)) as world:
        leave_quietly(world.wait())


def leave_with_work_that_cannot_end(rank: int, size: int) -> float:
    dist.init_process_group(timeout=100)
    go = np.zeros(1)
    if rank:  # nobody leaves before rank 0 has issued its last call: the word goes from rank to rank
        dist.recv(go, rank - 1, tag=1)
        if rank + 1 < size:
            dist.send(go, rank + 1, tag=1)
        return time.monotonic()
    dist.irecv(np.ones(5), 1)
    dist.isend(np.ones(1_000_000), 2)
    dist.all_reduce(np.ones(5000), async_op=True)
    dist.send(go, 1, tag=1)
    return time.monotonic()


@transports
def test_work_that_nobody_answers_does_not_hold_an_exit_up(transport: str) -> None:
    with start(leave_with_work_that_cannot_end, 3, environment=on(transport)) as world:
        outcomes = world.wait()
    leave_quietly(outcomes)
    assert time.monotonic() - max(outcome.value for outcome in outcomes) < 3 + allowance(1.0)


def send_more_than_is_kept_and_leave(rank: int, size: int, sender_has_left: Path) -> None:
    dist.init_process_group(timeout=100)
    dist.barrier()
    part = np.ones(2048)
    if rank == 0:
        for _ in range(MORE_THAN_IS_KEPT):
            dist.send(part, 1)
    elif rank == 1:
        dist.recv(part, 2)
        for _ in range(MORE_THAN_IS_KEPT):
            dist.recv(part, 0)
        assert (part == 1).all()
    else:
        wait_until(sender_has_left.exists)
        dist.send(part, 1)
    dist.destroy_process_group()


@transports
def test_messages_of_a_rank_that_has_left_are_received_also_beyond_those_that_are_kept(
    tmp_path: Path, transport: str
) -> None:
    sender_has_left = tmp_path / "sender has left"
    with start(send_more_than_is_kept_and_leave, 3, args=(sender_has_left,), environment=on(transport)) as world:
        world.wait_for_call(1, "recv")
        world.wait_until_idle()  # rank 1 keeps what rank 0 has sent, up to 64 MiB, and rank 0 leaves
        sender_has_left.touch()
        leave_quietly(world.wait())


def leave_with_a_call_in_flight(rank: int, size: int) -> str:
    dist.init_process_group(timeout=100)
    array = np.ones(1000)
    if rank == 0:
        dist.all_reduce(array, async_op=True)
        dist.destroy_process_group()
        return ""
    if rank == 1:
        time.sleep(0.5)  # most often rank 0 has left by then
    try:
        dist.all_reduce(array)
    except (dist.PeerLost, dist.PeerFailed) as error:
        return type(error).__name__
    assert (array == size).all()
    return "right"


@transports
def test_a_rank_that_leaves_with_a_call_in_flight_lets_it_end_well_or_fail_soon(transport: str) -> None:
    results = run(leave_with_a_call_in_flight, 3, environment=on(transport))
    assert all(result in ("right", "PeerLost", "PeerFailed") for result in results[1:]), results


def leave_a_receiver_alone(rank: int, size: int) -> Any:
    dist.init_process_group(timeout=100)
    if rank == 0:
        dist.destroy_process_group()
        return None
    with pytest.raises(dist.PeerLost) as caught:
        dist.recv(np.zeros(3), 0)
    return caught.value.peer


@transports
def test_a_receive_is_told_that_its_sender_has_left_though_they_never_talked(transport: str) -> None:
    assert run(leave_a_receiver_alone, 2, environment=on(transport)) == [None, 0]


def publish_and_leave(rank: int, size: int) -> None:
    dist.init_process_group(timeout=100)
    array = np.full(4, rank)
    if rank == 1:
        time.sleep(0.3)
    dist.broadcast(array, 0)
    if rank == 0:
        return
    assert (array == 0).all()
    if rank == 2:
        time.sleep(0.3)


@transports
def test_a_call_that_all_have_made_ends_well_though_ranks_leave(transport: str) -> None:
    with start(publish_and_leave, 3, environment=on(transport)) as world:
        leave_quietly(world.wait())


def destroy_twice(rank: int, size: int) -> None:
    dist.init_process_group(timeout=100)
    group = dist.group.WORLD
    dist.all_reduce(np.ones(3))
    dist.destroy_process_group()
    dist.destroy_process_group()
    dist.destroy_process_group(group)
    assert not dist.is_initialized()
    with pytest.raises(ValueError, match="not been initialized"):
        dist.all_reduce(np.ones(3))
    for call in (
        lambda: group.all_reduce(np.ones(3)),
        lambda: dist.all_reduce(np.ones(3), group=group),
        lambda: dist.barrier(group=group),
        lambda: dist.send(np.ones(3), 1 - rank, group=group),
        lambda: dist.irecv(np.ones(3), 1 - rank, group=group),
    ):
        with pytest.raises(dist.GroupDestroyed):
            call()
    assert "destroyed" not in repr(group) or repr(group)


@transports
def test_destroying_again_does_nothing_and_use_afterwards_is_refused(transport: str) -> None:
    with start(destroy_twice, 2, environment=on(transport)) as world:
        leave_quietly(world.wait())


def destroy_before_init(rank: int, size: int) -> None:
    with pytest.raises(AssertionError, match="Process group cannot be None"):
        dist.destroy_process_group()


def test_destroying_what_never_was_is_refused() -> None:
    run(destroy_before_init, 1)


def destroy_on_one_rank(rank: int, size: int) -> Any:
    dist.init_process_group(timeout=100)
    dist.barrier()
    if rank == 0:
        dist.destroy_process_group()
        return None
    with pytest.raises(dist.PeerLost) as caught:
        while True:
            dist.all_reduce(np.ones(3))
    return caught.value.peer, caught.value.how


@transports
def test_destroying_on_one_rank_only_is_told_to_the_others(transport: str) -> None:
    results = run(destroy_on_one_rank, 3, environment=on(transport))
    assert {result[0] for result in results[1:]} <= {0, 1, 2} and results[1][1], results
    assert 0 in {result[0] for result in results[1:]}


def destroy_at_exit(rank: int, size: int) -> None:
    atexit.register(dist.destroy_process_group)
    dist.init_process_group(timeout=100)
    dist.barrier()
    atexit.register(dist.destroy_process_group)


@transports
def test_destroy_is_legal_at_exit(transport: str) -> None:
    with start(destroy_at_exit, 2, environment=on(transport)) as world:
        leave_quietly(world.wait())


def start_again(rank: int, size: int, broken: bool) -> None:
    for turn in range(5):
        dist.init_process_group(timeout=100)
        array = np.full(1000, turn)
        dist.all_reduce(array)
        assert (array == turn * size).all()
        if broken:
            with pytest.raises(dist.CollectiveMismatch):
                dist.all_reduce(np.ones(3 + rank))
        dist.destroy_process_group()


@transports
@pytest.mark.parametrize("broken", [False, True])
def test_a_group_can_be_made_again_after_destroy(transport: str, broken: bool) -> None:
    with start(start_again, 3, args=(broken,), environment=on(transport)) as world:
        leave_quietly(world.wait())


def fail_on_one_rank(rank: int, size: int) -> Any:
    dist.init_process_group(timeout=100)
    dist.barrier()
    if rank == 1:
        raise ZeroDivisionError("only here")
    try:
        dist.all_reduce(np.ones(1000))
    except (dist.PeerFailed, dist.PeerLost) as error:
        return type(error).__name__, error.peer
    return None


@transports
def test_an_exception_on_one_rank_ends_the_calls_of_the_others(transport: str) -> None:
    with start(fail_on_one_rank, 3, environment=on(transport)) as world:
        outcomes = world.wait()
    assert isinstance(outcomes[1].error, ZeroDivisionError)
    for rank in (0, 2):
        assert outcomes[rank].value in [("PeerLost", 1), ("PeerFailed", 1)], outcomes[rank].traceback


PROGRAM = """
import sys, time
import numpy as np
import procgroup as dist
dist.init_process_group(timeout=100)
array = np.ones(4)
dist.all_reduce(array)
work = dist.all_reduce(array, async_op=True)
if dist.get_rank() == int(sys.argv[1]):
    time.sleep(0.5)
"""

SPAWNER = """
import os, subprocess, sys
ranks = [
    subprocess.Popen([sys.executable, "program.py", *sys.argv[2:]], env={**os.environ, "RANK": str(rank)})
    for rank in range(int(sys.argv[1]))
]
sys.exit(max(abs(rank.wait()) for rank in ranks))
"""


@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.parametrize("late", [0, 1, 2])
def test_a_program_of_four_lines_ends_with_status_0_and_no_words(transport: str, late: int, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    (tmp_path / "spawner.py").write_text(SPAWNER)
    place = {"WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    command = [sys.executable, "-W", "error", "spawner.py", "3", str(late)]
    done = run_command(command, directory=tmp_path, environment={**place, **on(transport)})
    assert (done.returncode, done.stdout, without_reports(done.stderr)) == (0, "", ""), done
    assert sorted(os.listdir(tmp_path)) == ["program.py", "spawner.py"]


MULTIPROCESSING = """
import multiprocessing, os, sys, time
import numpy as np
import procgroup as dist

def play(rank):
    dist.init_process_group(rank=rank, world_size=2, timeout=100)
    array = np.full(50_000, 7.0)
    if rank == 0:
        dist.isend(array, 1)  # and the process that also hosts the store is gone
        return
    time.sleep(0.5)
    array[:] = 0
    dist.recv(array, 0)
    assert (array == 7).all()

if __name__ == "__main__":
    context = multiprocessing.get_context(sys.argv[1])
    ranks = [context.Process(target=play, args=(rank,)) for rank in range(2)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
    sys.exit(max(abs(rank.exitcode) for rank in ranks))
"""


@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_processes_of_multiprocessing_end_as_programs_do(transport: str, method: str, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(MULTIPROCESSING)
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    command = [sys.executable, "program.py", method]
    done = run_command(command, directory=tmp_path, environment={**place, **on(transport)})
    assert (done.returncode, done.stdout, without_reports(done.stderr)) == (0, "", ""), done


OUTLIVED = """
import ctypes, sys, threading
import numpy as np
from procgroup import _native
from procgroup.stores import HashStore, TCPStore

store = TCPStore("127.0.0.1", int(sys.argv[2]), is_master=False)
calls = {
    "HashStore": lambda: HashStore().get("never", 60),
    "TCPStore": lambda: store.get("never", 60),
    "DistributedSampler": lambda: _native.random_permutation(np.empty(10_000_000, np.int64), 0),
}
for _ in range(4):
    threading.Thread(target=calls[sys.argv[1]], daemon=True).start()
libc = ctypes.CDLL(None)
ctypes.pythonapi.Py_AtExit(ctypes.cast(libc.getchar, ctypes.c_void_p))  # the last thing that Python does at its end
"""


@pytest.mark.parametrize("call", ["HashStore", "TCPStore", "DistributedSampler"])
def test_daemon_threads_whose_calls_outlive_the_interpreter_do_not_crash_the_process(call: str) -> None:
    with closing(TCPStore("127.0.0.1", 0, is_master=True)) as server:
        command = [sys.executable, "-c", OUTLIVED, call, str(server.port)]
        with subprocess.Popen(command, stdin=subprocess.PIPE) as process:
            with suppress(subprocess.TimeoutExpired):
                process.wait(2)  # the threads end their calls, or look for signals, meanwhile
            process.communicate(timeout=120)
    assert process.returncode == 0
