"""After a rank was lost, the others go on with their arrays on GPUs: as a smaller group, or with a new process.

The GPUs and NCCL are stand-ins.
"""

from __future__ import annotations

import gc
import os
import random
import re
import signal
import sys
import time
from collections.abc import Callable, Collection
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from nccl import gpu_arrays, stand_ins
from nccl.gpu_arrays import GpuArray, new_stream
from nccl.test_gpu_memory import Pool, begin_with_torch

import procgroup as dist
from tiers import AT_LENGTH, SAMPLED
from waiting import wait_until
from world import Outcome, WorldFailed, run_command, start

if gpu_arrays.MISSING:
    pytest.skip(gpu_arrays.MISSING, allow_module_level=True)

SIZE = 4
STEPS = 12
GPUS = {"PROCGROUP_STAND_IN_GPUS": "4"}
LOST = (dist.PeerLost, dist.PeerFailed)


def join(is_eager: bool = False) -> None:
    gpu_arrays.start()
    gpu = int(os.environ["LOCAL_RANK"])
    dist.init_process_group("nccl", timeout=20, device_id=gpu if is_eager else None)


def full(value: float, count: int = 64) -> GpuArray:
    return GpuArray.of(np.full(count, float(value)), stream=new_stream())


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


# --- one step of a program, in which a rank may be lost ---


def reduce() -> None:
    """Calls behind gates: they return before the others have come."""
    arrays = [full(1) for _ in range(4)]
    for array in arrays:
        dist.all_reduce(array)
    dist.barrier()
    for array in arrays:
        assert (array.get() == dist.get_world_size()).all()


def reduce_asynchronously() -> None:
    arrays = [full(1) for _ in range(4)]
    works: list[Any] = [dist.all_reduce(array, async_op=True) for array in arrays]
    for work in works:
        work.wait()
    dist.barrier()
    for array in arrays:
        assert (array.get() == dist.get_world_size()).all()


def reduce_in_a_new_group() -> None:
    """Make the first call of a group: the ranks agree on it before it is queued, and connect."""
    group: Any = dist.new_group()
    array = full(1)
    dist.all_reduce(array, group=group)
    dist.barrier(group)
    assert (array.get() == dist.get_world_size()).all()


def exchange() -> None:
    """Send a message to the next rank."""
    rank, size = dist.get_rank(), dist.get_world_size()
    received = full(0)
    sending: Any = dist.isend(full(rank), (rank + 1) % size) if size > 1 else None
    if sending is not None:
        dist.recv(received, (rank - 1) % size)
        sending.wait()
    found = received.get()
    dist.barrier()  # a failure of the work on the GPU is the error of the next call
    assert size == 1 or (found == (rank - 1) % size).all()


def scan() -> None:
    """Make a call that goes through host memory."""
    array = full(1)
    dist.scan(array)
    assert (array.get() == dist.get_rank() + 1).all()


KINDS: dict[str, Callable[[], None]] = {
    "behind gates": reduce,
    "asynchronous": reduce_asynchronously,
    "first call of a group": reduce_in_a_new_group,
    "messages": exchange,
    "staged": scan,
}


def furthest(step: int) -> int:
    """Return the step from which all go on: one rank may have ended the step in which another one failed."""
    steps: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(steps, step)
    return max(steps)


def train(rank: int, size: int, kind: str, victims: dict[int, int], is_eager: bool) -> tuple[list[Any], float]:
    """Make steps; each of ``victims`` ends in the step that is its value. Return who is left, and the longest delay.

    The delay is the time from the error to the end of the first step of those that go on.
    """
    join(is_eager)
    step, late, failed = 0, 0.0, 0.0
    while step < STEPS:
        if victims.get(rank) == step:
            if kind == "behind gates":  # with calls of its own in progress, too
                dist.all_reduce(full(1))
            die()
        try:
            KINDS[kind]()
        except LOST:
            failed = time.monotonic()
            dist.shrink_group()
            step = furthest(step)
            continue
        if failed:
            late, failed = max(late, time.monotonic() - failed), 0.0
        step += 1
    left: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(left, rank)
    pair: Any = dist.new_group(sorted({0, dist.get_world_size() - 1}))
    if pair is not dist.GroupMember.NON_GROUP_MEMBER:
        total = full(1)
        dist.all_reduce(total, group=pair)
        assert (total.get() == pair.size()).all()
    dist.destroy_process_group()
    return left, late


