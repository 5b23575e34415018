"""DistributedDataParallel gives the gradients of one process that sees the whole batch. Ranks are threads."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest

import procgroup as dist
from procgroup.testing import run_ranks

torch = pytest.importorskip("torch")

from parallel import models  # noqa: E402 - it needs torch
from parallel.models import assert_same_gradients, batch, loss_of, mean_of_ranks, part, wrap  # noqa: E402
from torch import nn  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

from procgroup.parallel import DistributedDataParallel, GradBucket  # noqa: E402

pytestmark = pytest.mark.torch

STEPS = 4
sizes_of_single_gradients = pytest.mark.parametrize("single", [1, 1 << 20], ids=["large", "small"])
both_transports = pytest.mark.parametrize("transport", ["shm", "tcp"])


@pytest.fixture(autouse=True, params=[0, 1 << 40], ids=["beside the backward", "at its end"])
def early_bytes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Models of tests are small: choose when they are averaged."""
    torch.set_num_threads(1)
    monkeypatch.setattr("procgroup.parallel.reducer.EARLY_BYTES", request.param)


def train(ours: nn.Module, alone: nn.Module, steps: int = STEPS) -> None:
    """Train both and compare the gradients of every step."""
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9) for model in (ours, alone)]
    for step in range(steps):
        for optimizer in optimizers:
            optimizer.zero_grad()
        whole = batch(step)
        loss_of(ours(part(whole))).backward()
        loss_of(alone(whole)).backward()
        assert_same_gradients(ours, alone, step)
        for optimizer in optimizers:
            optimizer.step()


@both_transports
@pytest.mark.parametrize("size", [1, 2, 3, 4, 7])
def test_gradients_are_those_of_the_whole_batch(size: int, transport: str) -> None:
    run_ranks(lambda: train(*wrap(models.perceptron)), size, transport=transport)


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
    monkeypatch.setattr("procgroup.parallel.division.SINGLE_BYTES", 300)

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
        before = [place.name for bucket in ours._reducer.buckets for place in bucket.places]
        train(ours, alone)
        return before, [place.name for bucket in ours._reducer.buckets for place in bucket.places]

    before, after = run_ranks(play, 2)[1]
    assert before == ["first.bias", "first.weight", "last.bias", "last.weight"]
    assert {*after[:2]} == {"last.bias", "last.weight"} and {*after[2:]} == {"first.bias", "first.weight"}


