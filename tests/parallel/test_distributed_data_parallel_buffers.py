"""Values begin as those of rank 0, and buffers stay so, except where they are to be left alone. Ranks are threads."""

from __future__ import annotations

from typing import Any

import pytest

import procgroup as dist
from procgroup.testing import run_ranks

torch = pytest.importorskip("torch")

from parallel import models  # noqa: E402 - it needs torch
from parallel.models import batch, loss_of, part, wrap  # noqa: E402

from procgroup.parallel import DistributedDataParallel  # noqa: E402

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("average_early_or_late")]


def test_values_begin_as_those_of_rank_0() -> None:
    def play() -> None:
        model = models.make(models.Normed, seed=dist.get_rank())
        model.norm.running_mean.fill_(dist.get_rank())
        ours = DistributedDataParallel(model)
        expected = models.make(models.Normed, seed=0)
        assert all(torch.equal(one, other) for one, other in zip(ours.parameters(), expected.parameters(), strict=True))
        assert (ours.module.norm.running_mean == 0).all()

    run_ranks(play, 3)


def test_buffers_are_those_of_rank_0_in_every_forward() -> None:
    def play() -> None:
        ours, alone = wrap(models.Normed)
        for step in range(3):
            ours(part(batch(step)))
            alone(part(batch(step), rank=0))
        ours.eval()
        ours(part(batch(0)))  # copies what rank 0 has
        torch.testing.assert_close(ours.module.norm.running_mean, alone.norm.running_mean)
        assert ours.module.norm.num_batches_tracked == 3 and ours.module.calls == 4

    run_ranks(play, 3)


@pytest.mark.filterwarnings("ignore:`broadcast_buffers` is deprecated:FutureWarning")
@pytest.mark.parametrize(
    ("options", "at_construction"),
    [({"broadcast_buffers": False}, False), ({"forward_sync_buffers": False}, True)],
    ids=str,
)
def test_buffers_can_be_left_to_each_rank(options: dict[str, bool], at_construction: bool) -> None:
    def play() -> None:
        model = models.make(models.Normed)
        model.norm.running_mean.fill_(dist.get_rank())
        ours = DistributedDataParallel(model, **options)
        assert (ours.module.norm.running_mean == (0 if at_construction else dist.get_rank())).all()
        model.norm.running_mean.fill_(dist.get_rank())
        ours.eval()
        ours(part(batch(0)))
        assert (ours.module.norm.running_mean == dist.get_rank()).all() and not ours.will_sync_module_buffers()

    run_ranks(play, 2)


def test_the_forward_after_one_without_synchronising_leaves_buffers_alone() -> None:
    def play() -> None:
        ours, _ = wrap(models.Normed)
        ours.eval()
        with ours.no_sync():
            ours(part(batch(0)))
        assert not ours.will_sync_module_buffers()
        ours.module.norm.running_mean.fill_(dist.get_rank())
        ours(part(batch(1)))
        assert (ours.module.norm.running_mean == dist.get_rank()).all() and ours.will_sync_module_buffers()
        ours(part(batch(2)))
        assert (ours.module.norm.running_mean == 0).all()

    run_ranks(play, 2)


def test_what_is_ignored_is_left_alone() -> None:
    def play() -> None:
        model = models.make(models.Normed, seed=dist.get_rank())
        ignored = ["first.bias", "norm.running_mean"]
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ignored)
        model.norm.running_mean.fill_(dist.get_rank())
        bias = model.first.bias.detach().clone()
        ours = DistributedDataParallel(model)
        loss_of(ours(part(batch(0)))).backward()
        found: list[Any] = [None, None]
        dist.all_gather_object(found, model.first.bias.grad)
        assert torch.equal(model.first.bias, bias) and not torch.equal(*found)
        ours.eval()
        model.norm.running_mean.fill_(dist.get_rank())
        model.norm.running_var.fill_(dist.get_rank() + 1.0)
        ours(part(batch(1)))
        assert (model.norm.running_mean == dist.get_rank()).all() and (model.norm.running_var == 1).all()

    run_ranks(play, 2)
