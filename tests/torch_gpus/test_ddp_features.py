"""What DistributedDataParallel does beside averaging dense gradients, on stand-in GPUs as on CPUs."""

from __future__ import annotations

from typing import Any

import pytest
from torch_gpus.on_gpus import play

pytestmark = pytest.mark.torch


# --- Communication hooks ---


def hook_of(name: str) -> tuple[Any, Any]:
    """Return a hook and its state."""
    from procgroup.parallel import communication_hooks as hooks

    return {
        "allreduce": lambda: (hooks.allreduce_hook, None),
        "fp16": lambda: (hooks.fp16_compress_hook, None),
        "bf16": lambda: (hooks.bf16_compress_hook, None),
        "wrapped": lambda: (hooks.bf16_compress_wrapper(hooks.allreduce_hook), None),
        "PowerSGD": lambda: (hooks.powerSGD_hook, hooks.PowerSGDState(None, 3, 1, min_compression_rate=0.1)),
        "top k": lambda: (hooks.top_k_hook, hooks.TopKState(ratio=0.5)),
        "int8": lambda: (hooks.block_quantized_hook, hooks.BlockQuantizedState(block_size=8)),
        "post-local SGD": lambda: (hooks.post_localSGD_hook, hooks.PostLocalSGDState(None, None, 2)),
        "torch's future": lambda: (answer_with_a_future, None),
        "a future of the call": lambda: (answer_with_the_calls_future, None),
        "a hook that reads": lambda: (read, None),
    }[name]()


def answer_with_a_future(state: Any, bucket: Any) -> Any:
    import torch

    import procgroup as dist

    dist.all_reduce(bucket.buffer(), dist.ReduceOp.AVG)
    device = bucket.buffer().device
    future: Any = torch.futures.Future(devices=[device] if device.type == "cuda" else None)
    future.set_result([bucket.buffer().clone()])
    return future


def answer_with_the_calls_future(state: Any, bucket: Any) -> Any:
    import procgroup as dist

    work = dist.all_reduce(bucket.buffer(), dist.ReduceOp.AVG, async_op=True)
    return work.get_future()


def train_with_hook(gpu: Any, name: str) -> list[list[float]]:
    """Return the parameters after some steps: on this rank's GPU, and on its CPU with the same group."""
    import torch

    from procgroup.parallel import DistributedDataParallel

    results = []
    for device in ("cuda", "cpu"):
        model = gpu.models.make(gpu.models.perceptron).float().to(device)
        ours = DistributedDataParallel(model, bucket_cap_mb=0.0003)
        hook, state = hook_of(name)
        ours.register_comm_hook(state, hook)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(5):
            optimizer.zero_grad()
            gpu.models.loss_of(ours(gpu.models.part(gpu.models.batch(step)).float().to(device))).backward()
            optimizer.step()
        results.append(torch.cat([parameter.detach().reshape(-1).cpu() for parameter in model.parameters()]).tolist())
    return results


HOOKS = ["allreduce", "fp16", "bf16", "wrapped", "PowerSGD", "top k", "int8", "post-local SGD"]


@pytest.mark.parametrize("name", [*HOOKS, "torch's future", "a future of the call"])
def test_hooks_train_on_a_gpu_as_on_a_cpu(name: str) -> None:
    first, second = play(train_with_hook, name, delay=100)
    assert first[0] == second[0]
    assert first[0] == pytest.approx(first[1], abs=1e-4)


def hook_infinities(gpu: Any, name: str) -> list[bool]:
    import torch
    from parallel.hooks import bucket_of

    import procgroup as dist

    hook, state = hook_of(name)
    count = 20 if dist.get_rank() else 0
    gradient = torch.ones(4, 8, device="cuda")
    gradient.view(-1)[:count] = torch.inf
    bucket = bucket_of(gradient)
    hook(state, bucket).wait()
    return bool(bucket.buffer().isnan().all().item())


def test_more_infinities_than_a_rank_can_send_make_the_bucket_nan() -> None:
    assert play(hook_infinities, "top k") == [True, True]


# --- Buffers ---


