"""Ranks that train on their own between averages: post-local SGD, and outer steps. Ranks are threads."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest

import procgroup as dist
from procgroup.errors import CollectiveMismatch

torch = pytest.importorskip("torch")

from parallel import models  # noqa: E402 - it needs torch
from parallel.hooks import assert_same_bits, averaged, bits, loss_after, numbers, on_ranks  # noqa: E402
from parallel.models import batch, loss_of, part  # noqa: E402
from torch import nn  # noqa: E402

from procgroup.parallel import DistributedDataParallel  # noqa: E402
from procgroup.parallel.communication_hooks import (  # noqa: E402
    OuterSteps,
    PeriodicModelAverager,
    PostLocalSGDOptimizer,
    PostLocalSGDState,
    post_localSGD_hook,
)

pytestmark = pytest.mark.torch


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def loss_without_hook() -> float:
    return loss_after(121)


def flat(model: nn.Module) -> torch.Tensor:
    return torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()])


def pairs() -> Any:
    """Return this rank's group of two."""
    return dist.new_subgroups(2)[0]


def test_gradients_are_those_of_all_ranks_then_of_the_subgroup() -> None:
    parts = [numbers(rank, 50) for rank in range(4)]

    def play(rank: int) -> list[torch.Tensor]:
        state = PostLocalSGDState(None, pairs(), 2)
        return [averaged(post_localSGD_hook, state, parts[rank].clone()) for _ in range(4)]

    ranks = on_ranks(4, play)
    exact = torch.stack(parts).double()
    for rank, results in enumerate(ranks):
        first = rank // 2 * 2
        for result, mean in zip(results, [exact.mean(0)] * 2 + [exact[first : first + 2].mean(0)] * 2, strict=True):
            torch.testing.assert_close(result.double(), mean, rtol=1e-5, atol=1e-6)
    assert_same_bits([results[0] for results in ranks])
    assert_same_bits([results[3] for results in ranks[:2]])


@pytest.mark.parametrize("hosts", ["abab", "aaab", "aaaa"])
def test_the_subgroup_is_by_default_that_of_the_ranks_of_one_host(hosts: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name = "procgroup.parallel.communication_hooks.local_steps.gethostname"
    monkeypatch.setattr(name, lambda: hosts[dist.get_rank()])
    parts = [numbers(rank, 50) for rank in range(4)]

    def play(rank: int) -> torch.Tensor:
        state = PostLocalSGDState(None, None, 1)
        results = [averaged(post_localSGD_hook, state, parts[rank].clone()) for _ in range(3)]
        assert bits(results[1]) == bits(results[2])
        for again in (pickle.loads(pickle.dumps(state)), copy.deepcopy(state)):
            assert bits(averaged(post_localSGD_hook, again, parts[rank].clone())) == bits(results[1])
        return results[1]

    for rank, result in enumerate(on_ranks(4, play)):
        mean = torch.stack([parts[other] for other in range(4) if hosts[other] == hosts[rank]]).double().mean(0)
        torch.testing.assert_close(result.double(), mean, rtol=1e-5, atol=1e-6)


def test_without_gradient_allreduce_gradients_stay_this_ranks_own() -> None:
    def play(rank: int) -> None:
        state = PostLocalSGDState(None, None, 1, False)
        results = [averaged(post_localSGD_hook, state, numbers(rank, 50)) for _ in range(3)]
        assert [bits(result) == bits(numbers(rank, 50)) for result in results] == [False, True, True]
        assert state.iter == 3

    on_ranks(2, play)


def test_an_averager_averages_every_period_after_its_warm_up() -> None:
    def play(rank: int) -> list[torch.Tensor]:
        model = nn.ParameterList([nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(2, 2, dtype=torch.float64))])
        groups = torch.optim.SGD(model.parameters(), lr=0.1).param_groups
        averager, seen = PeriodicModelAverager(3, warmup_steps=2), []
        for step in range(9):
            with torch.no_grad():
                for parameter in model:
                    parameter.fill_(10 * step + rank)
            averager.average_parameters(groups if step % 2 else model.parameters())
            seen.append(torch.cat([parameter.detach().double().view(-1) for parameter in model]) - 10 * step)
        return seen

    for rank, seen in enumerate(on_ranks(3, play)):
        assert [result.unique().tolist() for result in seen] == [
            [1.0] if step in (2, 5, 8) else [float(rank)] for step in range(9)
        ]


