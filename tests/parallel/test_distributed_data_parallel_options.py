"""Delayed and left-out parameters, narrower dtypes. Ranks are threads."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import pytest

import procgroup as dist
from procgroup.testing import run_ranks

torch = pytest.importorskip("torch")

from parallel import models  # noqa: E402 - it needs torch
from parallel.models import WIDTH, assert_same_gradients, batch, loss_of, mean_of_ranks, part, wrap  # noqa: E402
from torch import nn  # noqa: E402

from procgroup.parallel import DistributedDataParallel  # noqa: E402

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("average_early")]


def test_gradients_that_were_given_other_data_are_averaged_all_the_same() -> None:
    def play() -> None:
        ours, alone = wrap(models.perceptron)
        for step in range(6):
            dtype = (torch.float64, torch.float32)[step // 2 % 2]
            for each in (ours, alone):
                each.to(dtype)  # gives parameters, and the gradients that they have, other data
            ours.zero_grad(set_to_none=step % 2 == 0)
            alone.zero_grad()
            for each, inputs in ((ours, part(batch(step))), (alone, batch(step))):
                loss_of(each(inputs.to(dtype))).backward()
            for mine, theirs in zip(ours.parameters(), alone.parameters(), strict=True):
                torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-4, atol=1e-6)
            for parameter in ours.parameters():
                parameter.grad.data = parameter.grad.data / 2

    run_ranks(play, 2)


def test_delayed_parameters_come_last() -> None:
    def play() -> None:
        model = models.make(models.perceptron)
        alone = copy.deepcopy(model)
        delayed = [(name, parameter) for name, parameter in model.named_parameters() if name.startswith("4.")]
        ours = DistributedDataParallel(
            model,
            delay_all_reduce_named_params=delayed,
            param_to_hook_all_reduce=model[0].weight,
            bucket_cap_mb=0.00001,
        )
        for step in range(3):
            for each, inputs in ((ours, part(batch(step))), (alone, batch(step))):
                each.zero_grad()
                loss_of(each(inputs)).backward()
            assert_same_gradients(ours, alone, step)
            names = [slot.name for bucket in ours._reducer.buckets for slot in bucket.slots]
            assert sorted(names[-2:]) == ["4.bias", "4.weight"]

    run_ranks(play, 2)


def test_delayed_parameters_are_checked() -> None:
    def play() -> None:
        model = models.make(models.perceptron)
        foreign = nn.Parameter(torch.ones(2))
        for options in (
            {"delay_all_reduce_named_params": [("0.weight", model[0].weight)]},
            {"param_to_hook_all_reduce": model[0].weight},
            {"delay_all_reduce_named_params": [("0.weight", foreign)], "param_to_hook_all_reduce": model[0].weight},
            {"delay_all_reduce_named_params": [], "param_to_hook_all_reduce": foreign},
        ):
            with pytest.raises(ValueError, match="delay"):
                DistributedDataParallel(model, **options)

    run_ranks(play, 1)


def test_what_no_rank_uses_first_can_be_left_out_and_is_averaged_when_it_is_used() -> None:
    def play() -> None:
        ours, alone = wrap(models.Branches, skip_all_reduce_unused_params=True)
        branches = [(0, 0, 0), (0, 0, 0), (1, 0, 2), (0, 1, 1)]
        for step, uses in enumerate(branches):
            whole = batch(step)
            ours.zero_grad()
            loss_of(ours(part(whole), uses[dist.get_rank()])).backward()
            mean_of_ranks(alone, [loss_of(alone(part(whole, rank), uses[rank])) for rank in range(3)])
            assert_same_gradients(ours, alone, step)
        assert all(not slot.name.startswith("never") for bucket in ours._reducer.buckets for slot in bucket.slots)

    run_ranks(play, 3)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointed_modules_are_computed_again_in_the_narrow_dtype(use_reentrant: bool) -> None:
    def play() -> None:
        model = models.make(lambda: models.Shared(use_reentrant)).float()
        alone = copy.deepcopy(model)
        ours = DistributedDataParallel(model, mixed_precision=Precision(torch.bfloat16, torch.float32))
        seen = []
        ours.module.layer.register_forward_hook(lambda module, inputs, output: seen.append(output.dtype))
        for step in range(3):
            whole = batch(step).float()
            for each, inputs in ((ours, part(whole)), (alone, whole)):
                each.zero_grad()
                loss_of(each(inputs).float()).backward()
            for parameter, other in zip(ours.parameters(), alone.parameters(), strict=True):
                assert isinstance(parameter, nn.Parameter)
                torch.testing.assert_close(parameter.grad, other.grad, rtol=0.05, atol=0.02)
        assert set(seen) == {torch.bfloat16} and len(seen) == (18 if use_reentrant else 9)

    run_ranks(play, 2)


def test_after_a_backward_that_failed_the_parameters_are_as_wide_as_before() -> None:
    class Fragile(nn.Linear):
        def forward(self, inputs: Any, fails: bool) -> Any:
            return super().forward(models.Failing.apply(inputs.requires_grad_(), fails))

    def play() -> None:
        ours, _ = wrap(lambda: Fragile(WIDTH, 2).float(), mixed_precision=Precision(torch.bfloat16))
        with pytest.raises(KeyError):
            ours(part(batch(0)), True).sum().backward()
        assert ours.module.weight.dtype is torch.float64 and isinstance(ours.module.weight, nn.Parameter)
        ours.zero_grad()
        ours(part(batch(0)), False).sum().backward()
        assert ours.module.weight.grad is not None

    run_ranks(play, 2)


def test_what_is_ignored_stays_as_wide_as_it_is() -> None:
    class Adding(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.wide = nn.Parameter(torch.ones(WIDTH)), nn.Parameter(torch.ones(WIDTH))
            self.register_buffer("narrow", torch.ones(WIDTH))
            self.register_buffer("kept", torch.ones(WIDTH))

        def forward(self, inputs: Any) -> Any:
            assert self.weight.dtype is torch.bfloat16 and self.wide.dtype is torch.float32
            return inputs * self.weight + self.wide

    def play() -> None:
        model = Adding()
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ["wide", "kept"])
        ours = DistributedDataParallel(model, mixed_precision=Precision(torch.bfloat16, None, torch.bfloat16))
        ours(torch.ones(2, WIDTH)).sum().backward()
        assert (model.narrow.dtype, model.kept.dtype) == (torch.bfloat16, torch.float32)
        assert model.weight.grad.dtype is model.wide.grad.dtype is torch.float32

    run_ranks(play, 2)


@dataclass
class Precision:
    """What torch's _MixedPrecision has."""

    param_dtype: Any = None
    reduce_dtype: Any = None
    buffer_dtype: Any = None