def keep_buffers(gpu: Any) -> None:
    import torch

    import procgroup as dist

    ours, alone = gpu.wrap(gpu.models.Normed)
    for step in range(3):
        ours(gpu.models.part(gpu.models.batch(step)).cuda())
        alone(gpu.models.part(gpu.models.batch(step), rank=0))
    ours.eval()
    ours(gpu.models.part(gpu.models.batch(0)).cuda())  # copies what rank 0 has
    torch.testing.assert_close(ours.module.norm.running_mean.cpu(), alone.norm.running_mean)
    assert ours.module.norm.num_batches_tracked.item() == 3 and ours.module.calls.item() == 4
    ours.module.norm.running_mean.data.fill_(dist.get_rank())  # unnoticed by autograd
    with torch.inference_mode():
        ours(gpu.models.part(gpu.models.batch(0)).cuda())
    ours(gpu.models.part(gpu.models.batch(0)).cuda())
    assert ours.module.norm.running_mean.sum().item() == 0


def test_buffers_are_those_of_rank_0_in_every_forward() -> None:
    play(keep_buffers)


def call_forward_twice(gpu: Any) -> list[str]:
    import torch

    import procgroup as dist
    from procgroup.errors import BackwardFailed

    class Masked(torch.nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.first = torch.nn.Linear(gpu.models.WIDTH, 4)
            self.norm = torch.nn.BatchNorm1d(4)
            self.register_buffer("mask", torch.ones(4))

        def forward(self, inputs: Any) -> Any:
            return self.norm(self.first(inputs) * self.mask)

    ours, alone = gpu.wrap(Masked)
    whole = [gpu.models.part(gpu.models.batch(step)) for step in (0, 1)]
    outputs = [gpu.models.loss_of(ours(each.cuda())) for each in whole]
    sum(outputs).backward()
    expected = [gpu.models.loss_of(alone(gpu.models.part(gpu.models.batch(step), 0))) for step in (0, 1)]
    sum(expected).backward()
    seen = ["no error"]
    for _ in (0, 1):
        ours.zero_grad()
        first = ours(whole[0].cuda())
        with torch.no_grad():
            ours.module.mask.fill_(dist.get_rank() + 2)  # then rank 0's value comes
        ours(whole[1].cuda())
        assert ours.module.mask.tolist() == [2] * 4
        try:
            first.sum().backward()
        except (BackwardFailed, RuntimeError) as error:
            seen.append(str(error))
    return seen


def test_two_forwards_may_come_before_one_backward_unless_a_buffer_has_changed() -> None:
    for none, *errors in play(call_forward_twice):
        assert none == "no error" and len(errors) == 2 and all("inplace" in error for error in errors)


# --- Uneven inputs ---


def join_unevenly(gpu: Any) -> Any:
    import torch

    import procgroup as dist

    ours, alone = gpu.wrap(gpu.models.perceptron, bucket_cap_mb=0.0001)
    counts = [3, 5]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (ours, alone)]
    with ours.join():
        for step in range(counts[dist.get_rank()]):
            optimizers[0].zero_grad()
            gpu.models.loss_of(ours(gpu.models.part(gpu.models.batch(step)).cuda())).backward()
            optimizers[0].step()
    for step in range(max(counts)):
        active = [rank for rank in (0, 1) if step < counts[rank]]
        parts = [gpu.models.part(gpu.models.batch(step), rank) for rank in active]
        optimizers[1].zero_grad()
        (sum(gpu.models.loss_of(alone(each)) for each in parts) / 2).backward()
        optimizers[1].step()
    for mine, expected in zip(ours.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(mine.cpu(), expected)


def test_uneven_inputs_train_to_the_end_as_one_process_would() -> None:
    play(join_unevenly)


# --- Parameters, precision and optimizers ---


def embed_sparsely(gpu: Any) -> None:
    import torch

    import procgroup as dist

    def build() -> Any:
        return torch.nn.Sequential(torch.nn.Embedding(10, 4, sparse=True), torch.nn.Linear(4, 2))

    ours, alone = gpu.wrap(build)
    for step in range(4):
        words = [torch.tensor([step, 1, 9][: rank + step % 3], dtype=torch.int64) for rank in (0, 1)]
        ours.zero_grad(), alone.zero_grad()
        ours(words[dist.get_rank()].cuda()).square().sum().backward()
        (sum(alone(each).square().sum() for each in words) / 2).backward()
        assert ours.module[0].weight.grad.is_sparse and ours.module[0].weight.grad.is_cuda
        gpu.assert_same_gradients(ours, alone, step)


@pytest.mark.parametrize("backend", ["nccl", "gloo"])
def test_sparse_gradients_stay_sparse(backend: str) -> None:
    play(embed_sparsely, backend=backend)


def narrow(gpu: Any) -> None:
    import torch
    from torch.nn.parallel.distributed import _MixedPrecision

    from procgroup.parallel import DistributedDataParallel

    precision = _MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, buffer_dtype=torch.bfloat16)
    model = gpu.models.make(gpu.models.perceptron).float().cuda()
    ours = DistributedDataParallel(model, device_ids=[torch.cuda.current_device()], mixed_precision=precision)
    alone = gpu.to_cpu(ours)
    for step in range(3):
        whole = gpu.models.batch(step).float()
        ours.zero_grad(), alone.zero_grad()
        output = ours(gpu.models.part(whole))
        assert output.dtype is torch.bfloat16 and output.is_cuda
        gpu.models.loss_of(output.float()).backward()
        gpu.models.loss_of(alone(whole)).backward()
        for mine, expected in zip(ours.parameters(), alone.parameters(), strict=True):
            assert mine.grad.dtype is torch.float32
            torch.testing.assert_close(mine.grad.cpu(), expected.grad, rtol=0.1, atol=0.02)


