"""How gradients are divided into buckets, and the memory of the buckets. Ranks are threads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import procgroup as dist
from procgroup.testing import run_ranks

torch = pytest.importorskip("torch")

from parallel import models  # noqa: E402 - it needs torch
from parallel.models import assert_same_gradients, batch, loss_of, mean_of_ranks, part, train, wrap  # noqa: E402
from torch import nn  # noqa: E402

from procgroup.parallel import DistributedDataParallel  # noqa: E402

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("average_early_or_late")]


@pytest.mark.parametrize(
    ("options", "sizes"),
    [
        ({}, [1192]),
        ({"bucket_cap_mb": 0.0001}, [128, 560, 504]),
        ({"bucket_cap_mb_list": [0.0001, 1]}, [128, 1064]),
        ({"bucket_cap_mb": 1, "bucket_cap_mb_list": [0.0003, 0.0001]}, [688, 504]),
    ],
    ids=str,
)
def test_buckets_are_closed_at_their_caps(options: dict[str, Any], sizes: list[int]) -> None:
    def play() -> list[int]:
        ours, _ = wrap(models.perceptron, **options)
        return [bucket.nbytes for bucket in ours._reducer.buckets]

    assert run_ranks(play, 1) == [sizes]


def test_a_large_gradient_is_a_bucket_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("procgroup.parallel.ddp.bucket_assignment.SINGLE_BYTES", 300)

    def play() -> int:
        ours, alone = wrap(models.perceptron)
        train(ours, alone)
        return len(ours._reducer.buckets)

    assert run_ranks(play, 3) == [3, 3, 3]


def test_buckets_follow_the_order_of_arrival_after_the_first_step() -> None:
    class Backwards(nn.Module):
        """Its layers are used in another order than that in which they are registered."""

        def __init__(self) -> None:
            super().__init__()
            self.last, self.first = nn.Linear(4, 2), nn.Linear(models.WIDTH, 4)

        def forward(self, inputs: Any) -> Any:
            return self.last(self.first(inputs))

    def play() -> tuple[list[str], list[str]]:
        ours, alone = wrap(Backwards, bucket_cap_mb=0.00001)
        before = [slot.name for bucket in ours._reducer.buckets for slot in bucket.slots]
        train(ours, alone)
        return before, [slot.name for bucket in ours._reducer.buckets for slot in bucket.slots]

    before, after = run_ranks(play, 2)[1]
    assert before == ["first.bias", "first.weight", "last.bias", "last.weight"]
    assert {*after[:2]} == {"last.bias", "last.weight"} and {*after[2:]} == {"first.bias", "first.weight"}


def test_different_orders_of_arrival_do_not_matter() -> None:
    class Ordered(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(models.WIDTH, models.WIDTH) for _ in range(4))

        def forward(self, inputs: Any, order: list[int]) -> Any:
            for place in order:
                inputs = torch.tanh(self.layers[place](inputs))
            return inputs

    def play() -> None:
        ours, alone = wrap(Ordered, bucket_cap_mb=0.00001)
        orders = [[0, 1, 2, 3], [3, 2, 1, 0], [2, 0, 3, 1]]
        for step in range(3):
            whole = batch(step)
            ours.zero_grad()
            loss_of(ours(part(whole), orders[dist.get_rank()])).backward()
            mean_of_ranks(alone, [loss_of(alone(part(whole, rank), orders[rank])) for rank in range(3)])
            assert_same_gradients(ours, alone, step)

    run_ranks(play, 3)


def test_dtypes_and_layouts_have_buckets_of_their_own() -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.tensor(2.0))
            self.narrow = nn.Parameter(torch.ones(3, 2, dtype=torch.bfloat16))
            self.spiral = nn.Parameter(torch.ones(3, dtype=torch.complex64))
            self.nothing = nn.Parameter(torch.empty(0, 3))
            self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)
            self.channels = nn.Parameter(torch.ones(2, 3, 4, 5).to(memory_format=torch.channels_last))
            self.turned = nn.Parameter(torch.ones(3, 5).t())
            self.spread = nn.Parameter(torch.ones(6)[::2])

        def forward(self, factor: float) -> Any:
            parts = [self.scale * factor, (self.narrow * factor).sum(), (self.spiral * factor).real.sum()]
            weights = torch.arange(120.0).view(2, 3, 4, 5)
            parts += [(self.channels * weights).sum() * factor, (self.turned * torch.arange(15.0).view(5, 3)).sum()]
            return sum(parts) + self.nothing.sum() + (self.spread * self.frozen * torch.arange(3.0)).sum() * factor

    def play() -> None:
        ours = DistributedDataParallel(Mixed(), bucket_cap_mb=0.0001)
        for _ in range(3):
            ours.zero_grad()
            ours(dist.get_rank() + 1.0).backward()
            assert ours.module.scale.grad == 1.5
            assert (ours.module.narrow.grad == 1.5).all() and ours.module.narrow.grad.dtype is torch.bfloat16
            assert (ours.module.spiral.grad == 1.5).all()
            assert torch.equal(ours.module.channels.grad, torch.arange(120.0).view(2, 3, 4, 5) * 1.5)
            assert torch.equal(ours.module.turned.grad, torch.arange(15.0).view(5, 3))
            assert torch.equal(ours.module.spread.grad, torch.arange(3.0) * 1.5)
            assert ours.module.frozen.grad is None

    run_ranks(play, 2)


def is_shared(tensor: Any) -> bool:
    """Return whether a tensor is in memory that processes share."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        addresses, kind = line.split()[:2]
        first, end = (int(address, 16) for address in addresses.split("-"))
        if first <= tensor.data_ptr() < end:
            return kind.endswith("s")
    return False


