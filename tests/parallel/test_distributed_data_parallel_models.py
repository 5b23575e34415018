"""Models that change after they were wrapped, and what else a program does with them. Ranks are threads."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest

import procgroup as dist
from procgroup.testing import run_ranks

torch = pytest.importorskip("torch")

from parallel import models  # noqa: E402 - it needs torch
from parallel.models import assert_same_gradients, batch, loss_of, part, wrap  # noqa: E402
from torch import nn  # noqa: E402

from procgroup.parallel import DistributedDataParallel  # noqa: E402
from procgroup.parallel.ddp.backward import find_tensors  # noqa: E402

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("average_early")]


def train(ours: Any, alone: nn.Module, steps: int = 3) -> None:
    for step in range(steps):
        whole = batch(step)
        for model, inputs in ((ours, part(whole)), (alone, whole)):
            model.zero_grad()
            loss_of(model(inputs)).backward()
        assert_same_gradients(ours, alone, step)


def unfreeze(model: Any) -> None:
    model[0].requires_grad_(True)


def replace(model: Any) -> None:
    model[0].weight = nn.Parameter(torch.ones_like(model[0].weight))


def add(model: Any) -> None:
    model[0].scale = nn.Parameter(torch.ones(()))


def adapt(model: Any) -> None:
    model[2] = nn.Sequential(nn.Linear(9, 7).double(), nn.Tanh())


def add_where_there_is_none(model: Any) -> None:
    model[1].scale = nn.Parameter(torch.ones(()))


def add_a_part(model: Any) -> None:
    model[0].adapter = nn.Linear(2, 2)


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (unfreeze, "0.weight"),
        (replace, "0.weight"),
        (add, "0.scale"),
        (add_where_there_is_none, "1.scale"),
        (add_a_part, "0.adapter.weight"),
        (adapt, "2.0.weight"),
    ],
)
def test_a_parameter_that_nobody_would_average_is_refused_in_words(change: Any, name: str) -> None:
    def play() -> None:
        model: Any = models.make(models.perceptron)
        model[0].requires_grad_(change is not unfreeze)
        ours = DistributedDataParallel(model)
        loss_of(ours(part(batch(0)))).backward()
        change(model)
        with pytest.raises(RuntimeError, match=rf"{name} .*each rank would train it by itself\. Wrap the module again"):
            ours(part(batch(1)))
        with torch.no_grad():
            ours(part(batch(1)))
        DistributedDataParallel(model)(part(batch(1)))

    run_ranks(play, 2)


def test_parameters_can_be_frozen_for_a_while() -> None:
    def play() -> None:
        ours, alone = wrap(models.perceptron)
        for frozen in (False, True, False, True, True, False):
            for model in (ours.module, alone):
                model[0].requires_grad_(not frozen)
            train(ours, alone, 1)
            assert (ours.module[0].weight.grad is None) == frozen
        # Averaged beside the backward as before.
        hooks = [slot.parameter._post_accumulate_grad_hooks for slot in ours._reducer._slots]
        assert all(len(hook) == 1 for hook in hooks)

    run_ranks(play, 2)


def test_a_sparse_gradient_to_which_no_rank_adds_is_not_sent_again() -> None:
    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.layer = nn.Embedding(9, 3, sparse=True), nn.Linear(models.WIDTH, 3)

        def forward(self, inputs: torch.Tensor, tokens: list[int]) -> torch.Tensor:
            hidden = self.layer(inputs)
            return hidden + self.words(torch.tensor(tokens)).sum() if tokens else hidden  # type: ignore[no-any-return]

    def play() -> None:
        ours, _ = wrap(Words)
        loss_of(ours(part(batch(0)), [dist.get_rank()])).backward()
        kept = ours.module.words.weight.grad
        for step in (1, 2):
            loss_of(ours(part(batch(step)), [])).backward()
            assert ours.module.words.weight.grad is kept

    run_ranks(play, 2)


def test_a_model_that_is_frozen_as_a_whole_lets_gradients_through_and_averages_nothing() -> None:
    def play() -> None:
        judge, judge_alone = wrap(lambda: nn.Linear(models.WIDTH, 1))
        maker, maker_alone = wrap(lambda: nn.Linear(models.WIDTH, models.WIDTH))
        train(judge, judge_alone)
        calls: list[Any] = []
        judge.register_comm_hook(None, lambda state, bucket: calls.append(bucket))
        for model in (judge, judge_alone):
            model.requires_grad_(False)
        for step in range(3):
            for models_, inputs in (((maker, judge), part(batch(step))), ((maker_alone, judge_alone), batch(step))):
                models_[0].zero_grad()
                loss_of(models_[1](models_[0](inputs))).backward()
            assert_same_gradients(maker, maker_alone, step)
        assert calls == []

    run_ranks(play, 2)


class Masked(nn.Module):
    """Its backward needs the mask as it was."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(models.WIDTH, 2)
        self.register_buffer("mask", torch.tensor([1.0, 0.5]))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.layer(inputs) * self.mask  # type: ignore[operator, no-any-return]