@pytest.mark.parametrize(
    "precision",
    [
        Precision(param_dtype=torch.bfloat16),
        Precision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
        Precision(reduce_dtype=torch.bfloat16),
        Precision(param_dtype=torch.bfloat16, buffer_dtype=torch.bfloat16),
    ],
    ids=str,
)
def test_computing_and_averaging_can_be_narrower_than_the_parameters(precision: Precision) -> None:
    def play() -> None:
        # Running statistics have to be as narrow as what is computed.
        has_buffers = precision.buffer_dtype or not precision.param_dtype
        model = models.make(models.Normed if has_buffers else models.perceptron).float().eval()
        alone = copy.deepcopy(model)
        ours = DistributedDataParallel(model, mixed_precision=precision)
        seen = []
        first = next(ours.module.children())
        first.register_forward_hook(lambda module, inputs, output: seen.append(output.dtype))
        for step in range(3):
            whole = batch(step).float()
            for each, inputs in ((ours, part(whole)), (alone, whole)):
                each.zero_grad()
                loss_of(each(inputs)).backward()
            for parameter, other in zip(ours.parameters(), alone.parameters(), strict=True):
                assert parameter.dtype is torch.float32 and parameter.grad.dtype is torch.float32
                torch.testing.assert_close(parameter.grad, other.grad, rtol=0.05, atol=0.02)
        assert set(seen) == {precision.param_dtype or torch.float32}
        if has_buffers:
            assert ours.module.norm.running_mean.dtype is (precision.buffer_dtype or torch.float32)
            assert ours.module.norm.num_batches_tracked.dtype is torch.int64
        assert ours._reducer.buckets[0].buffer.dtype is (
            precision.reduce_dtype or precision.param_dtype or torch.float32
        )
        found: list[Any] = [None, None]
        dist.all_gather_object(found, first.weight.grad)
        assert torch.equal(*found)

    run_ranks(play, 2)
