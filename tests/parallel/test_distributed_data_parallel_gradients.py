"""DistributedDataParallel gives the gradients of one process that sees the whole batch. Ranks are threads."""

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
from torch.utils.checkpoint import checkpoint  # noqa: E402

from procgroup.parallel import DistributedDataParallel, GradBucket  # noqa: E402
from world import placed  # noqa: E402

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("average_early_or_late")]
transports = pytest.mark.parametrize("transport", ["shm", "tcp", "spanning"])


@transports
@pytest.mark.parametrize("size", [1, 2, 3, 4, 7])
def test_gradients_are_those_of_the_whole_batch(size: int, transport: str) -> None:
    run_ranks(lambda: train(*wrap(models.perceptron)), size, **placed(transport, size))


OPTIONS: list[dict[str, Any]] = [
    {"bucket_cap_mb": 0.0001},
    {"bucket_cap_mb_list": [0.0001, 0.0002]},
    {"bucket_cap_mb": 100},
    {"find_unused_parameters": True},
    {"gradient_as_bucket_view": True},
    {"static_graph": True},
    {"batched_grad_copy": True},
    {"forward_sync_buffers": False},
    {"init_sync": False},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_every_option_of_torch_gives_these_gradients(options: dict[str, Any]) -> None:
    run_ranks(lambda: train(*wrap(models.perceptron, **options)), 3)


@pytest.mark.parametrize("size", [2, 3])
@sizes_of_single_gradients
def test_parameters_that_some_ranks_do_not_use_need_no_flag(
    size: int, single: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("procgroup.parallel.ddp.bucket_assignment.SINGLE_BYTES", single)

    def play() -> None:
        ours, alone = wrap(models.Branches, bucket_cap_mb=0.0001)
        for step in range(5):
            whole = batch(step)
            # In step 0 all ranks use one branch, later different ones, and some branches are used nowhere.
            branches = [(rank * step) % (step % 3 + 1) for rank in range(size)]
            mean_of_ranks(alone, [loss_of(alone(part(whole, rank), branches[rank])) for rank in range(size)])
            ours.zero_grad()
            loss_of(ours(part(whole), branches[dist.get_rank()])).backward()
            assert_same_gradients(ours, alone, step)
            assert ours.module.never.weight.grad is None

    run_ranks(play, size)


def test_a_rank_that_uses_no_parameter_at_all_takes_part() -> None:
    class Sometimes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(models.WIDTH, 2)

        def forward(self, inputs: Any, use: bool) -> Any:
            return self.layer(inputs) if use else inputs

    def play() -> None:
        ours, alone = wrap(Sometimes)
        for step in range(3):
            whole = batch(step).requires_grad_()
            ours.zero_grad()
            loss_of(ours(part(whole), dist.get_rank() != step)).backward()
            alone.zero_grad()
            for rank in range(3):
                if rank != step:
                    (loss_of(alone(part(whole, rank), True)) / 3).backward()
            assert_same_gradients(ours, alone, step)

    run_ranks(play, 3)


def add_one(_state: Any, bucket: GradBucket) -> Any:
    future: Any = torch.futures.Future()
    future.set_result(bucket.buffer().add_(1))
    return future


@pytest.mark.parametrize("hook", [None, add_one], ids=["no hook", "a hook that changes all it is given"])
def test_gradients_of_parameters_that_no_rank_uses_stay_as_they_are(hook: Any) -> None:
    def play() -> None:
        ours, _ = wrap(models.Branches)
        if hook is not None:
            ours.register_comm_hook(None, hook)
        for step in (0, 1):  # at the second step the gradients are re-bucketed
            loss_of(ours(part(batch(step)), 0)).backward()
            kept = ours.module.branches[0].weight.grad.clone()
            loss_of(ours(part(batch(2)), 1)).backward()
            assert torch.equal(ours.module.branches[0].weight.grad, kept)

    run_ranks(play, 3)


@pytest.mark.parametrize("use_reentrant", [None, False, True])
@pytest.mark.parametrize("static_graph", [False, True])
def test_shared_and_checkpointed_modules_need_no_flag(use_reentrant: bool | None, static_graph: bool) -> None:
    def play() -> None:
        train(*wrap(lambda: models.Shared(use_reentrant), bucket_cap_mb=0.00001, static_graph=static_graph))

    run_ranks(play, 3)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_the_wrapped_module_itself_can_be_checkpointed(use_reentrant: bool) -> None:
    def play() -> None:
        ours, alone = wrap(models.perceptron)
        for step in range(3):
            whole = batch(step).requires_grad_()
            for model in (ours, alone):
                model.zero_grad()
            loss = loss_of(checkpoint(ours, part(whole), use_reentrant=use_reentrant))
            (loss + loss_of(checkpoint(ours, part(whole) * 2, use_reentrant=use_reentrant))).backward()
            (loss_of(alone(whole)) + loss_of(alone(whole * 2))).backward()
            assert_same_gradients(ours, alone, step)

    run_ranks(play, 2)


class Answer:
    """An output of a type that nobody knows."""

    def __init__(self, logits: Any) -> None:
        self.inner = {"logits": [logits]}


@pytest.mark.parametrize("shape", ["dict", "set", "object", "hidden"])
def test_outputs_may_have_any_form(shape: str) -> None:
    class Wrapping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(models.WIDTH, 2)

        def forward(self, inputs: Any) -> Any:
            logits = self.layer(inputs)
            forms = {"dict": {"a": (1, logits)}, "set": {logits}, "object": Answer(logits), "hidden": lambda: logits}
            return forms[shape]

    def logits(output: Any) -> Any:
        found = {
            "dict": lambda: output["a"][1],
            "set": lambda: next(iter(output)),
            "object": lambda: output.inner["logits"][0],
            "hidden": lambda: output(),
        }
        return found[shape]()

    def play() -> None:
        ours, alone = wrap(Wrapping)
        for step in range(3):
            for model, inputs in ((ours, part(batch(step))), (alone, batch(step))):
                model.zero_grad()
                loss_of(logits(model(inputs))).backward()
            assert_same_gradients(ours, alone, step)

    run_ranks(play, 2)


def test_sparse_gradients_stay_sparse() -> None:
    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words = nn.Embedding(20, 3, sparse=True)
            self.more = nn.Embedding(5, 3)
            self.last = nn.Linear(3, 2)

        def forward(self, tokens: Any) -> Any:
            return self.last(self.words(tokens) + self.more(tokens % 5))

    def play() -> None:
        ours, alone = wrap(Words)
        for step in range(3):
            tokens = [torch.tensor([step, rank, 3, 3, rank + step]) for rank in range(3)]
            ours.zero_grad()
            loss_of(ours(tokens[dist.get_rank()])).backward()
            mean_of_ranks(alone, [loss_of(alone(tokens[rank])) for rank in range(3)])
            assert ours.module.words.weight.grad.is_sparse
            assert_same_gradients(ours, alone, step)

    run_ranks(play, 3)


def test_a_subgroup_averages_among_its_members() -> None:
    def play() -> None:
        group = dist.new_group([0, 2])
        model = models.make(models.perceptron)
        if dist.get_rank() == 1:
            with pytest.raises(ValueError, match="does not belong"):
                DistributedDataParallel(model, process_group=group)
            return
        alone = copy.deepcopy(model)
        ours = DistributedDataParallel(model, process_group=group)
        whole = batch(0)
        loss_of(ours(part(whole))).backward()
        for rank in (0, 2):
            (loss_of(alone(part(whole, rank))) / 2).backward()
        assert_same_gradients(ours, alone)

    run_ranks(play, 3)


def test_a_mesh_can_be_given_in_place_of_a_group() -> None:
    def play() -> None:
        mesh = dist.init_device_mesh("cpu", (3,))
        train(*wrap(models.perceptron, device_mesh=mesh))
        with pytest.raises(RuntimeError, match="both process_group and device_mesh"):
            wrap(models.perceptron, device_mesh=mesh, process_group=dist.group.WORLD)

    run_ranks(play, 3)


def test_clipping_between_backward_and_step_sees_the_average() -> None:
    def play() -> None:
        ours, alone = wrap(models.perceptron)
        whole = batch(0)
        loss_of(ours(part(whole))).backward()
        loss_of(alone(whole)).backward()
        norms = [torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01) for model in (ours, alone)]
        torch.testing.assert_close(*norms)
        assert_same_gradients(ours, alone)

    run_ranks(play, 2)