def test_an_optimizer_that_averages_is_saved_with_its_step() -> None:
    def play(rank: int) -> torch.Tensor:
        model = models.make(models.perceptron, seed=rank)
        optimizer = PostLocalSGDOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), PeriodicModelAverager(2, 1)
        )
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        for step in range(2):
            optimizer.zero_grad()
            loss_of(model(part(batch(step)))).backward()
            optimizer.step()
            schedule.step()
        assert "SGD" in repr(optimizer) and optimizer.state and optimizer.param_groups[0]["lr"] < 0.1
        other = PostLocalSGDOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), PeriodicModelAverager(2, 1))
        other.load_state_dict(optimizer.state_dict())
        assert other.averager.step == 2 and other.param_groups[0]["momentum"] == 0.9
        other.load_state_dict(optimizer.optim.state_dict())  # which warns
        assert other.averager.step == 0
        other.add_param_group({"params": [nn.Parameter(torch.zeros(2))]})
        assert len(other.param_groups) == 2
        assert optimizer.step(lambda: 5.0) == 5.0
        return flat(model)

    with pytest.warns(UserWarning, match="step counter"):  # in one thread: what it changes is common to all
        on_ranks(2, play)


def test_post_local_sgd_comes_as_far(loss_without_hook: float) -> None:
    def averages(_model: nn.Module, optimizer: Any) -> Any:
        return PostLocalSGDOptimizer(optimizer, PeriodicModelAverager(4, 20)).step

    def made() -> Any:
        return PostLocalSGDState(None, pairs(), 20), post_localSGD_hook

    loss = loss_after(121, made, size=4, averages=averages)
    assert loss <= 1.1 * loss_without_hook
    alone = loss_after(
        121, lambda: (PostLocalSGDState(None, None, 20, False), post_localSGD_hook), size=4, averages=averages
    )
    assert alone <= 1.1 * loss_without_hook


@pytest.mark.parametrize("momentum", [0.0, 0.5])
def test_an_outer_step_is_one_of_sgd_with_nesterov_momentum(momentum: float) -> None:
    def play(rank: int) -> torch.Tensor:
        model = models.make(models.perceptron)
        begin = copy.deepcopy(model)
        expected = torch.optim.SGD(begin.parameters(), lr=0.3, momentum=momentum, nesterov=momentum > 0)
        outer = OuterSteps(model.parameters(), every=2, learning_rate=0.3, momentum=momentum)
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(6):
            inner.zero_grad()
            loss_of(model(part(batch(step)))).backward()
            inner.step()
            moved = flat(begin) - flat(model)
            if not outer.step():
                continue
            dist.all_reduce(moved, dist.ReduceOp.AVG)
            sizes = [parameter.numel() for parameter in begin.parameters()]
            for parameter, gradient in zip(begin.parameters(), moved.split(sizes), strict=True):
                parameter.grad = gradient.view_as(parameter)
            expected.step()
            torch.testing.assert_close(flat(model), flat(begin), rtol=1e-12, atol=1e-14)
        assert outer.count == 6
        return flat(model)

    assert_same_bits(on_ranks(3, play))


def test_outer_steps_of_rate_one_without_momentum_average_the_parameters() -> None:
    def play(rank: int) -> None:
        model = models.make(models.perceptron)
        outer = OuterSteps(model.parameters(), every=1, learning_rate=1.0, momentum=0.0)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(rank)
        expected = flat(model)
        dist.all_reduce(expected, dist.ReduceOp.AVG)
        assert outer.step()
        torch.testing.assert_close(flat(model), expected)

    on_ranks(3, play)


