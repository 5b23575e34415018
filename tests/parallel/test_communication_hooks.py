"""The hooks without a memory, and what every hook has to do. Ranks are threads; the oracle is the exact mean."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
from typing import Any

import pytest

import procgroup as dist
from procgroup.testing import RanksFailed, run_ranks

torch = pytest.importorskip("torch")

from parallel import models  # noqa: E402 - it needs torch
from parallel.hooks import Hook, assert_same_bits, averaged, bits, bucket_of, loss_after, numbers, on_ranks  # noqa: E402
from parallel.models import batch, loss_of, part, wrap  # noqa: E402

from procgroup.errors import BackwardFailed  # noqa: E402
from procgroup.parallel import communication_hooks as hooks  # noqa: E402

pytestmark = pytest.mark.torch

ROUNDING = {"fp16_compress_hook": (2**-11, 2**-25), "bf16_compress_hook": (2**-8, 0.0)}
STEPS = 60


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def loss_without_hook() -> float:
    return loss_after(STEPS)


ALL: dict[str, Any] = {
    "allreduce": lambda: (None, hooks.allreduce_hook),
    "fp16": lambda: (None, hooks.fp16_compress_hook),
    "bf16": lambda: (None, hooks.bf16_compress_hook),
    "wrapped in fp16": lambda: (None, hooks.fp16_compress_wrapper(hooks.allreduce_hook)),
    "int8": lambda: (hooks.BlockQuantizedState(), hooks.block_quantized_hook),
    "int8 of small blocks": lambda: (hooks.BlockQuantizedState(block_size=7), hooks.block_quantized_hook),
    "int8 wrapped": lambda: (hooks.BlockQuantizedState(), hooks.bf16_compress_wrapper(hooks.block_quantized_hook)),
    "top half": lambda: (hooks.TopKState(ratio=0.5), hooks.top_k_hook),
    "PowerSGD": lambda: (hooks.PowerSGDState(None, 2, 0, 1.1), hooks.powerSGD_hook),
    "PowerSGD later": lambda: (hooks.PowerSGDState(None, 2, 1, 1.1), hooks.powerSGD_hook),
    "post-local SGD": lambda: (hooks.PostLocalSGDState(None, None, 99, False), hooks.post_localSGD_hook),
    "wrapped in bf16": lambda: (None, hooks.bf16_compress_wrapper(hooks.allreduce_hook)),
}
every_hook = pytest.mark.parametrize("made", ALL.values(), ids=list(ALL))


@pytest.mark.parametrize("size", [1, 2, 3, 4, 7])
def test_the_hook_of_all_reduce_changes_no_bit(size: int) -> None:
    def play(rank: int) -> None:
        mine = numbers(rank, 1000)
        expected = mine.clone()
        dist.all_reduce(expected, dist.ReduceOp.AVG)
        assert bits(averaged(hooks.allreduce_hook, None, mine)) == bits(expected)

    on_ranks(size, play)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("scale", [1e-6, 1.0, 6e3])
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("name", ROUNDING)
def test_sixteen_bits_round_each_element_and_the_mean(name: str, size: int, scale: float, dtype: Any) -> None:
    parts = [numbers(rank, 5000, scale, dtype=dtype) for rank in range(size)]
    results = on_ranks(size, lambda rank: averaged(getattr(hooks, name), None, parts[rank]))
    assert_same_bits(results)
    exact = torch.stack(parts).double()
    relative, absolute = ROUNDING[name]
    error = (results[0].double() - exact.mean(0)).abs()
    own = relative * exact.abs().mean(0) + absolute
    result_dtype = 0 if dtype != torch.bfloat16 else 2**-8
    mean = (relative + result_dtype) * 1.01 * exact.mean(0).abs() + absolute
    assert (error <= 1.01 * (own + mean) + 1e-45).all()


@pytest.mark.parametrize("wrapper", [hooks.fp16_compress_wrapper, hooks.bf16_compress_wrapper])
def test_a_wrapper_gives_what_the_hook_of_its_dtype_does(wrapper: Any) -> None:
    alone = hooks.fp16_compress_hook if wrapper is hooks.fp16_compress_wrapper else hooks.bf16_compress_hook

    def play(rank: int) -> None:
        mine = numbers(rank, 300)
        expected = averaged(alone, None, mine.clone())
        assert bits(averaged(wrapper(hooks.allreduce_hook), None, mine)) == bits(expected)

    on_ranks(3, play)


def test_a_wrapped_hook_may_answer_with_a_list_in_a_future_of_torch() -> None:
    def hook(state: Any, bucket: Any) -> Any:
        assert state == "state" and bucket.buffer().dtype == torch.float16
        future: Any = torch.futures.Future()
        future.set_result([bucket.buffer() * 2])
        return future

    result = averaged(hooks.fp16_compress_wrapper(hook), "state", torch.tensor([1.0, 2.0]))
    assert result.tolist() == [2.0, 4.0]


def test_what_float16_cannot_hold_is_infinite_on_every_rank_and_bfloat16_holds_it() -> None:
    values = torch.tensor([65519.0, 65520.0, -1e30, 1.0])

    def play(rank: int) -> tuple[list[float], list[float]]:
        mine = values if rank == 1 else torch.ones(4)
        return (
            averaged(hooks.fp16_compress_hook, None, mine).tolist(),
            averaged(hooks.bf16_compress_hook, None, mine).tolist(),
        )

    for half, brain in on_ranks(2, play):
        assert half == [32752.0, float("inf"), float("-inf"), 1.0]
        assert brain == pytest.approx([32760.0, 32760.5, -5e29, 1.0], rel=2**-7)


@every_hook
def test_what_is_not_a_number_arrives_on_every_rank(made: Any) -> None:
    bad = {0: float("nan"), 1: float("inf"), 2: float("-inf")}

    def play(rank: int) -> torch.Tensor:
        state, hook = made()
        weights = numbers(rank, 600).view(20, 30)
        for place, value in bad.items():
            if place == rank:
                weights.view(-1)[100 * place] = value
        return averaged(hook, state, weights)

    results = on_ranks(3, play)
    for result in results:
        assert not result[[0, 100, 200]].isfinite().any()
    assert all(bits(result.isnan()) == bits(results[0].isnan()) for result in results)


@every_hook
def test_training_comes_as_far_as_without_a_hook(made: Any, loss_without_hook: float) -> None:
    assert loss_after(STEPS, made) <= 1.05 * loss_without_hook


@every_hook
def test_small_buckets_a_static_graph_and_more_ranks_train_too(made: Any, loss_without_hook: float) -> None:
    options = {"bucket_cap_mb": 0.0005, "static_graph": True}
    assert loss_after(STEPS, made, size=3, **options) <= 1.1 * loss_without_hook


@every_hook
def test_gradients_that_add_up_and_parameters_that_nobody_uses(made: Any) -> None:
    def play(rank: int) -> list[torch.Tensor]:
        ours, alone = wrap(models.Branches, bucket_cap_mb=0.0001)
        ours.register_comm_hook(*made())
        for step in range(3):
            for model in (ours, alone):
                model.zero_grad()
            with ours.no_sync():
                loss_of(ours(part(batch(step)), rank % 2)).backward()
            before = ours.module.first.weight.grad.clone()
            assert ours.module.never.weight.grad is None
            loss_of(ours(part(batch(step + 10)), 0)).backward()
            assert not torch.equal(before, ours.module.first.weight.grad)
            for other in range(2):
                for number, branch in ((step, other), (step + 10, 0)):
                    (loss_of(alone(part(batch(number), other), branch % 2)) / 2).backward()
        assert ours.module.never.weight.grad is None and ours.module.branches[2].weight.grad is None
        for name, parameter in alone.named_parameters():
            if parameter.grad is not None:
                got = dict(ours.module.named_parameters())[name].grad
                assert (got - parameter.grad).norm() <= 0.9 * parameter.grad.norm()
        return [parameter.grad for parameter in ours.parameters() if parameter.grad is not None]

    for mine, other in zip(*on_ranks(2, play), strict=True):
        assert bits(mine) == bits(other)


@every_hook
def test_ranks_without_inputs_answer_the_hook(made: Any) -> None:
    def play(rank: int) -> list[torch.Tensor]:
        ours, _ = wrap(models.perceptron)
        ours.register_comm_hook(*made())
        optimizer = torch.optim.SGD(ours.parameters(), lr=0.1)
        with ours.join():
            for step in range(1 + 2 * rank):
                optimizer.zero_grad()
                loss_of(ours(part(batch(step)))).backward()
                optimizer.step()
        return [parameter.detach() for parameter in ours.parameters()]

    for one, other in zip(*on_ranks(2, play), strict=True):
        assert bits(one) == bits(other) and one.isfinite().all()


@every_hook
def test_after_a_backward_that_failed_on_one_rank_the_hook_goes_on(made: Any) -> None:
    def play(rank: int) -> list[torch.Tensor]:
        ours, _ = wrap(models.Fragile, bucket_cap_mb=0.0001)
        ours.register_comm_hook(*made())
        for step in range(3):
            ours.zero_grad()
            loss = loss_of(ours(part(batch(step)), step == 1 and rank == 0))
            if step == 1:
                with pytest.raises(BackwardFailed if rank else KeyError):
                    loss.backward()
            else:
                loss.backward()
        return [parameter.grad for parameter in ours.parameters()]

    for one, other in zip(*on_ranks(2, play), strict=True):
        assert bits(one) == bits(other) and one.isfinite().all()


@every_hook
def test_a_model_with_a_hook_can_be_copied_and_pickled(made: Any) -> None:
    def play(rank: int) -> None:
        ours, _ = wrap(models.perceptron)
        ours.register_comm_hook(*made())
        loss_of(ours(part(batch(0)))).backward()
        copies = [copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))]
        results = []
        for model in (ours, *copies):
            model.zero_grad()
            loss_of(model(part(batch(1)))).backward()
            results.append([parameter.grad.clone() for parameter in model.parameters()])
        for result in results[1:]:
            for got, expected in zip(result, results[0], strict=True):
                torch.testing.assert_close(got, expected)

    on_ranks(2, play)


TAKE_COMPLEX = {"allreduce", "post-local SGD"}


@pytest.mark.parametrize("name", [name for name in ALL if name not in TAKE_COMPLEX])
def test_gradients_that_cannot_be_rounded_are_refused(name: str) -> None:
    def play() -> None:
        state, hook = ALL[name]()
        with pytest.raises(TypeError, match="complex64"):
            hook(state, bucket_of(torch.ones(3, dtype=torch.complex64)))

    run_ranks(play, 1)


@pytest.mark.parametrize("name", sorted(TAKE_COMPLEX))
def test_hooks_that_do_not_round_average_complex_gradients(name: str) -> None:
    def play(rank: int) -> None:
        state, hook = ALL[name]()
        assert averaged(hook, state, torch.full((3,), rank + 1j)).tolist() == [0.5 + 1j] * 3

    on_ranks(2, play)


def test_ranks_with_different_hooks_are_told() -> None:
    def play(rank: int) -> None:
        hook: Hook = hooks.fp16_compress_hook if rank == 0 else hooks.bf16_compress_hook
        averaged(hook, None, torch.ones(4))

    with pytest.raises(RanksFailed) as caught:
        on_ranks(2, play)
    for error in caught.value.errors.values():
        assert isinstance(error, dist.CollectiveMismatch)
        assert " float16" in str(error) and " bfloat16" in str(error)


def test_the_names_are_there_and_no_others() -> None:
    assert set(hooks.__all__) <= set(dir(hooks))
    for name in hooks.__all__:
        assert callable(getattr(hooks, name))
    with pytest.raises(AttributeError, match="communication_hooks"):
        _ = hooks.nothing


def test_without_torch_the_package_can_be_imported_and_its_use_says_what_to_install() -> None:
    program = (
        "import sys; sys.modules['torch'] = None\n"
        "from procgroup.parallel import communication_hooks as hooks\n"
        "assert 'top_k_hook' in dir(hooks)\n"
        "try:\n    hooks.top_k_hook\n"
        "except ImportError as error: assert 'pip install torch' in str(error)\n"
        "else: raise AssertionError\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)