def test_gradients_live_in_shared_memory_and_saving_one_does_not_save_all() -> None:
    def play() -> None:
        ours, alone = wrap(models.perceptron)
        for _ in range(2):  # in the second round the memory is divided in another way
            train(ours, alone, steps=1)
            gradients = [parameter.grad for parameter in ours.parameters()]
            assert all(gradient.untyped_storage().nbytes() == gradient.nbytes for gradient in gradients)
            assert all(map(is_shared, gradients))
        before = {gradient.data_ptr() for gradient in gradients}
        ours.zero_grad()
        train(ours, alone)
        assert {parameter.grad.data_ptr() for parameter in ours.parameters()} == before

    run_ranks(play, 2, transport="shm")


def test_gradients_are_divided_anew_in_the_same_memory() -> None:
    def play() -> None:
        ours, alone = wrap(models.perceptron)
        begin = min(bucket.buffer.data_ptr() for bucket in ours._reducer.buckets)
        before = list(ours._reducer.buckets)
        train(ours, alone)
        assert all(bucket not in before for bucket in ours._reducer.buckets)
        assert min(bucket.buffer.data_ptr() for bucket in ours._reducer.buckets) == begin

    run_ranks(play, 2)


def test_extra_memory_is_one_bucket_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of gradients, no more is alive at any moment than the buckets and what one of them holds."""
    monkeypatch.setattr("procgroup.parallel.ddp.reducer.EARLY_BYTES", 1 << 20)

    def play() -> int:
        layers = [nn.Linear(100, 100, bias=False) for _ in range(24)]
        ours, _ = wrap(lambda: nn.Sequential(*layers), bucket_cap_mb=0.5)
        apart: list[int] = []
        for layer in ours.module:
            layer.weight.register_hook(lambda gradient: apart.append(count_apart()))

        def count_apart() -> int:
            slots = [slot for bucket in ours._reducer.buckets for slot in bucket.slots]
            return sum(slot.parameter.grad is not None and slot.parameter.grad is not slot.view for slot in slots)

        for _ in range(3):
            ours.zero_grad()
            apart.clear()
            ours(torch.ones(2, 100, dtype=torch.float64)).sum().backward()
        return max(apart)

    layer_bytes = 100 * 100 * 8
    assert all(apart * layer_bytes <= 0.5 * 2**20 + layer_bytes for apart in run_ranks(play, 2))