def test_outer_steps_come_as_far(loss_without_hook: float) -> None:
    def averages(model: nn.Module, optimizer: Any) -> Callable[[], None]:
        outer = OuterSteps(model.parameters(), every=11)

        def step() -> None:
            optimizer.step()
            outer.step()

        return step

    assert loss_after(121, averages=averages, wraps=False, size=4) <= 1.1 * loss_without_hook


def test_outer_steps_of_islands_that_average_their_gradients() -> None:
    def play(rank: int) -> torch.Tensor:
        model = models.make(models.perceptron)
        ours = DistributedDataParallel(model, process_group=pairs())
        outer, inner = OuterSteps(model.parameters(), every=2), torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(4):
            inner.zero_grad()
            loss_of(ours(part(batch(step)))).backward()
            inner.step()
            outer.step()
        return flat(model)

    assert_same_bits(on_ranks(4, play))


def test_outer_steps_go_on_with_the_same_bits_after_a_restart() -> None:
    def play(rank: int) -> None:
        model = models.make(models.perceptron).bfloat16()
        outer = OuterSteps(model.parameters(), every=2)
        for _ in range(3):
            move(model, rank)
            outer.step()
        other = copy.deepcopy(model)
        restored = OuterSteps([nn.Parameter(torch.zeros_like(one)) for one in other.parameters()], every=2)
        restored.parameters = list(other.parameters())
        restored.load_state_dict(pickle.loads(pickle.dumps(outer.state_dict())))
        for one, steps in ((model, outer), (other, restored)):
            move(one, rank)
            assert steps.step()
        assert bits(flat(model)) == bits(flat(other))
        with pytest.raises(ValueError, match="shapes"):
            OuterSteps([nn.Parameter(torch.zeros(2))], 1).load_state_dict(outer.state_dict())

    on_ranks(2, play)


def move(model: nn.Module, rank: int) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1 + 0.1 * rank)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda rank: OuterSteps([nn.Parameter(torch.full((2,), float(rank)))], 2), "parameters"),
        (lambda rank: OuterSteps([nn.Parameter(torch.zeros(2))], 2 + rank), "every=3"),
        (lambda rank: OuterSteps([nn.Parameter(torch.zeros(2 + rank))], 2), "parameters"),
        (
            lambda rank: averaged(post_localSGD_hook, PostLocalSGDState(None, None, rank, False), torch.ones(2)),
            "iter=1",
        ),
    ],
)
def test_ranks_that_do_not_begin_alike_are_told(make: Callable[[int], Any], words: str) -> None:
    def play(rank: int) -> None:
        with pytest.raises(CollectiveMismatch, match=words):
            make(rank)

    on_ranks(2, play)


REFUSED: list[tuple[Callable[[], Any], str]] = [
    (lambda: PostLocalSGDState(None, None, -1, False), "start_localSGD_iter.*got -1"),
    (lambda: PeriodicModelAverager(0), "period.*got 0"),
    (lambda: PeriodicModelAverager(2, -1), "warmup_steps.*got -1"),
    (lambda: OuterSteps([nn.Parameter(torch.zeros(1))], 0), "every.*got 0"),
    (lambda: OuterSteps([], 2), "got none"),
]


@pytest.mark.parametrize(("call", "words"), REFUSED)
def test_arguments_without_meaning_are_refused(call: Callable[[], Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        call()


def test_a_period_of_one_is_warned_of_as_torch_does() -> None:
    with pytest.warns(UserWarning, match="period=1"):
        PeriodicModelAverager(1)


def test_a_state_with_a_subgroup_keeps_it_in_copies_and_cannot_be_pickled() -> None:
    def play(rank: int) -> None:
        state = PostLocalSGDState(None, pairs(), 3)
        assert copy.deepcopy(state).subgroup is state.subgroup
        with pytest.raises(RuntimeError, match="cannot be pickled"):
            pickle.dumps(state)

    on_ranks(2, play)
