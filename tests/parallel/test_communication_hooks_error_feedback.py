"""Hooks that keep what they have not sent: bounds of one step and of many, and what is kept. Ranks are threads."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest

import procgroup as dist
from procgroup.errors import CollectiveMismatch
from procgroup.testing import RanksFailed

torch = pytest.importorskip("torch")

from parallel import models  # noqa: E402 - it needs torch
from parallel.hooks import assert_same_bits, averaged, bits, bucket_of, loss_after, numbers, on_ranks  # noqa: E402
from parallel.models import batch, loss_of, part, wrap  # noqa: E402
from torch import nn  # noqa: E402

from procgroup.parallel.communication_hooks import BlockQuantizedState, TopKState, block_quantized_hook, top_k_hook  # noqa: E402

pytestmark = pytest.mark.torch

STEPS = 120
MADE: dict[str, Callable[..., tuple[Any, Any]]] = {
    "int8": lambda **options: (BlockQuantizedState(block_size=16, **options), block_quantized_hook),
    "top-k": lambda **options: (TopKState(ratio=0.1, **options), top_k_hook),
}
both = pytest.mark.parametrize("make", MADE.values(), ids=list(MADE))


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def loss_without_hook() -> float:
    return loss_after(STEPS)


def largest_in_blocks(values: torch.Tensor, block_size: int) -> torch.Tensor:
    """Return for each element the largest magnitude in its block."""
    padded = nn.functional.pad(values.abs(), (0, -values.numel() % block_size)).view(-1, block_size)
    return padded.amax(1).repeat_interleave(block_size)[: values.numel()]


def bound_of_int8(parts: torch.Tensor, block_size: int) -> torch.Tensor:
    """Return 1 / 254 of the largest magnitudes, averaged over the ranks, twice: a mean is no larger than that."""
    return torch.stack([largest_in_blocks(one, block_size) for one in parts]).mean(0) / 254 * 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e30, 3e37])
@pytest.mark.parametrize(("size", "count"), [(1, 1000), (2, 1), (2, 4096), (3, 1000), (4, 255), (7, 5000)])
def test_int8_rounds_by_a_part_of_the_largest_in_each_block(size: int, count: int, scale: float, dtype: Any) -> None:
    parts = [numbers(rank, count, scale, dtype=dtype) for rank in range(size)]
    results = on_ranks(size, lambda rank: averaged(block_quantized_hook, BlockQuantizedState(), parts[rank]))
    assert_same_bits(results)
    exact = torch.stack(parts).double()
    assert ((results[0].double() - exact.mean(0)).abs() <= bound_of_int8(exact, 256) * 1.0001).all()


@pytest.mark.parametrize("values", [[0.0] * 300, [1e-45] * 300, [1e-40, -3e-41] * 150, [1e38, 1e-38] * 150], ids=str)
def test_int8_of_zeros_and_extremes_stays_inside_its_bound(values: list[float]) -> None:
    mine = torch.tensor(values)
    for result in on_ranks(2, lambda rank: averaged(block_quantized_hook, BlockQuantizedState(), mine)):
        assert ((result - mine).abs() <= mine.abs().max() / 127 * 1.001 + 3e-43).all()


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_with_error_feedback_the_sum_of_int8_averages_stays_by_that_of_the_means(size: int) -> None:
    steps, count, block = 100, 700, 64
    parts = torch.stack(
        [torch.stack([numbers(rank, count, seed=step) for step in range(steps)]) for rank in range(size)]
    )

    def play(rank: int, options: dict[str, Any]) -> list[torch.Tensor]:
        parameters = [nn.Parameter(torch.zeros(count))]
        state = BlockQuantizedState(block_size=block, **options)
        return [averaged(block_quantized_hook, state, mine, parameters=parameters) for mine in parts[rank]]

    kept = torch.stack(on_ranks(size, lambda rank: play(rank, {}))[0]).double()
    error = (kept.cumsum(0) - parts.double().mean(0).cumsum(0)).abs()
    largest = torch.stack([bound_of_int8(parts[:, step].double(), block) for step in range(steps)]).amax(0)
    assert (error <= largest * 1.02).all()
    dropped = torch.stack(on_ranks(size, lambda rank: play(rank, {"use_error_feedback": False}))[0]).double()
    assert (kept.sum(0) - parts.double().mean(0).sum(0)).norm() < (
        dropped.sum(0) - parts.double().mean(0).sum(0)
    ).norm() / 3


def test_int8_sends_a_byte_and_a_part_of_a_scale_per_element_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    def play(rank: int) -> list[int]:
        group = dist.group.WORLD
        assert group is not None
        sent: list[int] = []
        real = group.all_to_all_single
        monkeypatch.setattr(
            group,
            "all_to_all_single",
            lambda out, given, **more: (sent.append(given.numel()), real(out, given, **more))[1],
        )
        averaged(block_quantized_hook, BlockQuantizedState(), torch.ones(4096))
        return sent

    assert on_ranks(2, play) == [[4096 + 16 * 4]] * 2


def test_int8_makes_the_block_of_an_infinity_nan_and_forgets_it() -> None:
    parameters = [nn.Parameter(torch.zeros(64))]

    def play(rank: int) -> tuple[torch.Tensor, torch.Tensor]:
        state = BlockQuantizedState(block_size=16)
        mine = torch.linspace(-1, 1, 64)
        bad = mine.clone()
        bad[20 + 20 * rank] = float("inf")
        return tuple(averaged(block_quantized_hook, state, one, parameters=parameters) for one in (bad, mine))  # type: ignore[return-value]

    for first, second in on_ranks(2, play):
        assert first[16:48].isnan().all() and first[:16].isfinite().all() and first[48:].isfinite().all()
        torch.testing.assert_close(second, torch.linspace(-1, 1, 64), rtol=0, atol=1 / 60)


@pytest.mark.parametrize("ratio", [0.001, 0.05, 0.3, 1.0])
@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e38])
def test_top_k_sends_the_largest_of_each_rank(ratio: float, scale: float) -> None:
    size, count = 3, 999
    parts = [numbers(rank, count, scale) for rank in range(size)]
    parts[0].clamp_(-3e38, 3e38)
    results = on_ranks(size, lambda rank: averaged(top_k_hook, TopKState(ratio=ratio), parts[rank]))
    assert_same_bits(results)
    chosen = max(1, -(-int(ratio * 100000) * count // 100000))
    expected = torch.zeros(count, dtype=torch.float64)
    for mine in parts:
        indices = mine.abs().topk(chosen).indices
        left = mine.double().clone()
        left[indices] = 0
        assert left.norm() ** 2 <= (1 - chosen / count) * mine.double().norm() ** 2
        expected[indices] += mine[indices].double() / size
    torch.testing.assert_close(results[0].double(), expected, rtol=1e-6, atol=1e-6 * scale)


def test_what_top_k_leaves_is_sent_later() -> None:
    steps, size, count = 60, 3, 200
    mean = torch.stack([numbers(rank, count, dtype=torch.float64) for rank in range(size)]).mean(0)

    def play(rank: int) -> torch.Tensor:
        parameters = [nn.Parameter(torch.zeros(count, dtype=torch.float64))]
        state, mine = TopKState(ratio=0.1), numbers(rank, count, dtype=torch.float64)
        sums = [averaged(top_k_hook, state, mine.clone(), parameters=parameters) for _ in range(steps)]
        kept = state._residuals.of(bucket_of(mine, parameters=parameters))
        # Nothing is lost: what was sent and what is kept are the whole.
        total = torch.stack(sums).sum(0)
        dist.all_reduce(kept, dist.ReduceOp.AVG)
        torch.testing.assert_close(total + kept, steps * mean, rtol=1e-12, atol=1e-12)
        return total / steps

    for result in on_ranks(size, play):
        assert (result - mean).norm() <= 0.2 * mean.norm()


def test_a_rank_with_more_nans_than_top_k_sends_makes_the_bucket_nan() -> None:
    def play(rank: int) -> tuple[torch.Tensor, torch.Tensor]:
        mine = torch.ones(40)
        few = mine.clone()
        if rank == 1:
            mine[:5] = float("nan")
            few[:4] = float("nan")
        state = TopKState(ratio=0.1)
        return averaged(top_k_hook, state, mine), averaged(top_k_hook, TopKState(ratio=0.1), few)

    for more, few in on_ranks(2, play):
        assert more.isnan().all() and few.isnan().sum() == 4


@pytest.mark.parametrize(("factor", "name"), [(1.01, "int8"), (1.1, "top-k")])
def test_training_comes_as_far(factor: float, name: str, loss_without_hook: float) -> None:
    assert loss_after(STEPS, MADE[name]) <= factor * loss_without_hook


@both
def test_what_is_kept_outlives_that_buckets_are_divided_anew(make: Any) -> None:
    def play(rank: int) -> None:
        state, hook = make()
        parameters = [nn.Parameter(torch.zeros(count, dtype=torch.float64)) for count in (30, 50, 20)]
        gradients = [numbers(rank, parameter.numel(), dtype=torch.float64) for parameter in parameters]
        sums = [torch.zeros_like(gradient) for gradient in gradients]
        for division in ([[0, 1], [2]], [[2, 1], [0]], [[0], [1], [2]]):
            for _ in range(2):
                for chosen in division:
                    mine = [gradients[index].clone() for index in chosen]
                    result = averaged(hook, state, *mine, parameters=[parameters[index] for index in chosen])
                    for index, one in zip(
                        chosen, result.split([len(gradients[index]) for index in chosen]), strict=True
                    ):
                        sums[index] += one
        # What was sent and what all ranks keep are the whole, to the last bit but rounding.
        model = nn.ParameterList(parameters)
        kept = state.state_dict(model)
        for index, (mine, total) in enumerate(zip(gradients, sums, strict=True)):
            rest = kept[str(index)]
            dist.all_reduce(rest, dist.ReduceOp.AVG)
            dist.all_reduce(mine, dist.ReduceOp.AVG)
            torch.testing.assert_close(total + rest, 6 * mine, rtol=1e-10, atol=1e-10)

    on_ranks(3, play)


@both
def test_a_state_can_be_saved_by_name_and_loaded(make: Any) -> None:
    def play(rank: int) -> None:
        ours, _ = wrap(models.perceptron)
        state, hook = make()
        ours.register_comm_hook(state, hook)
        for step in range(2):
            loss_of(ours(part(batch(step)))).backward()
        saved = state.state_dict(ours)
        assert set(saved) == {name for name, _ in ours.named_parameters()}
        other = copy.deepcopy(ours)
        restored, _ = make()
        restored.load_state_dict(saved, other)
        loss_of(ours(part(batch(2)))).backward()
        state.load_state_dict(saved, ours)  # in place of what it has kept since
        for each, model in ((restored, other), (state, ours)):
            for name, kept in each.state_dict(model).items():
                assert bits(kept) == bits(saved[name])
        with pytest.raises(ValueError, match="nowhere"):
            restored.load_state_dict({"nowhere": torch.zeros(3)}, other)
        with pytest.raises(ValueError, match="none"):
            restored.load_state_dict({"module.0.bias": torch.zeros(3)}, other)

    on_ranks(2, play)


@both
def test_a_state_that_was_unpickled_compares_its_settings_again(make: Any) -> None:
    def play(rank: int) -> None:
        state, hook = make()
        averaged(hook, state, torch.ones(8))
        again = pickle.loads(pickle.dumps(state))
        again.use_error_feedback = rank == 0
        with pytest.raises(CollectiveMismatch, match="different settings"):
            averaged(hook, again, torch.ones(8))

    on_ranks(2, play)


@both
def test_ranks_with_other_settings_are_told_before_anything_is_sent(make: Any) -> None:
    def play(rank: int) -> None:
        state, hook = make(use_error_feedback=rank != 1)
        with pytest.raises(CollectiveMismatch, match=r"different settings.*use_error_feedback=False") as caught:
            averaged(hook, state, torch.ones(8))
        assert set(caught.value.calls) == {0, 1, 2}
        state, hook = make()
        assert averaged(hook, state, torch.zeros(8)).tolist() == [0.0] * 8  # the group can be used

    on_ranks(3, play)


def test_ranks_with_different_hooks_are_told() -> None:
    def play(rank: int) -> None:
        state, hook = MADE["int8" if rank == 0 else "top-k"]()
        averaged(hook, state, torch.ones(8))

    with pytest.raises(RanksFailed, match=r"TopKState\(ratio=0.1"):
        on_ranks(2, play)


REFUSED: list[tuple[Callable[[], Any], str]] = [
    (lambda: BlockQuantizedState(block_size=0), "block_size.*at least 1, got 0"),
    (lambda: TopKState(ratio=0.0), "ratio.*got 0.0"),
    (lambda: TopKState(ratio=1.5), "ratio.*got 1.5"),
    (lambda: TopKState(ratio=float("nan")), "ratio.*got nan"),
]


@pytest.mark.parametrize(("call", "words"), REFUSED)
def test_arguments_without_meaning_are_refused(call: Callable[[], Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        call()


@both
def test_a_state_of_another_group_cannot_be_pickled_but_copied(make: Any) -> None:
    def play(rank: int) -> None:
        group = dist.new_group([0, 1])
        state, hook = make(process_group=group)
        averaged(hook, state, torch.ones(4))
        assert copy.deepcopy(state).process_group is group
        with pytest.raises(RuntimeError, match="state_dict"):
            state.__getstate__()

    on_ranks(2, play)