def test_buffers_that_stay_the_same_do_not_forbid_two_forwards() -> None:
    def play() -> None:
        ours, alone = wrap(Masked)
        for model, pick in ((ours, part), (alone, lambda whole: whole)):
            (loss_of(model(pick(batch(0)))) + loss_of(model(pick(batch(1))))).backward()
        assert_same_gradients(ours, alone)
        with torch.no_grad():
            ours.module.mask += dist.get_rank()
        ours(part(batch(2)))
        assert ours.module.mask.tolist() == [1.0, 0.5]

    run_ranks(play, 2)


def test_buffers_may_come_and_go() -> None:
    class Lazy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(models.WIDTH, 2)
            self.register_buffer("first", torch.ones(3))
            self.register_buffer("later", None)

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            if self.later is None:
                self.later = torch.full((2,), float(dist.get_rank()))
            else:
                self.first = None
            return self.layer(inputs)  # type: ignore[no-any-return]

    def play() -> list[float]:
        ours, _ = wrap(Lazy)
        for step in range(4):
            loss_of(ours(part(batch(step)))).backward()
        return ours.module.later.tolist()  # type: ignore[no-any-return]

    assert run_ranks(play, 2) == [[0.0, 0.0], [0.0, 0.0]]


def test_buffers_of_parts_that_came_later_are_those_of_rank_0() -> None:
    def play() -> list[float]:
        ours, _ = wrap(models.perceptron)
        loss_of(ours(part(batch(0)))).backward()
        ours.module[1] = models.make(lambda: nn.BatchNorm1d(9, affine=False))
        for step in range(2):
            loss_of(ours(part(batch(step)))).backward()
        ours(part(batch(2)))
        return ours.module[1].running_mean.tolist()  # type: ignore[no-any-return]

    first, second = run_ranks(play, 2)
    assert first != second  # each rank's own batch

    def show() -> list[float]:
        ours, _ = wrap(models.perceptron)
        ours.module[1] = models.make(lambda: nn.BatchNorm1d(9, affine=False))
        ours.module[1].running_mean += dist.get_rank()
        ours.module[1].eval()
        ours(part(batch(2)))
        return ours.module[1].running_mean.tolist()  # type: ignore[no-any-return]

    assert run_ranks(show, 2) == [[0.0] * 9] * 2


def test_the_first_forward_may_be_in_inference_mode() -> None:
    def play() -> None:
        ours, alone = wrap(Masked)
        with torch.inference_mode():
            ours(part(batch(0)))
        train(ours, alone)

    run_ranks(play, 2)


@pytest.mark.parametrize("calls_backward", [True, False])
def test_a_module_that_keeps_its_output_does_not_keep_its_wrapper(calls_backward: bool) -> None:
    class Keeping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(models.WIDTH, 2)

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            self.output = self.layer(inputs)
            return self.output  # type: ignore[no-any-return]

    def play() -> None:
        ours, _ = wrap(Keeping)
        loss = loss_of(ours(part(batch(0))))
        if calls_backward:
            loss.backward()
        gone = weakref.ref(ours)
        del ours, loss
        gc.collect()
        assert gone() is None

    run_ranks(play, 2)


def test_an_output_of_objects_that_point_at_each_other_is_looked_at_once() -> None:
    class Node:
        def __init__(self) -> None:
            self.first = self.second = self
            self.found: Any = None

    class Answers(nn.Linear):
        def forward(self, inputs: torch.Tensor) -> Any:
            one, other = Node(), Node()
            one.first = one.second = other
            other.first = other.second = one
            other.found = super().forward(inputs)
            return one

    def play() -> None:
        ours, alone = wrap(lambda: Answers(models.WIDTH, 2))
        for model, inputs in ((ours, part(batch(0))), (alone, batch(0))):
            output = model(inputs)
            assert list(find_tensors(output)) == [output.first.found]
            loss_of(output.first.found).backward()
        assert_same_gradients(ours, alone)

    run_ranks(play, 2)


def test_a_module_of_empty_parameters_and_one_element_trains() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.empty, self.hollow = nn.Parameter(torch.empty(0)), nn.Parameter(torch.empty(3, 0))
            self.layer, self.one = nn.Linear(models.WIDTH, 2), nn.Parameter(torch.tensor(2.0))

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            return self.layer(inputs) * self.one + self.empty.sum() + self.hollow.sum()  # type: ignore[no-any-return]

    for cap in (None, 0.0, 0.00001):
        run_ranks(lambda cap=cap: train(*wrap(Odd, bucket_cap_mb=cap)), 2)  # type: ignore[misc]


def test_what_functional_call_puts_in_a_parameters_place_is_taken() -> None:
    def play() -> None:
        ours, alone = wrap(lambda: nn.Linear(models.WIDTH, 2))
        replaced = ours.module.weight.detach() * 2
        replaced.requires_grad_()
        for model, prefix, inputs in ((ours, "module.", part(batch(0))), (alone, "", batch(0))):
            output = torch.func.functional_call(model, {f"{prefix}weight": replaced}, (inputs,))
            loss_of(output).backward()
        assert_same_gradients(ours, alone)  # that of the bias; nobody averages the other

    run_ranks(play, 2)


