"""A communication hook averages the buckets; it may answer with another tensor, or with a list. Ranks are threads."""

from __future__ import annotations

import copy
from typing import Any

import pytest

import procgroup as dist
from procgroup.testing import run_ranks

torch = pytest.importorskip("torch")

from parallel import models  # noqa: E402 - it needs torch
from parallel.models import train, wrap  # noqa: E402

from procgroup.parallel import GradBucket  # noqa: E402

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("average_early_or_late")]


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
