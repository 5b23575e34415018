"""PyTorch on a real GPU: the plug-in with stock torch.distributed and DDP, and procgroup's own training beside it.

All ranks use GPU 0, which takes NCCL 2.30. Where there is no GPU the tests try themselves: on the CPU with
PROCGROUP_TEST_TORCH_DEVICE=cpu, and on stand-ins in the environment of torch_gpus/stand_in_torch.py.
"""

from __future__ import annotations

import importlib.util
import os
import time
from datetime import timedelta
from typing import Any

import pytest
from nccl.gpu_libraries import IS_STAND_IN, missing

import procgroup
from world import attempt, run

DEVICE = os.environ.get("PROCGROUP_TEST_TORCH_DEVICE", "cuda")
if importlib.util.find_spec("torch") is None:
    pytest.skip("torch is not installed", allow_module_level=True)
if DEVICE == "cuda" and (reason := missing()):
    pytest.skip(reason, allow_module_level=True)

ON_ONE_GPU = {"NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_MAX_CTAS": "8", "NCCL_SOCKET_IFNAME": "lo"}
LARGE = 16 << 20
STEPS, ROWS = 12, 32
"""Steps of training, and rows of a step's batch, which the ranks share."""

on_cuda = pytest.mark.skipif(DEVICE != "cuda", reason="is about GPUs")


def begin(rank: int, size: int, backend: str = "procgroup") -> Any:
    """Initialise torch.distributed; return its module."""
    import torch
    import torch.distributed as distributed

    assert "procgroup" in distributed.Backend.backend_list, "torch has not called the entry point of the plug-in"
    if DEVICE == "cuda":
        torch.cuda.set_device(0)
    distributed.init_process_group(backend, timeout=timedelta(seconds=40))
    return distributed


def make_calls(rank: int, size: int, backend: str) -> None:
    import torch

    distributed = begin(rank, size, backend)
    total = sum(range(1, size + 1))
    for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.complex64):
        for count in (1, 5000, 1 << 18):
            tensor = torch.full((count,), rank + 1, dtype=dtype, device=DEVICE)
            distributed.all_reduce(tensor)
            assert (tensor == total).all(), (dtype, count)
            tensor.fill_(rank + 1)
            distributed.broadcast(tensor, size - 1)
            assert (tensor == size).all(), (dtype, count)
            gathered = torch.zeros(size * count, dtype=dtype, device=DEVICE)
            distributed.all_gather_into_tensor(gathered, torch.full((count,), rank, dtype=dtype, device=DEVICE))
            assert (gathered.view(size, count) == torch.arange(size, device=DEVICE).view(size, 1)).all()
            scattered = torch.zeros(count, dtype=dtype, device=DEVICE)
            distributed.reduce_scatter_tensor(scattered, torch.ones(size * count, dtype=dtype, device=DEVICE))
            assert (scattered == size).all()
            exchanged = torch.zeros(size * count, dtype=dtype, device=DEVICE)
            distributed.all_to_all_single(exchanged, torch.full((size * count,), rank, dtype=dtype, device=DEVICE))
            assert (exchanged.view(size, count) == torch.arange(size, device=DEVICE).view(size, 1)).all()
    flags = torch.tensor([rank == 0, False], device=DEVICE)
    distributed.all_reduce(flags, distributed.ReduceOp.MAX)
    assert flags.tolist() == [True, False]
    received = torch.zeros(1000, device=DEVICE)
    works = [distributed.irecv(received, (rank - 1) % size)]
    works.append(distributed.isend(torch.full((1000,), float(rank), device=DEVICE), (rank + 1) % size))
    for work in works:
        work.wait()
    assert (received == (rank - 1) % size).all()
    objects: list[Any] = [None] * size
    distributed.all_gather_object(objects, {rank: "x"})
    assert objects == [{peer: "x"} for peer in range(size)]
    pair = distributed.new_group([0, 1])
    tensor = torch.ones(3, device=DEVICE)
    if rank < 2:
        distributed.all_reduce(tensor, group=pair)
        assert tensor.tolist() == [2, 2, 2]
    distributed.barrier()
    distributed.destroy_process_group()