def test_mixed_precision_computes_narrower_than_the_parameters() -> None:
    play(narrow)


def step_in_backward(gpu: Any) -> None:
    import torch
    from torch.distributed.optim import _apply_optimizer_in_backward

    for way in ("fused", "parameters"):
        ours, alone = gpu.wrap(gpu.models.perceptron)
        if way == "fused":
            ours._register_fused_optim(torch.optim.SGD, lr=0.1)
        else:
            _apply_optimizer_in_backward(torch.optim.SGD, ours.module.parameters(), {"lr": 0.1})
        optimizer = torch.optim.SGD(alone.parameters(), lr=0.1)
        for step in range(3):
            ours.zero_grad(), alone.zero_grad()
            gpu.models.loss_of(ours(gpu.models.part(gpu.models.batch(step)).cuda())).backward()
            gpu.models.loss_of(alone(gpu.models.batch(step))).backward()
            optimizer.step()
        for mine, expected in zip(ours.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(mine.cpu(), expected)


def test_optimizers_step_in_the_backward_with_the_average() -> None:
    play(step_in_backward)


def delay_parameters(gpu: Any) -> None:
    model = gpu.models.make(gpu.models.perceptron)
    ours, alone = gpu.wrap(gpu.models.perceptron)
    del ours
    model = model.cuda()
    named = list(model.named_parameters())

    from procgroup.parallel import DistributedDataParallel

    options = {"delay_all_reduce_named_params": named[-2:], "param_to_hook_all_reduce": named[0][1]}
    ours = DistributedDataParallel(model, skip_all_reduce_unused_params=True, **options)
    gpu.train(ours, alone)


def test_delayed_parameters_are_averaged_too() -> None:
    play(delay_parameters)


def copy_wrapper(gpu: Any) -> None:
    import copy
    import pickle

    import torch

    ours, alone = gpu.wrap(gpu.models.perceptron, device_ids=[torch.cuda.current_device()])
    gpu.train(ours, alone)
    copied = copy.deepcopy(ours)
    assert copied.device_ids == ours.device_ids and copied.device == ours.device
    gpu.train(copied, copy.deepcopy(alone))
    loaded = pickle.loads(pickle.dumps(ours))
    assert loaded.device_ids == ours.device_ids and loaded.device == ours.device
    gpu.train(loaded, copy.deepcopy(alone))


def test_copies_train_on_their_own() -> None:
    play(copy_wrapper)


# --- Averages of other kinds ---


def average(gpu: Any) -> None:
    import torch

    import procgroup as dist
    from procgroup.parallel import average_gradients, broadcast_parameters, require_equal_parameters
    from procgroup.parallel.communication_hooks import OuterSteps, PeriodicModelAverager

    rank = dist.get_rank()
    tree = {"weight": torch.full((3,), rank + 1.0, device="cuda"), "bias": torch.full((2,), rank + 1.0)}
    mean = average_gradients(tree)
    assert mean["weight"].is_cuda and mean["weight"].tolist() == [1.5] * 3 and mean["bias"].tolist() == [1.5] * 2
    assert broadcast_parameters(tree, 1)["weight"].tolist() == [2] * 3
    require_equal_parameters(mean)
    with pytest.raises(dist.CollectiveMismatch, match="different parameters"):
        require_equal_parameters(tree)

    parameters = [torch.full((3,), rank + 1.0, device="cuda"), torch.full((2,), rank + 1.0)]
    PeriodicModelAverager(2).average_parameters(parameters)
    assert [each.tolist() for each in parameters] == [[1.5] * 3, [1.5] * 2]
    outer = OuterSteps(parameters, every=1, learning_rate=1, momentum=0)
    for each in parameters:
        each.add_(rank)
    outer.step()
    assert [each.tolist() for each in parameters] == [[2.0] * 3, [2.0] * 2]


@pytest.mark.parametrize("backend", ["nccl", "gloo"])
def test_trees_and_parameters_are_averaged_on_their_devices(backend: str) -> None:
    play(average, backend=backend)


# --- SyncBatchNorm ---


def normalize(gpu: Any, rows: list[int]) -> None:
    import copy

    import torch

    import procgroup as dist
    from procgroup.parallel import DistributedDataParallel, SyncBatchNorm

    def build() -> Any:
        layers = [torch.nn.Conv1d(3, 4, 2), torch.nn.BatchNorm1d(4), torch.nn.ReLU(), torch.nn.BatchNorm1d(4)]
        return torch.nn.Sequential(*layers)

    alone = gpu.models.make(build)
    converted = torch.nn.SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(alone)).cuda()
    ours = DistributedDataParallel(converted)
    assert isinstance(ours.module[1], SyncBatchNorm)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.001) for model in (ours, alone)]
    for step in range(3):
        whole = torch.randn(sum(rows), 3, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
        mine = whole.split(rows)[dist.get_rank()].cuda()
        for optimizer in optimizers:
            optimizer.zero_grad()
        (ours(mine) ** 3).sum().mul(dist.get_world_size() / sum(rows)).backward()
        ((alone(whole) ** 3).sum() / sum(rows)).backward()
        for given, expected in zip(ours.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(given.grad.cpu(), expected.grad, rtol=1e-8, atol=1e-10)
        for name, buffer in alone.named_buffers():
            torch.testing.assert_close(ours.module.get_buffer(name).cpu(), buffer)
        for optimizer in optimizers:
            optimizer.step()
    ours.eval(), alone.eval()
    if dist.get_rank() == 0:
        torch.testing.assert_close(ours.module(whole.cuda()).cpu(), alone(whole))


@pytest.mark.parametrize("rows", [[3, 3], [5, 1], [4, 0]], ids=str)
def test_batch_norm_has_the_statistics_of_all_ranks(rows: list[int]) -> None:
    play(normalize, rows)


# --- No host waits for a GPU ---


def watch_steps(gpu: Any, name: str | None) -> list[str]:
    """Return the operations of a step, after the first ones, for whose results the host waits."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    from procgroup.parallel import DistributedDataParallel

    waits: list[str] = []

    class Watching(TorchDispatchMode):  # type: ignore[misc]
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = function(*args, **(kwargs or {}))
            given = [each for each in args if isinstance(each, torch.Tensor)]
            made = [each for each in (result, *given[:1]) if isinstance(each, torch.Tensor)]
            crosses = function.__name__.startswith(("copy_", "_to_copy")) and len({e.is_cuda for e in given + made}) > 1
            is_read = function.__name__.startswith(("_local_scalar_dense", "equal", "nonzero", "masked_select"))
            if crosses or (is_read and any(each.is_cuda for each in given)):
                waits.append(str(function))
            return result

    def build() -> Any:
        class Layers(torch.nn.Sequential):  # type: ignore[misc]
            def __init__(self) -> None:
                super().__init__(torch.nn.Linear(6, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 4))
                self.register_buffer("mask", torch.ones(4))

            def forward(self, inputs: Any) -> Any:
                return super().forward(inputs) * self.mask

        return Layers()

    model = torch.nn.SyncBatchNorm.convert_sync_batchnorm(gpu.models.make(build)).cuda()
    ours = DistributedDataParallel(model, bucket_cap_mb=0.0001)
    if name is not None:
        hook, state = hook_of(name)
        ours.register_comm_hook(state, hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(6):
        inputs = gpu.models.part(gpu.models.batch(step)).cuda()
        optimizer.zero_grad()
        if step < 4:
            gpu.models.loss_of(ours(inputs)).backward()
            optimizer.step()
            continue
        with Watching():
            gpu.models.loss_of(ours(inputs)).backward()
            optimizer.step()
    if name == "a hook that reads":
        assert waits, "the hooks of a backward are not watched"
        return []
    return waits


def read(state: Any, bucket: Any) -> Any:
    bucket.buffer()[0].item()
    return answer_with_the_calls_future(state, bucket)


@pytest.mark.parametrize("name", [None, *HOOKS, "a hook that reads"])
def test_no_host_waits_for_a_gpu_in_a_step(name: str | None) -> None:
    assert play(watch_steps, name, delay=0) == [[], []]