def test_a_graph_that_is_kept_is_averaged_in_each_backward() -> None:
    def play() -> float:
        ours, _ = wrap(lambda: nn.Linear(1, 1, bias=False))
        loss = ours(torch.full((1, 1), float(dist.get_rank()), dtype=torch.float64)).sum()
        loss.backward(retain_graph=True)
        loss.backward()
        return ours.module.weight.grad.item()  # type: ignore[no-any-return]

    assert run_ranks(play, 2) == [1.0, 1.0]


@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # Dynamo looks at it
@pytest.mark.parametrize("is_whole_step", [False, True], ids=["the model", "the step"])
def test_torch_compile_takes_the_module_and_leaves_the_calls(is_whole_step: bool) -> None:
    def step(model: Any, inputs: torch.Tensor) -> None:
        loss_of(model(inputs)).backward()

    def play() -> None:
        ours, alone = wrap(models.Normed)
        ours.eval(), alone.eval()
        whole_step = torch.compile(step, backend="aot_eager") if is_whole_step else step
        taken = ours if is_whole_step else torch.compile(ours, backend="aot_eager")
        for number in range(3):
            whole = batch(number)
            ours.zero_grad(), alone.zero_grad()
            whole_step(taken, part(whole))
            loss_of(alone(whole)).backward()
            assert_same_gradients(ours, alone, number)

    run_ranks(play, 1)
    torch.compiler.reset()


def test_optimizers_that_parameters_have_in_backward_step_with_the_average() -> None:
    optim = pytest.importorskip("torch.distributed.optim")

    def play() -> list[float]:
        model = models.make(lambda: nn.Linear(2, 1, bias=False))
        nn.init.ones_(model.weight)
        optim._apply_optimizer_in_backward(torch.optim.SGD, model.parameters(), {"lr": 0.5})
        ours = DistributedDataParallel(model)
        inputs = torch.full((1, 2), float(dist.get_rank()), dtype=torch.float64)
        with ours.no_sync():
            ours(inputs).sum().backward()
        for _ in range(2):
            ours(inputs).sum().backward()
            assert model.weight.grad is None
        return model.weight[0].tolist()  # type: ignore[no-any-return]

    assert run_ranks(play, 2) == [[0.25, 0.25], [0.25, 0.25]]  # 1 - 0.5 * 1, then - 0.5 * 0.5


def test_a_fused_optimizer_steps_in_the_backward() -> None:
    def play() -> None:
        ours, alone = wrap(models.perceptron)
        ours._register_fused_optim(torch.optim.SGD, 0.1, optim_params=ours.module[0].parameters(), momentum=0.9)
        other = torch.optim.SGD(alone[0].parameters(), 0.1, momentum=0.9)
        for step in range(3):
            train(ours, alone, 1)
            other.step()
            for one, another in zip(ours.parameters(), alone.parameters(), strict=True):
                torch.testing.assert_close(one, another, msg=str(step))

    run_ranks(play, 2)


def test_private_names_of_torch_do_what_they_do_there() -> None:
    def play() -> None:
        ours, alone = wrap(models.perceptron, bucket_cap_mb=0.00001)
        assert ours.broadcast_buffers is ours.forward_sync_buffers is True
        ours.broadcast_buffers = False
        assert not ours.forward_sync_buffers and ours.device_ids is ours.output_device is None
        ours._set_static_graph()
        with pytest.warns(UserWarning, match="no need to set it again"):
            ours._set_static_graph()
        train(ours, alone)
        data = ours._get_ddp_logging_data()
        assert (data["world_size"], data["rank"], data["static_graph"]) == (2, dist.get_rank(), 1)
        assert data["module_name"] == "Sequential" and data["dtypes"] == "float64"
        assert data["total_parameter_size_bytes"] == sum(each.nbytes for each in alone.parameters())

    run_ranks(play, 2)


def test_a_graph_cannot_become_static_once_training_has_begun() -> None:
    def play() -> None:
        ours, alone = wrap(models.perceptron)
        train(ours, alone, 1)
        with pytest.raises(RuntimeError, match="should be called before training loop starts"):
            ours._set_static_graph()
        assert not ours.static_graph

    run_ranks(play, 2)


@pytest.mark.parametrize(("name", "tolerance"), [("ALLREDUCE", 0.0), ("FP16_COMPRESS", 0.01)])
def test_built_in_hooks_of_torch_are_taken_by_name(name: str, tolerance: float) -> None:
    def play() -> None:
        ours, alone = wrap(models.perceptron)
        with pytest.raises(ValueError, match="ALLREDUCE, FP16_COMPRESS"):
            ours._register_builtin_comm_hook("OTHER")
        ours._register_builtin_comm_hook(getattr(torch.distributed.BuiltinCommHookType, name))
        loss_of(ours(part(batch(0)))).backward()
        loss_of(alone(batch(0))).backward()
        for one, other in zip(ours.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(one.grad, other.grad, rtol=tolerance, atol=max(tolerance, 1e-12))

    run_ranks(play, 2)
