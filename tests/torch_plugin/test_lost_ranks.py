"""What PyTorch programs on backend "procgroup" see when a rank is killed, or stands still, wherever they are."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import psutil
import pytest

from waiting import wait_until, wait_until_in_a_call
from world import attempt, start

pytestmark = pytest.mark.torch

SIZE = 4


def join() -> Any:
    import torch.distributed as dist

    from procgroup import torch_plugin

    torch_plugin.register()
    dist.init_process_group("procgroup", timeout=timedelta(seconds=20))
    return dist


def error_of(call: Callable[[], Any]) -> str:
    """Make a call, and return what it raises with the name of its class; "" when it goes well."""
    try:
        call()
    except RuntimeError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def die(*_: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def lose_in_fsdp(rank: int, size: int) -> list[str]:
    import torch
    from torch.distributed.fsdp import fully_shard

    dist = join()
    mesh = dist.init_device_mesh("cpu", (size,))
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64))
    for layer in (*model, model):
        fully_shard(layer, mesh=mesh)

    def step() -> None:
        model(torch.ones(2, 64)).sum().backward()

    step()
    if rank == 1:
        model[1].register_full_backward_hook(die)
    return [error_of(step)]


def lose_in_new_group(rank: int, size: int) -> list[str]:
    dist = join()
    dist.barrier()
    if rank == 1:
        die()
    found = [error_of(dist.new_group), error_of(lambda: dist.group.WORLD.split_group(range(size)))]
    without = dist.new_group([0, 2, 3])
    assert not error_of(lambda: dist.barrier(group=without))
    return found


def lose_with_many_works(rank: int, size: int) -> list[str]:
    import torch

    dist = join()
    dist.barrier()
    store = dist.group.WORLD.get_group_store()
    if rank == 1:
        store.wait([f"issued {other}" for other in (0, 2, 3)])
        die()
    works = [dist.all_reduce(torch.ones(1000), async_op=True) for _ in range(50)]
    store.set(f"issued {rank}", "")
    futures = [work.get_future() for work in works]
    return [error_of(work.wait) for work in works] + [error_of(future.wait) for future in futures]


@pytest.mark.parametrize("lose", [lose_in_fsdp, lose_in_new_group, lose_with_many_works])
def test_a_rank_that_is_killed_is_named_wherever_the_others_are(lose: Any) -> None:
    outcomes = attempt(lose, SIZE, torch=True)
    assert outcomes[1].exit_code == -signal.SIGKILL
    for outcome in (outcomes[0], outcomes[2], outcomes[3]):
        assert outcome.ok, outcome.traceback
        assert all("lost rank 1" in text and "its process ended" in text for text in outcome.value), outcome.value


MOMENTS = ["all_reduce", "backward", "new_group", "monitored_barrier"]


def stand_still(rank: int, size: int, moments: list[str], seconds: float) -> list[str]:
    """Have rank 1 stop itself before it comes where the others are, at each of these moments."""
    import torch

    dist = join()
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 1))
    dist.barrier()
    dist.group.WORLD.set_timeout(timedelta(seconds=seconds))
    calls = {
        "all_reduce": lambda: dist.all_reduce(torch.ones(3)),
        "backward": lambda: model(torch.ones(1, 3)).sum().backward(),
        "new_group": lambda: dist.new_group(timeout=timedelta(seconds=seconds)),
        "monitored_barrier": lambda: dist.group.WORLD.monitored_barrier(),
    }
    found = []
    for moment in moments:
        if rank == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        found.append(error_of(calls[moment]))
    return found


def test_a_rank_that_is_stopped_and_goes_on_is_waited_for() -> None:
    with start(stand_still, SIZE, args=(MOMENTS, 30.0), torch=True) as world:
        for _ in MOMENTS:
            wait_until(
                lambda: psutil.Process(world.pids[1]).status() == psutil.STATUS_STOPPED, otherwise="rank 1 goes on"
            )
            wait_until_in_a_call(world.pids[rank] for rank in (0, 2, 3))
            assert all(world.is_alive(rank) for rank in range(SIZE))
            world.kill(1, signal.SIGCONT)
        for outcome in world.wait():
            assert outcome.value == [""] * len(MOMENTS), outcome.traceback


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_rank_that_stays_stopped_is_named_at_the_deadline(moment: str) -> None:
    with start(stand_still, SIZE, args=([moment], 2.0), torch=True) as world:
        wait_until(lambda: not any(world.is_alive(rank) for rank in (0, 2, 3)), otherwise="the others still wait")
        world.kill(1)
        outcomes = world.wait()
    for outcome in (outcomes[0], outcomes[2], outcomes[3]):
        assert outcome.ok, outcome.traceback
        assert any(f"{word} rank 1" in outcome.value[0] for word in ("waiting for", "waited for")), outcome.value