@pytest.mark.parametrize("backend", ["procgroup", "gloo"])
@pytest.mark.parametrize("size", [2, 4])
def test_calls_of_torch_distributed_give_what_they_should(size: int, backend: str) -> None:
    replace = {"PROCGROUP_REPLACE_GLOO": "1"} if backend == "gloo" else {}
    run(make_calls, size, args=(backend,), timeout=80, environment={**ON_ONE_GPU, **replace})


def use_streams(rank: int, size: int) -> None:
    import torch

    distributed = begin(rank, size)
    total = sum(range(1, size + 1))
    for is_async in (False, True, True):
        first, second = torch.cuda.Stream(), torch.cuda.Stream()
        with torch.cuda.stream(first):
            tensor = torch.zeros(LARGE, device="cuda")
            torch.cuda.synchronize()
            torch.cuda._sleep(600_000_000)
            tensor.fill_(rank + 1)
            began = time.monotonic()
            work = distributed.all_reduce(tensor, async_op=is_async)
            took = time.monotonic() - began
            if not is_async:
                assert (tensor * 2 == 2 * total).all()
                continue
            assert took < 0.2, f"the asynchronous call took {took:.2f} s"
        with torch.cuda.stream(second):
            if work is not None:
                work.wait()
            assert (tensor * 2 == 2 * total).all()
    distributed.destroy_process_group()


@on_cuda
def test_calls_keep_the_order_of_the_streams() -> None:
    run(use_streams, 2, timeout=80, environment=ON_ONE_GPU)


def reduce_in_a_pool(rank: int, size: int) -> None:
    import torch

    torch.cuda.set_device(0)
    procgroup.init_process_group("nccl", timeout=40)
    group: Any = procgroup.group.WORLD
    pool = torch.cuda.MemPool(group.mem_allocator)
    with torch.cuda.use_mem_pool(pool):
        tensor = torch.full((LARGE,), rank + 1.0, device="cuda")
    group.register_mem_pool(pool)
    procgroup.all_reduce(tensor)
    assert (tensor == size * (size + 1) / 2).all()
    del tensor, pool
    procgroup.destroy_process_group()


@on_cuda
@pytest.mark.skipif(IS_STAND_IN, reason="the stand-in of torch.cuda has no pools")
@pytest.mark.parametrize("size", [1, 2])
def test_nccl_reduces_memory_of_a_registered_pool(size: int) -> None:
    run(reduce_in_a_pool, size, timeout=80, environment=ON_ONE_GPU)


# --- training ---


def model_and_data() -> Any:
    """Return a model, the loss, and the batches of all steps: the same on all ranks."""
    import torch

    torch.manual_seed(7)
    torch.backends.cuda.matmul.allow_tf32 = False
    layers = [
        torch.nn.Linear(20, 64),
        torch.nn.Tanh(),
        torch.nn.Linear(64, 64),
        torch.nn.Tanh(),
        torch.nn.Linear(64, 5),
    ]
    model = torch.nn.Sequential(*layers)
    inputs = torch.randn(STEPS, ROWS, 20)
    targets = torch.sin(inputs[..., :5])
    return model.to(DEVICE), torch.nn.MSELoss(), inputs.to(DEVICE), targets.to(DEVICE)


def average_gradients(model: Any, way: str) -> None:
    if way == "all_reduce of gradients":
        works: list[Any] = [
            procgroup.all_reduce(parameter.grad, procgroup.ReduceOp.AVG, async_op=True)
            for parameter in model.parameters()
        ]
        for work in works:
            work.wait()
    elif way == "coalesced all_reduce of gradients":
        with procgroup._coalescing_manager():
            for parameter in model.parameters():
                procgroup.all_reduce(parameter.grad, procgroup.ReduceOp.AVG)


