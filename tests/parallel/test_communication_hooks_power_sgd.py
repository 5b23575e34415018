"""PowerSGD: what a product of two thin matrices keeps of a mean, in one step and over many. Ranks are threads."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest

import procgroup as dist
from procgroup.errors import CollectiveMismatch

torch = pytest.importorskip("torch")

from parallel import models  # noqa: E402 - it needs torch
from parallel.hooks import assert_same_bits, averaged, bits, bucket_of, loss_after, numbers, on_ranks  # noqa: E402
from parallel.models import batch, loss_of, part, wrap  # noqa: E402
from torch import nn  # noqa: E402

from procgroup.parallel.communication_hooks import PowerSGDState, powerSGD_hook  # noqa: E402
from procgroup.parallel.communication_hooks.power_sgd import orthogonalize  # noqa: E402

pytestmark = pytest.mark.torch

ROWS, COLUMNS = 30, 40
STEPS = 120


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def loss_without_hook() -> float:
    return loss_after(STEPS)


def state_of(rank: int = 1, start: int = 0, **options: Any) -> PowerSGDState:
    """Return a state that compresses whatever becomes smaller."""
    return PowerSGDState(None, rank, start, min_compression_rate=1.1, **options)


def matrix(rank: int, scale: float = 1.0, seed: int = 0, dtype: Any = torch.float64) -> Any:
    return numbers(rank, ROWS * COLUMNS, scale, seed, dtype).view(ROWS, COLUMNS)


def thin(seed: int, count: int, columns: int, dtype: Any = torch.float64) -> Any:
    return torch.randn(count, columns, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def best(mean: torch.Tensor, rank: int) -> torch.Tensor:
    left, values, right = torch.linalg.svd(mean)
    return left[:, :rank] * values[:rank] @ right[:rank]  # type: ignore[no-any-return]


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("rank", [1, 2, 4])
@pytest.mark.parametrize("scale", [1e-25, 1.0, 1e25])
def test_a_mean_of_low_rank_is_exact(scale: float, rank: int, size: int) -> None:
    right = thin(99, rank, COLUMNS)
    # Each rank has its own columns; the mean has as few.
    parts = [(scale * thin(one, ROWS, rank) @ right).float() for one in range(size)]
    results = on_ranks(size, lambda one: averaged(powerSGD_hook, state_of(rank, random_seed=3), parts[one]))
    assert_same_bits(results)
    mean = torch.stack(parts).double().mean(0)
    assert (results[0].double().view(ROWS, COLUMNS) - mean).norm() <= 1e-5 * mean.norm()


@pytest.mark.parametrize("rank", [1, 3])
def test_one_step_is_never_farther_from_the_mean_than_zeros_and_many_come_to_the_best(rank: int) -> None:
    size, steps = 3, 60
    parts = [matrix(one) for one in range(size)]
    mean = torch.stack(parts).mean(0)

    def play(one: int) -> list[torch.Tensor]:
        state, parameters = state_of(rank, use_error_feedback=False), [nn.Parameter(torch.zeros_like(mean))]
        return [averaged(powerSGD_hook, state, parts[one], parameters=parameters) for _ in range(steps)]

    results = on_ranks(size, play)[0]
    errors = [float((result.view_as(mean) - mean).norm()) for result in results]
    assert max(errors) <= float(mean.norm()) * (1 + 1e-12)
    assert errors[-1] <= 1.01 * float((best(mean, rank) - mean).norm()) and errors[-1] < errors[0]


def test_what_is_not_sent_is_sent_later() -> None:
    steps, size = 200, 3
    parts = [matrix(one) for one in range(size)]
    mean = torch.stack(parts).mean(0)

    def play(rank: int) -> torch.Tensor:
        state, parameters = state_of(2), [nn.Parameter(torch.zeros_like(mean))]
        total = sum(averaged(powerSGD_hook, state, parts[rank], parameters=parameters) for _ in range(steps))
        assert isinstance(total, torch.Tensor)
        kept = state._residuals.of(bucket_of(parts[rank], parameters=parameters)).clone()
        assert kept.norm() <= 60 * parts[rank].norm()  # and this rank alone does not keep more and more
        dist.all_reduce(kept, dist.ReduceOp.AVG)
        torch.testing.assert_close(total + kept, steps * mean.view(-1), rtol=1e-9, atol=1e-9)
        return total / steps

    for result in on_ranks(size, play):
        assert (result.view_as(mean) - mean).norm() <= 0.1 * mean.norm()


def test_the_seed_decides_where_the_first_step_begins() -> None:
    def play(rank: int, seed: int) -> bytes:
        return bits(averaged(powerSGD_hook, state_of(1, random_seed=seed), matrix(rank)))

    results = [on_ranks(2, lambda rank, seed=seed: play(rank, seed))[0] for seed in (0, 1, 1)]  # type: ignore[misc]
    assert results[0] != results[1] == results[2]


def test_vectors_and_small_matrices_are_averaged_as_they_are_and_kept_nowhere() -> None:
    def play(rank: int) -> None:
        gradients = [numbers(rank, 17), numbers(rank, 4).view(2, 2), matrix(rank, dtype=torch.float32)]
        expected = torch.cat([gradient.reshape(-1) for gradient in gradients[:2]])
        dist.all_reduce(expected, dist.ReduceOp.AVG)
        parameters = [nn.Parameter(torch.zeros_like(gradient)) for gradient in gradients]
        state = state_of()
        for _ in range(2):
            result = averaged(powerSGD_hook, state, *gradients, parameters=parameters)
            assert bits(result[:21]) == bits(expected)
        assert not state._residuals.of(bucket_of(*gradients, parameters=parameters))[:21].any()
        before, sent = 2 * (21 + ROWS * COLUMNS), 2 * (21 + ROWS + COLUMNS)
        assert state.compression_stats() == (before / sent, before, sent)

    on_ranks(2, play)


def test_the_first_steps_are_those_of_all_reduce() -> None:
    def play(rank: int) -> None:
        state, parameters = state_of(start=2), [nn.Parameter(torch.zeros(ROWS, COLUMNS))]
        expected = matrix(rank, dtype=torch.float32)
        dist.all_reduce(expected, dist.ReduceOp.AVG)
        for step in range(3):
            result = averaged(powerSGD_hook, state, matrix(rank, dtype=torch.float32), parameters=parameters)
            assert (bits(result) == bits(expected)) == (step < 2)
        assert state.iter == 3 and state.compression_stats()[1] == ROWS * COLUMNS

    on_ranks(2, play)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_matrix_with_a_nan_is_nan_everywhere_and_the_next_one_is_well(bad: float) -> None:
    def play(rank: int) -> tuple[torch.Tensor, torch.Tensor]:
        state = state_of(2)
        parameters = [nn.Parameter(torch.zeros(ROWS, COLUMNS)) for _ in range(2)]
        low = thin(1, ROWS, 2).float() @ thin(2, 2, COLUMNS).float()
        first = low.clone()
        if rank == 1:
            first[3, 4] = bad
        results = [averaged(powerSGD_hook, state, one, low, parameters=parameters) for one in (low, first, low)]
        torch.testing.assert_close(results[2], torch.cat([low.view(-1)] * 2), rtol=1e-3, atol=1e-3)
        return results[1].split(ROWS * COLUMNS)  # type: ignore[no-any-return]

    for first, second in on_ranks(3, play):
        assert first.isnan().all() and second.isfinite().all()


def test_a_matrix_of_zeros_is_zeros_and_the_next_one_is_well() -> None:
    def play(rank: int) -> None:
        state, parameters = state_of(2), [nn.Parameter(torch.zeros(ROWS, COLUMNS))]
        low = thin(1, ROWS, 1).float() @ thin(2, 1, COLUMNS).float()
        for given in (torch.zeros(ROWS, COLUMNS), low, torch.zeros(ROWS, COLUMNS), low):
            result = averaged(powerSGD_hook, state, given, parameters=parameters)
            torch.testing.assert_close(result, given.view(-1), rtol=1e-4, atol=1e-4)

    on_ranks(2, play)


@pytest.mark.parametrize("rows", [1, 2, 3, 7, 100])
def test_columns_become_orthonormal_and_dependent_ones_zeros(rows: int) -> None:
    columns = min(rows, 4)
    given = thin(rows, rows, columns) * 10.0 ** torch.arange(0, 30 * columns, 30).double()
    made = orthogonalize(given)
    torch.testing.assert_close(made.T @ made, torch.eye(columns, dtype=torch.float64), rtol=0, atol=1e-14)
    twice = orthogonalize(torch.cat([given[:, :1], 3 * given[:, :1]], 1))
    assert twice[:, 1].tolist() == [0.0] * rows and twice[:, 0].norm() == pytest.approx(1)


@pytest.mark.parametrize("turned", [False, True])
def test_parameters_of_any_layout(turned: bool) -> None:
    def play(rank: int) -> torch.Tensor:
        model = models.make(lambda: nn.Sequential(nn.Conv2d(8, 12, 3), nn.Flatten(), nn.Linear(12, 4)))
        chosen = model.to(memory_format=torch.channels_last) if turned else model
        alone = copy.deepcopy(chosen)
        ours = models.DistributedDataParallel(chosen)
        ours.register_comm_hook(state_of(8), powerSGD_hook)
        inputs = numbers(rank, 2 * 8 * 9, dtype=torch.float64).view(2, 8, 3, 3)
        loss_of(ours(inputs)).backward()
        loss_of(alone(inputs)).backward()
        mine = alone[0].weight.grad.clone()
        dist.all_reduce(mine, dist.ReduceOp.AVG)
        assert (ours.module[0].weight.grad - mine).norm() <= 0.5 * mine.norm()
        return chosen[0].weight.grad  # type: ignore[no-any-return]

    assert_same_bits(on_ranks(2, play))


FACTORS: list[tuple[float, dict[str, Any]]] = [
    (1.25, {"rank": 1}),
    (1.05, {"rank": 4}),
    (1.15, {"rank": 2, "warm_start": False}),
    (1.25, {"start": 10}),
]


@pytest.mark.parametrize(("factor", "options"), FACTORS, ids=str)
def test_training_comes_as_far(factor: float, options: dict[str, Any], loss_without_hook: float) -> None:
    assert loss_after(STEPS, lambda: (state_of(**options), powerSGD_hook)) <= factor * loss_without_hook


def test_a_state_can_be_saved_by_name_and_goes_on_with_the_same_bits() -> None:
    def play(rank: int) -> None:
        ours, _ = wrap(models.perceptron)
        state = state_of(1)
        ours.register_comm_hook(state, powerSGD_hook)
        for step in range(3):
            ours.zero_grad()
            loss_of(ours(part(batch(step)))).backward()
        parameters = list(ours.parameters())
        restored = state_of(1)
        restored.load_state_dict(state.state_dict(ours), ours)
        gradients = [parameter.grad.clone() for parameter in parameters]
        results = [averaged(powerSGD_hook, one, *gradients, parameters=parameters) for one in (state, restored)]
        assert bits(results[0]) == bits(results[1]) and restored.iter == state.iter == 4
        saved = state.state_dict(ours)
        for kept in (saved, {**saved, "residuals": {}}):
            with pytest.raises(ValueError, match="0.weight"):
                restored.load_state_dict(kept, nn.Linear(2, 2))
        wider = state_of(2)
        wider.load_state_dict(saved, ours)
        assert averaged(powerSGD_hook, wider, *gradients, parameters=parameters).isfinite().all()

    on_ranks(2, play)


def test_ranks_with_other_settings_are_told() -> None:
    def play(rank: int) -> None:
        with pytest.raises(CollectiveMismatch, match="matrix_approximation_rank=2"):
            averaged(powerSGD_hook, state_of(1 + rank), torch.ones(8))

    on_ranks(2, play)


REFUSED: list[tuple[Callable[[], Any], str]] = [
    (lambda: PowerSGDState(matrix_approximation_rank=0), "matrix_approximation_rank.*got 0"),
    (lambda: PowerSGDState(start_powerSGD_iter=-1), "start_powerSGD_iter.*got -1"),
    (lambda: PowerSGDState(min_compression_rate=0), "min_compression_rate.*got 0"),
]


@pytest.mark.parametrize(("call", "words"), REFUSED)
def test_arguments_without_meaning_are_refused(call: Callable[[], Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        call()
