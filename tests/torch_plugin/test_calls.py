"""PyTorch's own functions on backend "procgroup": every operation, its forms, tensors of every kind."""

from __future__ import annotations

import importlib.util
import traceback

import pytest

from world import run

pytestmark = [pytest.mark.torch, pytest.mark.timeout(120)]

NAMES: list[str] = []
if importlib.util.find_spec("torch") is not None:
    from torch_plugin.calls import CALLS

    NAMES = list(CALLS)


def make_the_calls(rank: int, size: int) -> dict[str, str]:
    """Make all calls, one after the other; return what went wrong, by the call's name."""
    import torch.distributed as dist

    from procgroup import torch_plugin

    torch_plugin.register()
    dist.init_process_group("procgroup")
    failed = {}
    for name, call in CALLS.items():
        try:
            call(rank, size)
        except Exception:
            failed[name] = traceback.format_exc()
            break  # the ranks may be out of step
    dist.destroy_process_group()
    return failed


@pytest.fixture(scope="module")
def failures() -> list[dict[str, str]]:
    return run(make_the_calls, 3, timeout=100, torch=True)


@pytest.mark.parametrize("name", NAMES)
def test_a_pytorch_program(failures: list[dict[str, str]], name: str) -> None:
    failed = {rank: texts[name] for rank, texts in enumerate(failures) if name in texts}
    assert not failed, "".join(f"\nrank {rank}: {text}" for rank, text in failed.items())
