"""SyncBatchNorm gives what BatchNorm gives to one process with the batches of all ranks. Ranks are threads."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import pytest

import procgroup as dist
from procgroup.testing import run_ranks

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

from procgroup.parallel import DistributedDataParallel, SyncBatchNorm  # noqa: E402

pytestmark = pytest.mark.torch
CHANNELS = 3


def batches(rows: Sequence[int], shape: Sequence[int] = (), dtype: Any = torch.float64, seed: int = 0) -> list[Any]:
    """Return a batch for each rank."""
    generator = torch.Generator().manual_seed(seed)
    whole = torch.randn(sum(rows), CHANNELS, *shape, generator=generator, dtype=torch.float64) * 3 + 5
    return list(whole.to(dtype).split(list(rows)))


def randomized(layer: Any) -> Any:
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return layer


def loss_of(output: Any) -> Any:
    """Return a loss whose gradient differs from value to value."""
    return (output * torch.linspace(-1, 1, CHANNELS).view(-1, *[1] * (output.dim() - 2)).to(output) + output**3).sum()


def compare(rank: int, rows: Sequence[int], shape: Sequence[int], options: dict[str, Any]) -> None:
    alone = randomized(nn.BatchNorm2d(CHANNELS, **options) if len(shape) == 2 else nn.BatchNorm1d(CHANNELS, **options))
    alone = alone.double()
    ours = SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(alone))
    for seed in range(3):
        parts = batches(rows, shape, seed=seed)
        whole = torch.cat(parts).requires_grad_()
        expected = alone(whole)
        loss_of(expected).backward()
        mine = parts[rank].clone().requires_grad_()
        output = ours(mine)
        loss_of(output).backward()
        torch.testing.assert_close(output, expected.split(list(rows))[rank])
        torch.testing.assert_close(mine.grad, whole.grad.split(list(rows))[rank])
        for ours_one, alone_one in zip(ours.parameters(), alone.parameters(), strict=True):
            total = ours_one.grad.clone()
            dist.all_reduce(total)
            torch.testing.assert_close(total, alone_one.grad)
        for name, buffer in alone.named_buffers():
            torch.testing.assert_close(getattr(ours, name), buffer, msg=name)
    ours.eval(), alone.eval()
    if rank == 0 or ours.track_running_stats:  # no call is made: one rank alone can do it
        torch.testing.assert_close(ours(whole), alone(whole))


OPTIONS: list[dict[str, Any]] = [
    {},
    {"momentum": None},
    {"affine": False, "eps": 0.1},
    {"track_running_stats": False, "momentum": 0.3},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("rows", [(4, 4), (1, 6), (5, 0, 2)], ids=str)
@pytest.mark.parametrize("shape", [(), (2, 3)], ids=["2d", "4d"])
def test_outputs_gradients_and_statistics_are_those_of_the_whole_batch(
    rows: Sequence[int], shape: Sequence[int], options: dict[str, Any]
) -> None:
    run_ranks(lambda: compare(dist.get_rank(), rows, shape, options), len(rows))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("narrows_parameters", [False, True], ids=["float32 parameters", "narrow parameters"])
def test_narrow_inputs_have_statistics_in_float32(dtype: Any, narrows_parameters: bool) -> None:
    def play() -> None:
        rows = (6, 3)
        alone = randomized(nn.BatchNorm1d(CHANNELS))
        ours = SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(alone))
        if narrows_parameters:
            ours.to(dtype)
        parts = batches(rows, dtype=dtype)
        whole = torch.cat(parts).float().requires_grad_()
        expected = alone(whole)
        loss_of(expected).backward()
        mine = parts[dist.get_rank()].clone().requires_grad_()
        output = ours(mine)
        loss_of(output).backward()
        assert output.dtype is mine.grad.dtype is dtype and ours.weight.grad.dtype is ours.weight.dtype
        limit = {torch.float32: 1e-4, torch.float16: 0.03, torch.bfloat16: 0.2}[dtype]
        torch.testing.assert_close(output.float(), expected.split(rows)[dist.get_rank()], rtol=limit, atol=limit)
        torch.testing.assert_close(
            mine.grad.float(), whole.grad.split(rows)[dist.get_rank()], rtol=limit, atol=10 * limit
        )

    run_ranks(play, 2)


def test_batches_that_are_all_empty_leave_the_statistics_alone() -> None:
    def play() -> None:
        ours = SyncBatchNorm(CHANNELS)
        output = ours(torch.zeros(0, CHANNELS, requires_grad=True))
        output.sum().backward()
        assert output.shape == (0, CHANNELS) and ours.running_mean.tolist() == [0] * CHANNELS
        assert ours.running_var.tolist() == [1] * CHANNELS and ours.weight.grad.tolist() == [0] * CHANNELS

    run_ranks(play, 2)


def test_torchs_layers_are_synchronized_when_the_module_is_wrapped() -> None:
    def play() -> None:
        rank, rows = dist.get_rank(), (5, 3)
        layers = nn.Sequential(nn.Linear(CHANNELS, CHANNELS), nn.BatchNorm1d(CHANNELS), nn.Linear(CHANNELS, 2))
        alone = randomized(layers).double()
        converted = nn.SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(alone))
        ours = DistributedDataParallel(converted)
        assert isinstance(ours.module[1], SyncBatchNorm) and isinstance(ours.module[1], nn.SyncBatchNorm)
        copied = copy.deepcopy(ours)
        for model in (ours, copied):
            parts = batches(rows)
            alone.zero_grad()
            (alone(torch.cat(parts)) ** 2).sum().backward()
            (model(parts[rank]) ** 2).sum().backward()
            for mine, expected in zip(model.parameters(), alone.parameters(), strict=True):
                torch.testing.assert_close(mine.grad * 2, expected.grad)
        dist.barrier()

    run_ranks(play, 2)


def test_a_group_of_some_ranks_is_that_of_the_layers() -> None:
    def play() -> list[float]:
        pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
        layer = SyncBatchNorm.convert_sync_batchnorm(nn.BatchNorm1d(1), pairs[dist.get_rank() // 2])
        assert copy.deepcopy(layer).process_group is layer.process_group
        model = DistributedDataParallel(nn.SyncBatchNorm(1), process_group=pairs[dist.get_rank() // 2])
        values = torch.full((1, 1), float(dist.get_rank()))
        layer(values), model(values)
        return [layer.running_mean.item(), model.module.running_mean.item()]

    assert run_ranks(play, 4) == [pytest.approx([mean, mean]) for mean in (0.05, 0.05, 0.25, 0.25)]


def test_without_a_group_it_is_the_layer_of_one_process() -> None:
    whole = torch.cat(batches((6,)))
    torch.testing.assert_close(SyncBatchNorm(CHANNELS).double()(whole), nn.BatchNorm1d(CHANNELS).double()(whole))


class Derived(nn.SyncBatchNorm):  # type: ignore[misc]
    """Its forward would be torch's."""


def test_what_is_no_batch_of_values_is_refused() -> None:
    def play() -> None:
        with pytest.raises(ValueError, match="at least 2D"):
            SyncBatchNorm(CHANNELS)(torch.ones(CHANNELS))
        with pytest.raises(ValueError, match="derived from torch.nn.SyncBatchNorm"):
            DistributedDataParallel(nn.Sequential(Derived(CHANNELS)))

    run_ranks(play, 1)
