"""DistributedDataParallel in processes: the losses of stock DDP on Gloo, and a rank that is killed."""

from __future__ import annotations

import copy
import os
import signal
import sys
import time
from typing import Any

import pytest
from failures.waiting_calls import allowance

import procgroup as dist
from world import free_port, run, start

pytestmark = pytest.mark.torch

STEPS = 6


def convolutional() -> Any:
    from torch import nn

    return nn.Sequential(
        nn.Conv2d(1, 4, 3),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Conv2d(4, 8, 3),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(128, 700),
    )


def losses(model: Any, rank: int) -> list[float]:
    import torch

    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    found = []
    for step in range(STEPS):
        inputs = torch.randn(5, 1, 8, 8, generator=torch.Generator().manual_seed(10 * step + rank))
        optimizer.zero_grad()
        loss = (model(inputs) ** 2).mean()
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


def train_with_both(rank: int, size: int, port: int) -> Any:
    import torch
    import torch.distributed

    from procgroup.parallel import DistributedDataParallel

    torch.set_num_threads(1)
    torch.manual_seed(rank)
    model = convolutional()
    dist.init_process_group(timeout=30)
    ours = DistributedDataParallel(model)
    stock = copy.deepcopy(ours.module)  # the values of rank 0
    found = losses(ours, rank)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.distributed.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=size)
    expected = losses(torch.nn.parallel.DistributedDataParallel(stock), rank)
    dist.barrier()
    torch.distributed.destroy_process_group()
    return found, expected


@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_losses_are_those_of_stock_ddp_on_gloo(size: int) -> None:
    for found, expected in run(train_with_both, size, args=(free_port(),), timeout=80, torch=True):
        assert found == pytest.approx(expected, rel=1e-4) and found[-1] < found[0]


def be_killed_in_a_backward(rank: int, size: int) -> Any:
    import torch

    from procgroup.parallel import DistributedDataParallel
    from procgroup.parallel.ddp import reducer

    torch.set_num_threads(1)
    reducer.EARLY_BYTES = 0
    dist.init_process_group(timeout=30)
    model = torch.nn.Sequential(*[torch.nn.Linear(300, 300) for _ in range(4)])
    ours = DistributedDataParallel(model, bucket_cap_mb=0.1)

    def die(_gradient: Any) -> None:
        dist.barrier()
        print(f"end at {time.monotonic()}", flush=True)
        os.kill(os.getpid(), signal.SIGKILL)

    inputs = torch.ones(4, 300)
    ours(inputs).sum().backward()
    if rank == 1:
        model[1].weight.register_hook(die)
    loss = ours(inputs).sum()
    if rank != 1:
        # Two buckets are under way when they meet the one that dies.
        model[1].weight.register_hook(lambda _gradient: dist.barrier() and None)
    with pytest.raises(dist.PeerLost) as caught:
        loss.backward()
    return caught.value.peer, time.monotonic(), caught.value.__notes__


@pytest.mark.parametrize("transport", ["shm", pytest.param("tcp", marks=pytest.mark.slow)])
def test_a_rank_that_is_killed_in_its_backward_is_named_within_a_second(transport: str) -> None:
    with start(be_killed_in_a_backward, 3, environment={"PROCGROUP_TRANSPORT": transport}, torch=True) as world:
        outcomes = world.wait(60)
    killed = float(outcomes[1].output.split("end at ")[1].split()[0])
    for rank in (0, 2):
        assert outcomes[rank].ok, outcomes[rank].traceback + outcomes[rank].output
        peer, moment, notes = outcomes[rank].value
        assert peer == 1 and moment - killed < allowance(1.0)
        assert any("weight (300, 300)" in note for note in notes)


def use_a_model_in_children(rank: int, size: int) -> list[Any]:
    import torch

    from procgroup.parallel import DistributedDataParallel

    torch.set_num_threads(1)
    dist.init_process_group(timeout=20)
    torch.manual_seed(0)
    ours = DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Tanh(), torch.nn.Linear(2, 1)))

    def use(ours: Any) -> None:
        for parameter in ours.parameters():
            parameter.grad += 1
        for _ in range(2):
            with pytest.raises(dist.ForkedProcessError):
                ours(torch.ones(1, 3)).sum().backward()
        with torch.no_grad():
            assert ours(torch.ones(1, 3)).isfinite()

    found = []
    for step in range(4):
        ours.zero_grad()
        ours(torch.full((1, 3), rank + 1.0)).sum().backward()
        children = []
        for leave in (os._exit, sys.exit):
            children.append(os.fork())
            if children[-1] == 0:
                use(ours)
                if step % 2:
                    del ours
                leave(0)
        assert [os.waitpid(child, 0)[1] for child in children] == [0, 0]
        found.append([parameter.grad.tolist() for parameter in ours.parameters()])
    dist.destroy_process_group()
    return found


def test_what_forked_children_do_with_a_model_changes_no_gradient_of_their_parents() -> None:
    first, second = run(use_a_model_in_children, 2, timeout=60, torch=True)
    assert first == second and first == [first[0]] * 4


def train_a_scripted_module(rank: int, size: int) -> list[Any]:
    import torch

    from procgroup.parallel import DistributedDataParallel

    torch.set_num_threads(1)
    dist.init_process_group()
    torch.manual_seed(rank)  # inputs of its own
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))
    ours = DistributedDataParallel(torch.jit.script(model))
    for _ in range(3):
        ours.zero_grad()
        ours(torch.rand(4, 3)).square().sum().backward()
    ours.eval()
    ours(torch.rand(4, 3))
    return [each.tolist() for each in (*ours.buffers(), *(parameter.grad for parameter in ours.parameters()))]


def test_a_scripted_module_trains() -> None:
    first, second = run(train_a_scripted_module, 2, timeout=60, torch=True)  # torch.jit is not for several threads
    assert first == second
