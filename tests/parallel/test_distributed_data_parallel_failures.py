"""What DistributedDataParallel refuses, and what the other ranks see when one fails. Ranks are threads."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import procgroup as dist
from procgroup.testing import RanksFailed, run_ranks

torch = pytest.importorskip("torch")

from parallel import models  # noqa: E402 - it needs torch
from parallel.models import assert_same_gradients, batch, loss_of, part, wrap  # noqa: E402
from torch import nn  # noqa: E402

from procgroup.errors import BackwardFailed, GraphChanged, ModelMismatch  # noqa: E402
from procgroup.parallel import DistributedDataParallel  # noqa: E402

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("average_early")]
both_moments = pytest.mark.parametrize("early", [0, 1 << 40], ids=["beside the backward", "at its end"])


def differing(rank: int) -> nn.Module:
    return nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2 + rank))


def shorter(rank: int) -> nn.Module:
    return nn.Sequential(*[nn.Linear(4, 4) for _ in range(3 - rank)])


def frozen(rank: int) -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4).requires_grad_(rank == 0))


def narrower(rank: int) -> nn.Module:
    return nn.Linear(2, 2, dtype=torch.float32 if rank == 0 else torch.float64)


def turned(rank: int) -> nn.Module:
    model = nn.Conv2d(2, 2, 3)
    return model if rank == 0 else model.to(memory_format=torch.channels_last)


def renamed(rank: int) -> nn.Module:
    return nn.ModuleDict({"first" if rank == 0 else "second": nn.Linear(2, 2)})


@pytest.mark.parametrize(
    ("build", "expected", "got"),
    [
        (differing, "1.weight (2, 3)", "1.weight (3, 3)"),
        (shorter, "2.weight (4, 4)", "nothing"),
        (frozen, "1.weight (4, 4)", "without gradient"),
        (narrower, "float32", "float64"),
        (turned, "strides (18, 9, 3, 1)", "strides (18, 1, 6, 2)"),
        (renamed, "first.weight", "second.weight"),
    ],
)
def test_models_that_differ_are_refused_on_every_rank(
    build: Callable[[int], nn.Module], expected: str, got: str
) -> None:
    def play() -> None:
        model = build(min(dist.get_rank(), 1))
        before = [parameter.detach().clone() for parameter in model.parameters()]
        with pytest.raises(ModelMismatch) as caught:
            DistributedDataParallel(model)
        assert expected in caught.value.expected and got in caught.value.got
        assert (caught.value.rank, caught.value.ranks) == (1, (1, 2)) and "ranks 1, 2 differ" in str(caught.value)
        assert all(torch.equal(one, other) for one, other in zip(before, model.parameters(), strict=True))
        DistributedDataParallel(models.make(models.perceptron))  # the group can be used

    run_ranks(play, 3)


REFUSED: list[tuple[Callable[[], Any], type[Exception], str]] = [
    (lambda: DistributedDataParallel(nn.Tanh()), RuntimeError, "doesn't have any parameter that requires a gradient"),
    (lambda: DistributedDataParallel(nn.Linear(2, 2).requires_grad_(False)), RuntimeError, "is not needed"),
    (lambda: DistributedDataParallel(nn.Linear(2, 2), device_ids=[0]), ValueError, "device_ids"),
    (lambda: DistributedDataParallel(nn.Linear(2, 2), output_device=0), ValueError, "output_device"),
    (lambda: DistributedDataParallel(nn.LazyLinear(2)), RuntimeError, "uninitialized parameters"),
    (lambda: DistributedDataParallel(nn.Linear(2, 2, device="meta")), ValueError, "module is on meta"),
    (lambda: DistributedDataParallel(nn.Linear(2, 2), process_group="gloo"), TypeError, "a group of procgroup"),  # type: ignore[arg-type]
    (lambda: wrap(models.perceptron)[0].register_comm_hook(None, 5), TypeError, "must be callable"),  # type: ignore[arg-type]
]


@pytest.mark.parametrize(("call", "error", "words"), REFUSED)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_what_cannot_be_wrapped_is_refused_in_words(
    call: Callable[[], Any], error: type[Exception], words: str
) -> None:
    def play() -> None:
        with pytest.raises(error, match=words):
            call()

    run_ranks(play, 1)


def test_a_group_is_needed() -> None:
    with pytest.raises(ValueError, match="init_process_group"):
        DistributedDataParallel(nn.Linear(2, 2))


def test_a_second_hook_is_refused() -> None:
    def play() -> None:
        ours, _ = wrap(models.perceptron)
        ours.register_comm_hook(None, lambda state, bucket: None)
        with pytest.raises(RuntimeError, match="can only be called once"):
            ours.register_comm_hook(None, lambda state, bucket: None)

    run_ranks(play, 1)


def test_deprecated_arguments_warn_as_torch_does() -> None:
    def play() -> None:
        with pytest.warns(FutureWarning, match="check_reduction"):
            wrap(models.perceptron, check_reduction=True)
        with pytest.warns(FutureWarning, match="forward_sync_buffers"):
            wrap(models.perceptron, broadcast_buffers=True)

    run_ranks(play, 1)


@pytest.mark.parametrize("failing", [(1,), (0, 2), (0, 1, 2)])
@pytest.mark.parametrize("cap", [0.00001, 25])
@both_moments
def test_a_failed_backward_is_dropped_on_all_ranks_and_the_next_step_is_right(
    early: int, failing: tuple[int, ...], cap: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("procgroup.parallel.ddp.reducer.EARLY_BYTES", early)

    def play() -> None:
        ours, alone = wrap(models.Fragile, bucket_cap_mb=cap)
        for step in range(6):
            for model in (ours, alone):
                model.zero_grad()
            whole = batch(step)
            rank = dist.get_rank()
            fails = step in (1, 3)
            loss = loss_of(ours(part(whole), fails and rank in failing))
            if fails:
                with pytest.raises(KeyError if rank in failing else BackwardFailed) as caught:
                    loss.backward()
                if rank not in failing:
                    assert caught.value.ranks == failing  # type: ignore[attr-defined]
                    assert all(parameter.grad is None for parameter in ours.parameters())
                continue
            loss.backward()
            loss_of(alone(whole)).backward()
            assert_same_gradients(ours, alone, step)

    run_ranks(play, 3)


def test_a_failure_in_a_forward_leaves_everything_as_it_was() -> None:
    def play() -> None:
        ours, alone = wrap(models.perceptron)
        if dist.get_rank() == 0:
            with pytest.raises(RuntimeError):
                ours(torch.ones(3, 1, dtype=torch.float64))
        whole = batch(0)
        loss_of(ours(part(whole))).backward()
        loss_of(alone(whole)).backward()
        assert_same_gradients(ours, alone)

    run_ranks(play, 2)


@pytest.mark.parametrize("single", [1, 1 << 20], ids=["large", "small"])
@both_moments
def test_second_derivatives_are_refused_in_words_and_the_next_step_is_right(
    single: int, early: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("procgroup.parallel.ddp.bucket_assignment.SINGLE_BYTES", single)
    monkeypatch.setattr("procgroup.parallel.ddp.reducer.EARLY_BYTES", early)

    def play() -> None:
        ours, alone = wrap(models.perceptron)
        with pytest.raises(RuntimeError, match=r"create_graph=True.*4\.bias \(2,\).*torch\.autograd\.grad"):
            loss_of(ours(part(batch(0)))).backward(create_graph=True)
        for model in (ours, alone):
            model.zero_grad()
        loss_of(ours(part(batch(0)))).backward()
        loss_of(alone(batch(0))).backward()
        assert_same_gradients(ours, alone)

    run_ranks(play, 2)


def test_a_graph_that_is_not_static_names_parameters_and_ranks() -> None:
    def play() -> None:
        ours, _ = wrap(models.Branches, static_graph=True)
        for step in range(2):
            loss_of(ours(part(batch(step)), 1)).backward()
        other = 2 if dist.get_rank() == 1 else 1
        with pytest.raises(GraphChanged) as caught:
            loss_of(ours(part(batch(2)), other)).backward()
        assert sorted(caught.value.uses) == [1]
        assert ("branches.2.weight", (2, 5), 0, 1) in caught.value.uses[1]
        assert "branches.1.bias (2,): used 1 times in the first backward, 0 times in this one" in str(caught.value)
        loss_of(ours(part(batch(3)), 1)).backward()

    run_ranks(play, 3)


def test_a_rank_that_ends_is_named_in_the_backward_of_the_others() -> None:
    def play() -> None:
        ours, _ = wrap(models.perceptron)
        loss_of(ours(part(batch(0)))).backward()
        if dist.get_rank() == 1:
            raise LookupError("this rank has a mistake")
        loss_of(ours(part(batch(1)))).backward()

    with pytest.raises(RanksFailed) as caught:
        run_ranks(play, 3)
    errors = caught.value.errors
    assert isinstance(errors[1], LookupError)
    for rank in (0, 2):
        assert isinstance(errors[rank], dist.PeerFailed) and errors[rank].peer == 1
        assert any("4.bias (2,)" in note for note in errors[rank].__notes__)


def test_what_ended_the_group_between_two_buckets_is_told() -> None:
    def play() -> None:
        ours, _ = wrap(models.perceptron, bucket_cap_mb=0.00001)
        loss_of(ours(part(batch(0)))).backward()

        def wait_for_the_first_bucket(_gradient: Any) -> None:
            deadline = time.monotonic() + 40
            while not any(bucket.pending and bucket.pending.is_completed() for bucket in ours._reducer.buckets):
                assert time.monotonic() < deadline
                time.sleep(0.001)

        if dist.get_rank() == 0:
            ours.module[0].weight.register_hook(wait_for_the_first_bucket)
        else:
            ours.module[4].weight.register_hook(lambda _gradient: dist.all_reduce(torch.ones(99)) and None)
        with pytest.raises(dist.CollectiveMismatch, match="of 99 float32"):  # rather than GroupBroken
            loss_of(ours(part(batch(1)))).backward()

    run_ranks(play, 2)


def test_a_rank_that_calls_no_backward_is_named_at_the_deadline() -> None:
    given_up = threading.Event()

    def play() -> None:
        ours, _ = wrap(models.perceptron)
        loss = loss_of(ours(part(batch(0))))
        assert dist.group.WORLD is not None
        dist.group.WORLD.set_timeout(0.3)
        if dist.get_rank() == 1:
            assert given_up.wait(20)
            return
        with pytest.raises(dist.CollectiveTimeout) as caught:
            loss.backward()
        given_up.set()
        assert caught.value.missing == (1,) and "waiting for rank 1" in str(caught.value)

    run_ranks(play, 2)


def test_another_collective_in_its_place_is_a_mismatch() -> None:
    def play() -> None:
        ours, _ = wrap(models.perceptron)
        with pytest.raises(dist.CollectiveMismatch):
            if dist.get_rank() == 1:
                dist.all_reduce(torch.ones(3))
            else:
                loss_of(ours(part(batch(0)))).backward()

    run_ranks(play, 2)


def test_a_backward_after_the_end_of_the_group_says_so() -> None:
    def play() -> None:
        ours, _ = wrap(models.perceptron)
        loss = loss_of(ours(part(batch(0))))
        dist.destroy_process_group()
        with pytest.raises(dist.DistError, match="destroyed"):
            loss.backward()

    run_ranks(play, 1)


def test_a_hook_that_raises_is_heard() -> None:
    def play() -> None:
        ours, _ = wrap(models.perceptron)

        def hook(_state: Any, _bucket: Any) -> Any:
            raise ZeroDivisionError("in the hook")

        ours.register_comm_hook(None, hook)
        with pytest.raises(ZeroDivisionError):
            loss_of(ours(part(batch(0)))).backward()

    run_ranks(play, 2)


def scalar(_state: Any, _bucket: Any) -> Any:
    future = torch.futures.Future()
    future.set_result(torch.ones(1))
    return future


def nothing(_state: Any, _bucket: Any) -> Any:
    return None


def tensor(_state: Any, bucket: Any) -> Any:
    return bucket.buffer()


def work(_state: Any, bucket: Any) -> Any:
    return dist.all_reduce(bucket.buffer(), async_op=True)


@pytest.mark.parametrize(
    ("hook", "words"),
    [
        (nothing, r"hook nothing returned None; expected something with wait\(\)"),
        (tensor, r"hook tensor returned a tensor of shape \(14,\)"),
        (scalar, r"hook scalar gave a tensor of shape \(1,\) for bucket 0 \(.*expected a tensor of 14 elements"),
        (work, r"hook work gave True .*get_future\(\)"),
    ],
)
def test_a_hook_that_answers_with_no_average_is_refused_in_words(hook: Any, words: str) -> None:
    def play() -> None:
        ours, _ = wrap(lambda: nn.Linear(models.WIDTH, 2))
        ours.register_comm_hook(None, hook)
        with pytest.raises(TypeError, match=words):
            loss_of(ours(part(batch(0)))).backward()

    run_ranks(play, 2)


def test_without_torch_the_package_can_be_imported_and_its_use_says_what_to_install() -> None:
    program = (
        "import sys; sys.modules['torch'] = None\n"
        "import procgroup.parallel\n"
        "assert 'DistributedDataParallel' in dir(procgroup.parallel)\n"
        "try:\n    procgroup.parallel.DistributedDataParallel\n"
        "except ImportError as error: assert 'pip install torch' in str(error)\n"
        "else: raise AssertionError\n"
        "try:\n    procgroup.parallel.Nothing\n"
        "except AttributeError: pass\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)


UNEVEN = """
import procgroup as dist, torch
from procgroup.parallel import DistributedDataParallel

dist.init_process_group()
model = DistributedDataParallel(torch.nn.Linear(2, 2))
for step in range(3 + (dist.get_rank() == 0)):
    model(torch.ones(1, 2)).sum().backward()
dist.destroy_process_group()
"""


def test_who_has_a_batch_more_learns_of_join(tmp_path: Path) -> None:
    program = tmp_path / "uneven.py"
    program.write_text(UNEVEN)
    command = [sys.executable, "-m", "procgroup", "run", "-n", "2", str(program)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 1
    assert (
        "Does that rank have fewer batches? With inputs of uneven lengths, train in: with model.join():" in done.stderr
    )
