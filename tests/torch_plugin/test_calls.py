"""PyTorch's own functions on backend "procgroup": every operation, its forms, tensors of every kind."""

from __future__ import annotations

import importlib.util

import pytest
from collectives.playing import nothing_went_wrong, play_programs

from world import attempt, run, without_reports

pytestmark = pytest.mark.torch

NAMES: list[str] = []
if importlib.util.find_spec("torch") is not None:
    from torch_plugin import calls

    NAMES = list(calls.CALLS)


def make_the_calls(rank: int, size: int) -> dict[str, str]:
    import torch.distributed as dist

    from procgroup import torch_plugin

    torch_plugin.register()
    dist.init_process_group("procgroup")
    became = play_programs(calls.CALLS, rank, size)
    dist.destroy_process_group()
    return became


def sum_sparse_tensors(rank: int, size: int) -> None:
    import torch
    import torch.distributed as dist

    from procgroup import torch_plugin

    torch_plugin.register()
    dist.init_process_group("procgroup")
    dist.all_reduce(torch.sparse_coo_tensor([[rank]], torch.ones(1), (size,), check_invariants=True))
    dist.destroy_process_group()


def test_sparse_tensors_are_summed_in_silence() -> None:
    for outcome in attempt(sum_sparse_tensors, 2, torch=True):
        assert outcome.ok and without_reports(outcome.output) == "", outcome.output + outcome.traceback


@pytest.fixture(scope="module")
def of_ranks() -> list[dict[str, str]]:
    return run(make_the_calls, 3, timeout=250, torch=True)


@pytest.mark.parametrize("name", NAMES)
def test_a_pytorch_program(of_ranks: list[dict[str, str]], name: str) -> None:
    nothing_went_wrong(name, of_ranks)