def expect_survivors(outcomes: list[Outcome], victims: Collection[int]) -> None:
    survivors = [rank for rank in range(len(outcomes)) if rank not in victims]
    if not all(outcomes[rank].ok and outcomes[rank].value[0] == survivors for rank in survivors):
        raise WorldFailed(outcomes, f"expected that ranks {survivors} go on together")
    for rank in survivors:
        print(f"rank {rank}: {outcomes[rank].value[1] * 1000:.0f} ms until the survivors have made a step")


@pytest.mark.parametrize("is_eager", [False, True], ids=["lazily", "eagerly"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_others_go_on_as_a_smaller_group_whatever_they_were_in(kind: str, is_eager: bool) -> None:
    victims = {2: 3}
    with start(train, SIZE, args=(kind, victims, is_eager), environment=GPUS) as world:
        expect_survivors(world.wait(40), victims)


@pytest.mark.parametrize("victims", [{0: 3}, {1: 3, 2: 3}, {3: 2, 0: 6}, {0: 2, 1: 5, 2: 8}], ids=str)
def test_ranks_may_be_lost_one_after_the_other_also_the_one_that_hosts_the_store(victims: dict[int, int]) -> None:
    with start(train, SIZE, args=("behind gates", victims, False), environment=GPUS) as world:
        expect_survivors(world.wait(40), victims)


@pytest.mark.parametrize(
    "gpus", [{"PROCGROUP_NCCL_GATE": "0"}, {"PROCGROUP_STAND_IN_NO_STREAM_MEMORY_OPERATIONS": "1"}]
)
def test_they_go_on_without_gates_too(gpus: dict[str, str]) -> None:
    victims = {0: 3, 2: 6}
    with start(train, SIZE, args=("asynchronous", victims, False), environment={**GPUS, **gpus}) as world:
        expect_survivors(world.wait(40), victims)


@pytest.mark.parametrize("kind", ["behind gates", "messages"])
def test_they_go_on_over_hosts_whose_gpus_have_the_same_numbers(kind: str) -> None:
    places = [{"NCCL_HOSTID": host, "PROCGROUP_HOST_ID": host, "LOCAL_RANK": gpu} for host in "ab" for gpu in "01"]
    victims = {0: 2, 3: 5}
    with start(train, SIZE, args=(kind, victims, False), environment=GPUS, environments=places) as world:
        expect_survivors(world.wait(40), victims)


# --- several groups, and GPUs that are busy when the rank is lost ---


def lose_a_rank_of_several_groups(rank: int, size: int) -> tuple[list[int], float]:
    """Lose rank 2 while its GPU is stuck, and with it all GPUs of three of four groups."""
    join()
    groups: list[Any] = [dist.new_group(ranks) for ranks in ([0, 1, 2], [1, 2, 3], [0, 1, 3])]
    mine = [group for group in groups if group is not dist.GroupMember.NON_GROUP_MEMBER]
    for group in mine:
        dist.all_reduce(full(1), group=group)
    dist.all_reduce(full(1))
    dist.barrier()
    arrays = []
    for group in [*mine, None] * 3:  # each on a stream of its own: no group waits for another one's work
        arrays.append(full(1))
        dist.all_reduce(arrays[-1], group=group)
    print("queued", flush=True)
    if rank == 2:
        time.sleep(60)
    began = time.monotonic()
    with pytest.raises(LOST):
        for _ in count():
            dist.barrier()
    smaller: Any = None
    for group in (one for one in groups[:2] if one in mine):
        shrunk = dist.shrink_group(group=group)
        assert 2 not in dist.get_process_group_ranks(shrunk)
        total = full(rank)
        dist.all_reduce(total, group=shrunk)
        assert (total.get() == sum(dist.get_process_group_ranks(shrunk))).all()
        smaller = shrunk
    untouched = groups[2]
    total = full(rank)
    dist.all_reduce(total, group=untouched)
    assert (total.get() == 4).all()
    for array in arrays:
        array.get()  # the streams run on
    dist.shrink_group()
    with pytest.raises(dist.GroupDestroyed):
        dist.all_reduce(full(1), group=smaller)
    total = full(1)
    dist.all_reduce(total)
    assert (total.get() == 3).all()
    took = time.monotonic() - began
    left: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(left, rank)
    dist.destroy_process_group()
    return left, took


@pytest.mark.parametrize("frees_block", ["0", "1"])
def test_no_group_hangs_in_another_one_s_abort_and_groups_keep_their_global_ranks(frees_block: str) -> None:
    fails = [
        {"PROCGROUP_STAND_IN_NCCL_FAIL": "allreduce:4:hang,allreduce:5:hang,allreduce:6:hang"} if one == 2 else {}
        for one in range(SIZE)
    ]
    gpus = {**GPUS, "PROCGROUP_STAND_IN_FREES_BLOCK": frees_block}
    with start(lose_a_rank_of_several_groups, SIZE, environment=gpus, environments=fails) as world:
        for rank in range(SIZE):
            world.wait_for_output(rank, "queued")
        world.kill(2)
        expect_survivors(world.wait(40), [2])


def lose_a_rank_while_shrinking(rank: int, size: int) -> tuple[list[int], float]:
    """Lose rank 3, and then rank 1, whose GPU never connects for the smaller group."""
    join(is_eager=True)
    dist.all_reduce(full(1))
    dist.barrier()
    if rank == 3:
        die()
    with pytest.raises(LOST):
        for _ in count():
            dist.all_reduce(full(1))
    print("shrinks", flush=True)
    began = time.monotonic()
    dist.shrink_group()
    reduce()
    left: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(left, rank)
    return left, time.monotonic() - began


def test_a_rank_that_is_lost_while_the_others_shrink_is_left_out_too() -> None:
    hangs = [{"PROCGROUP_STAND_IN_NCCL_FAIL": "init:2:hang"} if rank == 1 else {} for rank in range(SIZE)]
    with start(lose_a_rank_while_shrinking, SIZE, environment=GPUS, environments=hangs) as world:
        for rank in (0, 1, 2):
            world.wait_for_output(rank, "shrinks")
            world.wait_for_call(rank, "barrier")  # until the smaller group is connected
        world.kill(1)
        expect_survivors(world.wait(40), [1, 3])


def keep_memory(rank: int, size: int) -> tuple[list[int], float]:
    """Lose rank 1. The arrays in windows, and those of a pool, stay; the next group has windows of its own."""
    nccl = begin_with_torch(rank)
    kept = dist.full(8, rank + 1, "float32", device=rank, library="cupy")
    pool = Pool(rank, (4096, 8192))
    group: Any = dist.group.WORLD
    group.register_mem_pool(pool)
    dist.all_reduce(kept)
    dist.barrier()
    before = kept.get().tolist()
    if rank == 1:
        die()
    with pytest.raises(LOST):
        dist.barrier()
    dist.shrink_group()
    assert kept.get().tolist() == before
    kept[...] = rank
    dist.all_reduce(kept)  # as ordinary memory
    assert kept.get().tolist() == [sum(one for one in range(size) if one != 1)] * 8
    windowed = nccl.stand_in_windowed_operations()
    fresh = dist.full(8, 1, "float32", device=rank, library="cupy")
    group = dist.group.WORLD
    group.register_mem_pool(pool)
    dist.all_reduce(fresh)
    array = pool.array(1)
    array[...] = 2
    dist.all_reduce(array)
    assert fresh.get().tolist() == [size - 1] * 8 and set(array.get().tolist()) == {2 * (size - 1)}
    assert nccl.stand_in_windowed_operations() == windowed + 2
    left: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(left, rank)
    pool.free()
    del kept, fresh, array, group
    gc.collect()
    dist.destroy_process_group()
    wait_until(lambda: nccl.stand_in_memories() == 0)
    return left, 0.0


def test_memory_that_nccl_reads_in_place_survives_its_group() -> None:
    with start(keep_memory, SIZE, environment=GPUS) as world:
        expect_survivors(world.wait(40), [1])


# --- a rank is killed at any instant ---


def go_on_until_told(rank: int, size: int, seed: int, killed: Path) -> tuple[list[int], float]:
    """Make steps of all kinds, until some have been made after the kill."""
    join(is_eager=seed % 2 == 1)
    step, after, first = 0, 0, 0.0
    while after < 3:
        try:
            list(KINDS.values())[(step + seed) % len(KINDS)]()
            if step == 0:
                print("begun", flush=True)
            if dist.get_world_size() < size:
                first = first or time.monotonic()
                after += 1
            step += 1
        except LOST:
            dist.shrink_group()
            step = furthest(step)
    left: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(left, rank)
    dist.destroy_process_group()
    return left, first - float(killed.read_text())


@pytest.mark.parametrize("seed", range(20 if not SAMPLED else 10 if AT_LENGTH else 3))
def test_a_kill_at_any_instant_leaves_the_others_a_group_to_go_on_with(seed: int, tmp_path: Path) -> None:
    chosen = random.Random(seed)
    victim, killed = chosen.randrange(SIZE), tmp_path / "killed"
    gpus = {**GPUS, "PROCGROUP_STAND_IN_DELAY_US": str(chosen.choice([0, 0, 200, 1000]))}
    with start(go_on_until_told, SIZE, args=(seed, killed), environment=gpus) as world:
        world.wait_for_output(victim, "begun")
        time.sleep(chosen.uniform(0, 0.2))
        killed.write_text(str(time.monotonic()))
        world.kill(victim)
        expect_survivors(world.wait(50), [victim])


# --- a new process takes the place of the lost one ---

REPLACED = """
import os, signal, sys
import numpy as np
import procgroup as dist
from nccl import gpu_arrays
from nccl.gpu_arrays import GpuArray, new_stream

gpu_arrays.start()
gpu = int(os.environ["LOCAL_RANK"])
how, faults = sys.argv[1], dict(map(int, fault.split(":")) for fault in sys.argv[2:])
dist.init_process_group("nccl", timeout=20, device_id=gpu if how == "eager" else None)
rank, size = dist.get_rank(), dist.get_world_size()
is_new = rank in dist.get_new_ranks()
steps = np.zeros(1)
is_fresh = True
while steps[0] < 30:
    if not is_new and faults.get(rank) == steps[0]:
        dist.all_reduce(GpuArray.of(np.ones(8)))
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        if is_fresh:
            on_gpu = GpuArray.of(steps)
            dist.all_reduce(on_gpu, dist.ReduceOp.MAX)
            dist.barrier()
            steps[:] = on_gpu.get()
            is_fresh = False
        pair = dist.new_group([0, size - 1])
        total = GpuArray.of(np.ones(8), stream=new_stream())
        dist.all_reduce(total)
        if rank in (0, size - 1):
            dist.all_reduce(total, group=pair)
        # A rank may be lost while this rank's GPU is at work: what is read is right once a later call succeeds.
        found = total.get()
        dist.barrier()
        expected = size * (2 if rank in (0, size - 1) else 1)
        assert (found == expected).all(), found
    except (dist.PeerLost, dist.PeerFailed):
        dist.reconfigure()
        is_fresh = True
        continue
    steps += 1
print(f"rank {rank} on GPU {gpu} made {steps[0]:g} steps", flush=True)
dist.destroy_process_group()
"""


@pytest.mark.parametrize("how", ["lazy", "eager"])
@pytest.mark.parametrize("faults", ["2:10", "0:10", "1:5 2:20"])
def test_a_new_process_takes_the_place_and_the_gpu_of_the_lost_one(tmp_path: Path, faults: str, how: str) -> None:
    program = tmp_path / "program.py"
    program.write_text(REPLACED)
    flags = ["--nproc-per-node", "3", "--replace", "--max-restarts", "3"]
    environment = {**stand_ins.environment(gpus=3), "PYTHONPATH": str(Path(__file__).parents[1])}
    done = run_command(
        [sys.executable, "-m", "procgroup", "run", *flags, str(program), how, *faults.split()],
        environment=environment,
        timeout=60,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = re.findall(r"rank (\d) on GPU (\d) made 30 steps", done.stdout)
    assert sorted(found) == [(str(rank), str(rank)) for rank in range(3)], done.stdout + done.stderr
    assert len(re.findall("started again", done.stderr)) == len(faults.split()), done.stderr
