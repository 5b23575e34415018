"""Uneven inputs: what ranks do for those that have more than others. Ranks are threads."""

from __future__ import annotations

from typing import Any

import pytest

import procgroup as dist
from procgroup.testing import RanksFailed, run_ranks

torch = pytest.importorskip("torch")

from parallel import models  # noqa: E402 - it needs torch
from parallel.models import assert_same_gradients, batch, loss_of, part, wrap  # noqa: E402
from torch import nn  # noqa: E402

from procgroup.errors import BackwardFailed, InputsExhausted, RanksApart  # noqa: E402
from procgroup.parallel import Join, Joinable, JoinHook  # noqa: E402

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("average_early")]

COUNTS = (7, 5, 6)
SIZE = len(COUNTS)


def optimizer_of(model: nn.Module) -> Any:
    return torch.optim.SGD(model.parameters(), lr=0.1)


@pytest.mark.parametrize("by_all", [True, False], ids=["divided by all", "divided by those that train"])
@pytest.mark.parametrize("cap", [0.00001, 25])
def test_uneven_inputs_train_to_the_end_as_one_process_would(by_all: bool, cap: float) -> None:
    def play() -> None:
        ours, alone = wrap(models.perceptron, bucket_cap_mb=cap)
        rank = dist.get_rank()
        mine, other = optimizer_of(ours), optimizer_of(alone)
        with ours.join(divide_by_initial_world_size=by_all):
            for step in range(max(COUNTS)):
                active = [rank for rank in range(SIZE) if step < COUNTS[rank]]
                whole = batch(step)
                other.zero_grad()
                for each in active:
                    (loss_of(alone(part(whole, each))) / (SIZE if by_all else len(active))).backward()
                other.step()
                if rank in active:
                    mine.zero_grad()
                    loss_of(ours(part(whole))).backward()
                    assert_same_gradients(ours, alone, step)
                    mine.step()
        for one, another in zip(ours.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(one, another)
            assert (one.grad is None) == (COUNTS[rank] < max(COUNTS)), "what answers drops its gradients"
        # And all go on together.
        whole = batch(9)
        for model, inputs in ((ours, part(whole)), (alone, whole)):
            model.zero_grad()
            loss_of(model(inputs)).backward()
        assert_same_gradients(ours, alone, "after join")

    run_ranks(play, SIZE)


@pytest.mark.parametrize("counts", [(0, 2, 1), (1, 1, 1), (3, 0, 0), (2, 1, 0)])
def test_buffers_and_rounds_are_answered_whoever_joins_first(counts: tuple[int, ...]) -> None:
    def play() -> list[float]:
        ours, _ = wrap(models.Normed)
        optimizer = optimizer_of(ours)
        with ours.join():
            for step in range(counts[dist.get_rank()]):
                optimizer.zero_grad()
                with ours.no_sync():
                    loss_of(ours(part(batch(step)))).backward()
                loss = loss_of(ours(part(batch(step)))) + loss_of(ours(part(batch(step + 1))))
                loss.backward()
                optimizer.step()
        return [value.sum().item() for value in ours.state_dict().values()]

    first, *others = run_ranks(play, SIZE)
    for other in others:
        assert other == first


def test_ranks_that_end_without_synchronising_go_on_with_the_others() -> None:
    def play() -> list[list[float]]:
        ours, _ = wrap(models.Normed)
        with ours.join():
            for step in range(dist.get_rank() + 1):
                with ours.no_sync():
                    loss_of(ours(part(batch(step)))).backward()
                if dist.get_rank():
                    loss_of(ours(part(batch(step)))).backward()
        ours.zero_grad()
        loss_of(ours(part(batch(9)))).backward()
        return [parameter.grad.flatten().tolist() for parameter in ours.parameters()]

    first, second = run_ranks(play, 2)
    assert first == second


@pytest.mark.parametrize("by_all", [True, False], ids=["divided by all", "divided by those that train"])
def test_unused_and_sparse_parameters_are_answered_too(by_all: bool) -> None:
    class Words(models.Branches):
        def __init__(self) -> None:
            super().__init__()
            self.words = nn.Embedding(9, models.WIDTH, sparse=True)

        def forward(self, tokens: Any, branch: int) -> Any:
            return super().forward(self.words(tokens), branch)

    def play() -> None:
        ours, alone = wrap(Words)
        tokens = [torch.tensor([rank, 3, 8]) for rank in range(SIZE)]
        with ours.join(divide_by_initial_world_size=by_all):
            for step in range(COUNTS[dist.get_rank()]):
                active = [rank for rank in range(SIZE) if step < COUNTS[rank]]
                for model in (ours, alone):
                    model.zero_grad()
                for each in active:
                    part_of_mean = loss_of(alone(tokens[each], (each + step) % 3)) / (SIZE if by_all else len(active))
                    part_of_mean.backward()
                loss_of(ours(tokens[dist.get_rank()], (dist.get_rank() + step) % 3)).backward()
                assert_same_gradients(ours, alone, step)

    run_ranks(play, SIZE)


@pytest.mark.parametrize("build", [models.perceptron, models.Normed])
def test_all_ranks_can_stop_at_the_same_step(build: Any) -> None:
    def play() -> int:
        ours, _ = wrap(build)
        done = 0
        with (
            pytest.raises(InputsExhausted, match="exhausted inputs") as caught,
            ours.join(throw_on_early_termination=True),
        ):
            for step in range(COUNTS[dist.get_rank()]):
                loss_of(ours(part(batch(step)))).backward()
                done += 1
        assert caught.value.ranks == (1,)
        loss_of(ours(part(batch(0)))).backward()  # the group and the model can be used
        return done

    assert run_ranks(play, SIZE) == [5, 5, 5]


def test_even_inputs_stop_nobody() -> None:
    def play() -> int:
        ours, _ = wrap(models.perceptron)
        done = 0
        with ours.join(throw_on_early_termination=True):
            for step in range(3):
                loss_of(ours(part(batch(step)))).backward()
                done += 1
        with ours.join(enable=False):
            loss_of(ours(part(batch(0)))).backward()
        return done

    assert run_ranks(play, 2) == [3, 3]


def test_ranks_that_go_apart_inside_of_join_are_named() -> None:
    def play() -> None:
        ours, _ = wrap(models.Normed)
        with pytest.raises(RanksApart, match=r"rank 0 is in a forward.*rank 1 is in a backward") as caught, ours.join():
            loss = loss_of(ours(part(batch(0))))
            if dist.get_rank() == 0:
                ours(part(batch(1)))
            loss.backward()
        assert sorted(caught.value.places) == [0, 1]

    run_ranks(play, 2)


def test_join_inside_of_join_is_refused() -> None:
    def play() -> None:
        ours, _ = wrap(models.perceptron)
        with ours.join(), pytest.raises(RuntimeError, match="inside of join"), ours.join():
            pass

    run_ranks(play, 1)


@pytest.mark.parametrize("early", [0, 1 << 40], ids=["beside the backward", "at its end"])
def test_a_rank_whose_last_backward_failed_joins_with_the_others_told(
    early: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("procgroup.parallel.ddp.reducer.EARLY_BYTES", early)

    def play() -> list[str]:
        ours, _ = wrap(models.Fragile, bucket_cap_mb=0.00001)
        failed = []
        with ours.join():
            for step in range(COUNTS[dist.get_rank()]):
                try:
                    loss_of(ours(part(batch(step)), step == 4 and dist.get_rank() == 1)).backward()
                except (KeyError, BackwardFailed) as error:
                    failed.append(f"{step} {type(error).__name__}")
        return failed

    assert run_ranks(play, SIZE) == [["4 BackwardFailed"], ["4 KeyError"], ["4 BackwardFailed"]]


def test_an_error_inside_of_join_is_raised_at_once() -> None:
    def play() -> None:
        ours, _ = wrap(models.perceptron)
        with ours.join():
            if dist.get_rank() == 1:
                raise LookupError("a mistake")
            for step in range(3):
                loss_of(ours(part(batch(step)))).backward()

    with pytest.raises(RanksFailed) as caught:
        run_ranks(play, 2)
    assert isinstance(caught.value.errors[1], LookupError) and isinstance(caught.value.errors[0], dist.PeerFailed)


class Shards(Joinable):
    """An optimizer of which each rank has a part: its step is a collective."""

    def __init__(self, model: nn.Module) -> None:
        self.parameters = list(model.parameters())
        self.steps, self.ends, self.times_left = 0, [], 0

    def step(self) -> None:
        Join.notify_join_context(self)
        self.share([parameter.grad for parameter in self.parameters])

    def share(self, gradients: list[Any]) -> None:
        self.steps += 1
        for index, (parameter, gradient) in enumerate(zip(self.parameters, gradients, strict=True)):
            owner = index % SIZE
            if owner == dist.get_rank() and gradient is not None:
                parameter.data -= 0.1 * gradient
            dist.broadcast(parameter.data, owner)

    def join_hook(self, **kwargs: Any) -> JoinHook:
        assert kwargs == {"divide_by_initial_world_size": False}
        return ShardsHook(self)

    @property
    def join_process_group(self) -> Any:
        return dist.group.WORLD


class ShardsHook(JoinHook):
    def __init__(self, shards: Shards) -> None:
        self.shards = shards

    def main_hook(self) -> None:
        self.shards.share([None] * len(self.shards.parameters))

    def post_hook(self, is_last_joiner: bool) -> None:
        self.shards.ends.append(is_last_joiner)

    def leave(self) -> None:
        self.shards.times_left += 1


def test_several_join_together_in_whatever_order_they_are_called() -> None:
    def play() -> tuple[int, list[bool], list[float]]:
        first, _ = wrap(models.Normed, process_group=dist.group.WORLD)
        second, second_alone = wrap(models.perceptron)
        shards = Shards(first)
        with Join([first, second, shards], divide_by_initial_world_size=False):
            for step in range(COUNTS[dist.get_rank()]):
                whole = batch(step)
                active = [rank for rank in range(SIZE) if step < COUNTS[rank]]
                second_alone.zero_grad()
                for each in active:
                    (loss_of(second_alone(part(whole, each))) / len(active)).backward()
                for model in (first, second) if step % 2 else (second, first):
                    model.zero_grad()
                    loss_of(model(part(whole))).backward()
                assert_same_gradients(second, second_alone, step)
                if step % 3:
                    shards.step()
        assert shards.times_left == 1
        return shards.steps, shards.ends, [value.sum().item() for value in first.state_dict().values()]

    results = run_ranks(play, SIZE)
    assert [steps for steps, _, _ in results] == [4, 4, 4]  # also where the inputs were at their end
    assert [ends for _, ends, _ in results] == [[True], [False], [False]]
    assert results[1][2] == results[0][2] == results[2][2]


def test_what_join_takes_is_checked() -> None:
    def play() -> None:
        ours, _ = wrap(models.perceptron)
        other, _ = wrap(models.perceptron, process_group=dist.new_group([0]))
        with pytest.raises(ValueError, match="at least one joinable"):
            Join([])
        with pytest.raises(ValueError, match="multiple process groups"):
            Join([ours, other])
        with pytest.raises(ValueError, match=r"takes 31 joinables at most, got 32"):
            Join([ours] * 32)
        with Join([ours], enable=False):
            Join.notify_join_context(ours)
            loss_of(ours(part(batch(0)))).backward()

    run_ranks(play, 1)


def test_ranks_that_announce_different_joinables_are_named() -> None:
    def play() -> None:
        first, _ = wrap(models.perceptron)
        second, _ = wrap(models.perceptron)
        words = r"rank 0 is in a backward of joinable 0, a Dist.*rank 1 is in a backward of joinable 1"
        with pytest.raises(RanksApart, match=words), Join([first, second]):
            loss_of((first, second)[dist.get_rank()](part(batch(0)))).backward()

    run_ranks(play, 2)
