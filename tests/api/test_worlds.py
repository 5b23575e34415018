"""Worlds of several processes, from init to the end, in any order and with any mishap."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from typing import Any

import numpy as np
import pytest

import procgroup as dist
from world import attempt, free_port, run, run_command, start, without_reports


def total(rank: int, size: int, *, place: dict[str, Any] | None = None) -> float:
    dist.init_process_group("gloo", **(place or {}))
    values = np.full(3, rank + 1.0)
    dist.all_reduce(values)
    dist.destroy_process_group()
    return float(values[0])


def total_over(rank: int, size: int, url: str) -> float:
    return total(rank, size, place={"init_method": url, "rank": rank, "world_size": size})


def total_over_a_store(rank: int, size: int, port: int) -> float:
    store = dist.TCPStore("127.0.0.1", port, size, rank == 0)
    result = total(rank, size, place={"store": store, "rank": rank, "world_size": size})
    store.barrier("over", size)
    return result


@pytest.mark.parametrize("size", [2, 3])
def test_a_world_by_the_environment(size: int) -> None:
    assert run(total, size) == [size * (size + 1) / 2] * size


@pytest.mark.parametrize("scheme", ["tcp", "file"])
def test_a_world_by_url(scheme: str, tmp_path: Any) -> None:
    url = {"tcp": f"tcp://127.0.0.1:{free_port()}", "file": f"file://{tmp_path}/meeting"}[scheme]
    assert run(total_over, 2, args=(url,)) == [3, 3]


def test_a_world_over_a_store_of_the_users() -> None:
    assert run(total_over_a_store, 2, args=(free_port(),)) == [3, 3]


def test_a_world_over_the_launchers_store_in_which_every_rank_is_a_client(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PROCGROUP_JOB_KEY", "00ff" * 8)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True)
    environment = {"MASTER_PORT": str(store.port), "PROCGROUP_STORE": f"127.0.0.1:{store.port}"}
    for _ in range(2):
        assert run(total, 2, environment=environment) == [3, 3]
    store.close()


def begin_again(rank: int, size: int, times: int) -> int:
    for number in range(times):
        dist.init_process_group()
        values = np.full(2, number)
        dist.all_reduce(values)
        assert (values == size * number).all()
        dist.destroy_process_group()
        assert not dist.is_initialized()
    return times


def test_init_after_destroy_works_many_times_whoever_is_quicker() -> None:
    assert run(begin_again, 2, args=(10,)) == [10, 10]


def gather_roles(rank: int, size: int) -> tuple[Any, ...]:
    dist.init_process_group("gloo", timeout=20)
    world = dist.group.WORLD
    seen = (
        dist.get_rank(),
        dist.get_world_size(),
        dist.get_backend(),
        world.members,
        dist.get_process_group_ranks(None),
    )
    outputs = [np.zeros(1, np.int64) for _ in range(size)]
    dist.all_gather(outputs, np.array([rank]))
    assert [int(output[0]) for output in outputs] == list(range(size))
    rooted = np.array([rank])
    dist.broadcast(rooted, src=1)
    assert rooted[0] == 1
    rooted = np.array([rank + 1])
    dist.reduce(rooted, dst=1, op=dist.ReduceOp.MAX)
    assert rooted[0] == (size if rank == 1 else rank + 1)
    if rank == 0:
        dist.send(np.array([7.0]), 1)
        dist.isend(np.array([8.0]), 1, tag=5).wait()
    if rank == 1:
        received = np.zeros(1)
        assert dist.recv(received) == 0
        assert received[0] == 7
        work = dist.irecv(received, 0, tag=5)
        assert work.get_future().result(timeout=10)[0] is received
        assert (received[0], work.source_rank()) == (8, 0)
    dist.barrier(timeout=10)
    dist.destroy_process_group()
    return seen


def test_every_call_on_three_ranks() -> None:
    for rank, seen in enumerate(run(gather_roles, 3)):
        assert seen == (rank, 3, "gloo", (0, 1, 2), [0, 1, 2])


def retry(rank: int, size: int) -> float:
    """The first init of ranks 0 and 1 fails: rank 2 comes only when they have given up."""
    port = os.environ["MASTER_PORT"]
    if rank < 2:
        with pytest.raises(dist.DistError):
            dist.init_process_group(timeout=1)
        assert not dist.is_initialized()
        print("given up", flush=True)
    else:
        store = dist.TCPStore("127.0.0.1", int(os.environ["TEST_PORT"]), timeout=20)
        store.wait(["given up"])
    assert os.environ["MASTER_PORT"] == port
    return total(rank, size)


def test_init_can_be_called_again_after_it_failed() -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True)
    with start(retry, 3, environment={"TEST_PORT": str(store.port)}) as world:
        world.wait_for_output(0, "given up")
        world.wait_for_output(1, "given up")
        store.set("given up", "yes")
        assert [outcome.value for outcome in world.wait(25)] == [6, 6, 6]
    store.close()


def disagree(rank: int, size: int) -> None:
    dist.init_process_group(world_size=size + rank)


def test_unequal_world_sizes_end_init_on_all_ranks() -> None:
    for outcome in attempt(disagree, 2):
        assert isinstance(outcome.error, dist.RendezvousConflict), outcome
        assert "rank 1 says 3" in str(outcome.error)


PROGRAM = """
import os, sys, time, numpy
import procgroup as dist
dist.init_process_group()
rank = dist.get_rank()
dist.all_reduce(numpy.ones(1))
time.sleep(float(sys.argv[1 + rank]))  # most often they end in this order, and every order is right
{ending}
"""


def launch(program: str, *arguments: str) -> list[Any]:
    """Run a program on two ranks without a launcher; return (exit code, output) of each."""
    port = free_port()
    ranks = []
    for rank in range(2):
        place = {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        command = [sys.executable, "-c", program, *arguments]
        ranks.append(
            subprocess.Popen(
                command, env=os.environ | place, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
            )
        )
    try:
        return [(process.communicate(timeout=50)[0], process.returncode) for process in ranks]
    finally:
        for process in ranks:
            process.kill()


@pytest.mark.parametrize("delays", [("0", "0.3"), ("0.3", "0"), ("0", "0")])
@pytest.mark.parametrize(
    "ending", ["pass", "dist.destroy_process_group()", "work = dist.isend(numpy.ones(1), 1 - rank)"]
)
def test_a_program_may_end_in_any_order_without_words(delays: tuple[str, str], ending: str) -> None:
    ended = launch(PROGRAM.format(ending=ending), *delays)
    assert [(without_reports(output), code) for output, code in ended] == [("", 0), ("", 0)], ended


def test_an_uncaught_exception_is_prefixed_and_ends_the_other_rank_too() -> None:
    program = PROGRAM.format(ending="if rank == 1: raise KeyError('oops')\ndist.barrier(timeout=10)")
    (left, left_code), (failed, failed_code) = launch(program, "0", "0")
    assert (left_code, failed_code) == (1, 1)
    assert "[rank1]: KeyError: 'oops'" in failed
    assert "[rank0]: " in left


def be_interrupted(rank: int, size: int) -> None:
    dist.init_process_group()
    try:
        print("waiting", flush=True)
        if rank == 1:
            time.sleep(30)
        dist.barrier()
    except KeyboardInterrupt:
        print("interrupted", flush=True)


def test_ctrl_c_ends_a_call_at_once() -> None:
    with start(be_interrupted, 2) as world:
        world.wait_for_output(0, "waiting")
        world.wait_for_output(1, "waiting")
        world.kill(0, signal.SIGINT)
        started = time.monotonic()
        world.wait_for_output(0, "interrupted")
        assert time.monotonic() - started < 5


def fork_in_a_world(rank: int, size: int) -> float:
    dist.init_process_group()
    child = os.fork()
    if child == 0:
        try:
            dist.all_reduce(np.ones(1))
        except dist.ForkedProcessError:
            os._exit(7 if dist.get_rank() == rank else 8)
        os._exit(9)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    values = np.ones(1)
    dist.all_reduce(values)
    dist.destroy_process_group()
    return float(values[0])


def test_a_forked_child_is_told_and_the_world_is_unharmed() -> None:
    assert run(fork_in_a_world, 2) == [2, 2]


def test_init_waits_interruptibly_for_the_other_ranks() -> None:
    port = free_port()
    program = "import procgroup as d; print('begin', flush=True); d.init_process_group()"
    place = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    watcher = (
        "import os, signal, subprocess, sys, time\n"
        "from procgroup.stores.tcp import TCPStore\n"
        f"process = subprocess.Popen([sys.executable, '-c', {program!r}], stderr=subprocess.PIPE, text=True)\n"
        f"store = TCPStore('127.0.0.1', {port}, timeout=30)\n"
        "store.wait(['rendezvous/0/rank/0'])\n"
        "store.close()\n"
        "started = time.monotonic()\n"
        "process.send_signal(signal.SIGINT)\n"
        "_, errors = process.communicate(timeout=10)\n"
        "print(time.monotonic() - started, process.returncode, errors)\n"
    )
    done = run_command([sys.executable, "-c", watcher], timeout=50, environment=place)
    assert "KeyboardInterrupt" in done.stdout, done
    assert float(done.stdout.split()[1]) < 5