def train(rank: int, size: int, way: str) -> list[float]:
    """Train on this rank's rows of each batch; return the mean of the ranks' losses in each step."""
    import torch

    library: Any = None
    if way in ("stock DDP", "stock DDP with buckets"):
        library = begin(rank, size)
    elif way != "alone":
        library = procgroup
        procgroup.init_process_group("nccl" if way == "own DDP" and DEVICE == "cuda" else "gloo", timeout=40)
    model, loss_of, inputs, targets = model_and_data()
    if way.startswith("stock DDP"):
        buckets = {"bucket_cap_mb": 0.005, "gradient_as_bucket_view": True} if way.endswith("buckets") else {}
        module = torch.nn.parallel.DistributedDataParallel(model, **buckets)
    elif way == "own DDP":
        module = procgroup.parallel.DistributedDataParallel(model, device_ids=[0] if DEVICE == "cuda" else None)
    else:
        module = model
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9)
    rows = ROWS // size
    own = slice(rank * rows, (rank + 1) * rows)
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = loss_of(module(inputs[step, own]), targets[step, own])
        loss.backward()
        average_gradients(model, way)
        optimizer.step()
        mean = loss.detach().clone()
        if library is not None:
            library.all_reduce(mean, library.ReduceOp.AVG)
        losses.append(float(mean))
    if library is not None:
        library.destroy_process_group()
    return losses


WAYS = [
    "own DDP",
    "stock DDP",
    "stock DDP with buckets",
    "all_reduce of gradients",
    "coalesced all_reduce of gradients",
]


@pytest.mark.parametrize("way", WAYS)
def test_two_ranks_train_as_one_process_does(way: str, record_property: Any) -> None:
    alone = run(train, 1, args=("alone",))[0]
    of_ranks = run(train, 2, args=(way,), timeout=80, environment=ON_ONE_GPU)
    record_property("losses", [alone[0], alone[-1], of_ranks[0][-1]])
    assert of_ranks[0] == of_ranks[1]
    assert of_ranks[0] == pytest.approx(alone, rel=1e-4)
    assert alone[-1] < alone[0]


def wrap_with_own_ddp(rank: int, size: int) -> dict[str, str]:
    """Pass a model on a GPU to procgroup's own training; return what each raises."""
    import torch

    from procgroup.parallel import DistributedDataParallel, average_gradients

    procgroup.init_process_group("gloo", timeout=40)
    texts = {}
    calls = {
        "DistributedDataParallel": lambda: DistributedDataParallel(torch.nn.Linear(3, 1).to(DEVICE)),
        "average_gradients": lambda: average_gradients({"w": torch.full((3,), rank + 1.0, device=DEVICE)}),
    }
    for name, call in calls.items():
        try:
            value = call()
            texts[name] = f"returned {value}"
        except Exception as error:
            texts[name] = f"{type(error).__name__}: {error}"
    procgroup.barrier()
    procgroup.destroy_process_group()
    return texts


@on_cuda
def test_own_training_takes_a_model_on_a_gpu(record_property: Any) -> None:
    texts = run(wrap_with_own_ddp, 2)[0]
    record_property("texts", texts)
    assert all(text.startswith("returned") for text in texts.values())


def lose_a_rank(rank: int, size: int) -> str:
    import torch

    distributed = begin(rank, size)
    tensor = torch.ones(1 << 20, device=DEVICE)
    distributed.all_reduce(tensor)
    distributed.barrier()
    if rank == 1:
        os._exit(9)
    began = time.monotonic()
    try:
        for _ in range(1000):
            distributed.all_reduce(tensor)
        return "no error"
    except RuntimeError as error:
        return f"{type(error).__name__} after {time.monotonic() - began:.2f} s: {error}"


def test_a_lost_rank_is_named_under_torch_distributed(record_property: Any) -> None:
    outcomes = attempt(lose_a_rank, 2, timeout=60, environment=ON_ONE_GPU)
    record_property("text", outcomes[0].value or repr(outcomes[0]))
    assert outcomes[0].value is not None and "PeerLost" in outcomes[0].value and "rank 1" in outcomes[0].value, outcomes