@pytest.mark.parametrize("size", [2, 3])
@sizes_of_single_gradients
def test_parameters_that_some_ranks_do_not_use_need_no_flag(
    size: int, single: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("procgroup.parallel.division.SINGLE_BYTES", single)

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
        for step in (0, 1):  # at the second step gradients are divided anew
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


@sizes_of_single_gradients
def test_no_sync_adds_up_and_the_next_step_averages_all(single: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("procgroup.parallel.division.SINGLE_BYTES", single)

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


@pytest.mark.parametrize("set_to_none", [False, None], ids=["zeroed", "kept"])
@sizes_of_single_gradients
def test_gradients_that_stay_add_up(set_to_none: bool | None, single: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("procgroup.parallel.division.SINGLE_BYTES", single)

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


def test_state_has_the_prefix_of_torch_and_loads_back() -> None:
    def play() -> None:
        ours, alone = wrap(models.perceptron)
        state = copy.deepcopy(ours.state_dict())
        assert list(state) == [f"module.{name}" for name in alone.state_dict()]
        train(ours, alone)
        assert not torch.equal(ours.module[0].weight, state["module.0.weight"])
        ours.load_state_dict(state)
        for name, value in ours.state_dict().items():
            assert torch.equal(value, state[name]), name
        alone.load_state_dict({name.removeprefix("module."): value for name, value in state.items()})
        train(ours, alone)

    run_ranks(play, 2)


def test_copies_train_on_their_own() -> None:
    def play() -> None:
        ours, alone = wrap(models.perceptron)
        train(ours, alone)
        twin = copy.deepcopy(ours)
        other = copy.deepcopy(alone)
        ours.zero_grad()
        train(twin, other)
        assert all(parameter.grad is None for parameter in ours.parameters())
        group = dist.new_group([0, 1])
        mine = DistributedDataParallel(models.make(models.perceptron), process_group=group)
        assert copy.deepcopy(mine).process_group is group
        with pytest.raises(RuntimeError, match="default process group"):
            pickle.dumps(mine)
        train(pickle.loads(pickle.dumps(ours)), copy.deepcopy(alone))

    run_ranks(play, 2)


def is_shared(tensor: Any) -> bool:
    """Tell whether a tensor lies in memory that processes share."""
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


def test_a_wrapper_that_is_gone_leaves_the_module_alone() -> None:
    def play() -> None:
        ours, alone = wrap(models.perceptron)
        train(ours, alone, steps=2)
        module = ours.module
        del ours
        assert not any(parameter._post_accumulate_grad_hooks for parameter in module.parameters())
        if dist.get_rank() == 0:
            for model in (module, alone):
                model.zero_grad()
                loss_of(model(part(batch(0)))).backward()
            assert_same_gradients(module, alone)

    run_ranks(play, 2)


def test_a_hook_averages_the_buckets() -> None:
    def play() -> None:
        ours, alone = wrap(models.perceptron, bucket_cap_mb=0.0001)
        seen: list[tuple[int, bool, int]] = []

        def hook(state: Any, bucket: GradBucket) -> Any:
            assert state == "state"
            for gradient, parameter in zip(bucket.gradients(), bucket.parameters(), strict=True):
                assert gradient.shape == parameter.shape
            seen.append((bucket.index(), bucket.is_last(), bucket.buffer().numel()))
            work = dist.all_reduce(bucket.buffer().div_(dist.get_world_size()), async_op=True)
            assert work is not None
            return work.get_future().then(lambda future: future.value()[0])

        ours.register_comm_hook("state", hook)
        train(ours, alone)
        count = len(ours._reducer.buckets)
        assert [index for index, _, _ in seen[-count:]] == list(range(count)) and seen[-1][1] and count > 1

    run_ranks(play, 3)


def test_a_hook_may_answer_with_another_tensor_in_a_future_of_torch() -> None:
    def play() -> None:
        ours, alone = wrap(models.perceptron)

        def hook(_state: Any, bucket: GradBucket) -> Any:
            halves = bucket.buffer() / dist.get_world_size()
            bucket.set_buffer(halves)
            dist.all_reduce(bucket.buffer())
            future: Any = torch.futures.Future()
            future.set_result(bucket.buffer())
            return future

        ours.register_comm_hook(None, hook)
        train(ours, alone)
        train(copy.deepcopy(ours), copy.deepcopy(alone))

    run_ranks(play, 2)


def test_a_hook_may_answer_with_the_future_of_a_call_whose_value_is_a_list() -> None:
    def play() -> None:
        ours, alone = wrap(models.perceptron)

        def hook(_state: Any, bucket: GradBucket) -> Any:
            work = dist.all_reduce(bucket.buffer(), dist.ReduceOp.AVG, async_op=True)
            assert work is not None
            return work.get_future()

        ours.register_comm_hook(None, hook)
        train(ours, alone)

    run_ranks(play, 2)


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


def test_extra_memory_is_one_bucket_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of gradients, no more is alive at any moment than the buckets and what one of them holds."""
    monkeypatch.setattr("procgroup.parallel.reducer.EARLY_BYTES", 1 << 20)

    def play() -> int:
        layers = [nn.Linear(100, 100, bias=False) for _ in range(24)]
        ours, _ = wrap(lambda: nn.Sequential(*layers), bucket_cap_mb=0.5)
        apart: list[int] = []
        for layer in ours.module:
            layer.weight.register_hook(lambda gradient: apart.append(count_apart()))

        def count_apart() -> int:
            places = [place for bucket in ours._reducer.buckets for place in bucket.places]
            return sum(place.parameter.grad is not None and place.parameter.grad is not place.view for place in places)

        for _ in range(3):
            ours.zero_grad()
            apart.clear()
            ours(torch.ones(2, 100, dtype=torch.float64)).sum().backward()
        return max(apart)

    layer_bytes = 100 * 100 * 8
    assert all(apart * layer_bytes <= 0.5 * 2**20 + layer_bytes for apart in run_ranks(play, 2))
