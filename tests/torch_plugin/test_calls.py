"""PyTorch's own functions on backend "procgroup": every operation, its forms, tensors of every kind."""

from __future__ import annotations

import importlib.util

import pytest

from world import run

pytestmark = [pytest.mark.torch, pytest.mark.timeout(120)]

NAMES: list[str] = []
if importlib.util.find_spec("torch") is not None:
    from torch_plugin import calls

    NAMES = list(calls.CALLS)


def make_the_calls(rank: int, size: int) -> dict[str, str]:
    import torch.distributed as dist

    from procgroup import torch_plugin

    torch_plugin.register()
    dist.init_process_group("procgroup")
    became = calls.make(rank, size)
    dist.destroy_process_group()
    return became


@pytest.fixture(scope="module")
def of_ranks() -> list[dict[str, str]]:
    return run(make_the_calls, 3, timeout=100, torch=True)


@pytest.mark.parametrize("name", NAMES)
def test_a_pytorch_program(of_ranks: list[dict[str, str]], name: str) -> None:
    calls.require_success(name, of_ranks)
