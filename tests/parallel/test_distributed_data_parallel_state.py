"""A wrapped model is saved, loaded, copied and given up as a module of torch. Ranks are threads."""

from __future__ import annotations

import copy
import pickle

import pytest

import procgroup as dist
from procgroup.testing import run_ranks

torch = pytest.importorskip("torch")

from parallel import models  # noqa: E402 - it needs torch
from parallel.models import assert_same_gradients, batch, loss_of, part, train, wrap  # noqa: E402

from procgroup.parallel import DistributedDataParallel  # noqa: E402

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("average_early_or_late")]


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
