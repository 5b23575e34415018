"""Steps of several backwards, or of none: gradients add up as in one process, also in no_sync(). Ranks are threads."""

from __future__ import annotations

import copy
from typing import Any

import pytest

import procgroup as dist
from procgroup.testing import run_ranks

torch = pytest.importorskip("torch")

from parallel import models  # noqa: E402 - it needs torch
from parallel.models import (  # noqa: E402
    assert_same_gradients,
    batch,
    loss_of,
    mean_of_ranks,
    part,
    sizes_of_single_gradients,
    train,
    wrap,
)
from torch import nn  # noqa: E402

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("average_early_or_late")]


@sizes_of_single_gradients
def test_no_sync_adds_up_and_the_next_step_averages_all(single: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("procgroup.parallel.ddp.bucket_assignment.SINGLE_BYTES", single)

    def play() -> None:
        ours, alone = wrap(models.perceptron)
        for turn in range(3):
            for model in (ours, alone):
                model.zero_grad()
            mine = copy.deepcopy(ours.module)
            mine.zero_grad()
            with ours.no_sync():
                for step in (0, 1):
                    whole = batch(10 * turn + step)
                    loss_of(ours(part(whole))).backward()
                    loss_of(mine(part(whole))).backward()
                    loss_of(alone(whole)).backward()
            assert_same_gradients(ours, mine, "not averaged yet")
            whole = batch(10 * turn + 2)
            loss_of(ours(part(whole))).backward()
            loss_of(alone(whole)).backward()
            assert_same_gradients(ours, alone, turn)

    run_ranks(play, 3)


def test_what_was_used_without_synchronising_only_is_averaged_with_the_next_step() -> None:
    def play() -> None:
        ours, alone = wrap(models.Branches)
        whole = batch(0)
        with ours.no_sync():
            loss_of(ours(part(whole), 1)).backward()
        loss_of(ours(part(whole), 0)).backward()
        parts = [part(whole, rank) for rank in range(2)]
        mean_of_ranks(alone, [loss_of(alone(one, 1)) + loss_of(alone(one, 0)) for one in parts])
        assert_same_gradients(ours, alone)

    run_ranks(play, 2)


def test_no_sync_inside_of_no_sync_ends_with_the_outer_one() -> None:
    def play() -> None:
        ours, alone = wrap(models.perceptron)
        mine = copy.deepcopy(alone)
        with ours.no_sync():
            with ours.no_sync():
                loss_of(ours(part(batch(0)))).backward()
            loss_of(ours(part(batch(1)))).backward()
            for step in range(2):
                loss_of(mine(part(batch(step)))).backward()
            assert_same_gradients(ours, mine, "not averaged yet")
        loss_of(ours(part(batch(2)))).backward()
        for step in range(3):
            loss_of(alone(batch(step))).backward()
        assert_same_gradients(ours, alone)

    run_ranks(play, 2)


@pytest.mark.parametrize("set_to_none", [False, None], ids=["zeroed", "kept"])
@sizes_of_single_gradients
def test_gradients_that_stay_add_up(set_to_none: bool | None, single: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("procgroup.parallel.ddp.bucket_assignment.SINGLE_BYTES", single)

    def play() -> None:
        ours, alone = wrap(models.perceptron)
        for step in range(4):
            if set_to_none is not None:
                ours.zero_grad(set_to_none=False)
                alone.zero_grad(set_to_none=False)
            whole = batch(step)
            loss_of(ours(part(whole))).backward()
            loss_of(alone(whole)).backward()
            assert_same_gradients(ours, alone, step)

    run_ranks(play, 3)


def test_gradients_that_stay_add_up_also_where_a_rank_adds_nothing() -> None:
    def play() -> None:
        ours, alone = wrap(models.Branches, bucket_cap_mb=0.0001)
        for step, branches in enumerate([(0, 0, 1), (1, 0, 0), (1, 1, 1), (0, 2, 1)]):
            whole = batch(step)
            loss_of(ours(part(whole), branches[dist.get_rank()])).backward()
            for rank in range(3):
                (loss_of(alone(part(whole, rank), branches[rank])) / 3).backward()
            assert_same_gradients(ours, alone, step)

    run_ranks(play, 3)


def test_two_forwards_can_come_before_one_backward_or_two() -> None:
    def play() -> None:
        ours, alone = wrap(models.Normed)
        alone.norm.eval()
        ours.module.norm.eval()
        for backwards in (1, 2):
            for model, cut in ((ours, part), (alone, lambda whole: whole)):
                model.zero_grad()
                losses = [loss_of(model(cut(batch(step)))) for step in (0, 1)]
                for loss in losses if backwards == 2 else [sum(losses)]:
                    loss.backward()
            assert_same_gradients(ours, alone, backwards)

    run_ranks(play, 2)


def test_running_statistics_do_not_forbid_two_forwards() -> None:
    def play() -> None:
        ours, _ = wrap(models.Normed)
        (loss_of(ours(part(batch(0)))) + loss_of(ours(part(batch(1))))).backward()

    run_ranks(play, 2)


def test_a_forward_without_backward_needs_no_other_rank() -> None:
    def play() -> None:
        ours, alone = wrap(models.perceptron)
        if dist.get_rank() == 0:
            with torch.no_grad():
                ours(part(batch(0)))
            ours.eval()
            ours(part(batch(0)))
            ours.train()
            ours(part(batch(0)))
        train(ours, alone)

    run_ranks(play, 2)


def test_torch_autograd_grad_averages_nothing_and_disturbs_nothing() -> None:
    def play() -> None:
        ours, alone = wrap(models.perceptron)
        if dist.get_rank() == 0:
            inputs = part(batch(0)).requires_grad_()
            torch.autograd.grad(loss_of(ours(inputs)), inputs)
            torch.autograd.grad(loss_of(ours(inputs)), list(ours.parameters()))
            loss_of(ours(inputs)).backward(inputs=[inputs])
        train(ours, alone)

    run_ranks(play, 2)


def test_a_gradient_penalty_by_autograd_grad_is_averaged() -> None:
    def penalty(model: nn.Module, inputs: Any) -> Any:
        inputs = inputs.clone().requires_grad_()
        (slope,) = torch.autograd.grad(model(inputs).sum(), inputs, create_graph=True)
        return loss_of(slope)

    def play() -> None:
        ours, alone = wrap(models.perceptron)
        whole = batch(0)
        penalty(ours, part(whole)).backward()
        penalty(alone, whole).backward()
        assert_same_gradients(ours, alone)

    run_ranks(play, 2)
