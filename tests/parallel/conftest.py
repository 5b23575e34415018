from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec

import pytest


@pytest.fixture(scope="session", autouse=True)
def torch_is_whole() -> None:
    """Import what torch itself imports with the first optimizer: ranks that are threads would meet it half imported."""
    if find_spec("torch"):
        import_module("torch._dynamo")


@pytest.fixture
def average_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let small models be averaged beside the backward, as large ones are."""
    import torch

    torch.set_num_threads(1)
    monkeypatch.setattr("procgroup.parallel.ddp.reducer.EARLY_BYTES", 0)


@pytest.fixture(params=[0, 1 << 40], ids=["beside the backward", "at its end"])
def average_early_or_late(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Models of tests are small: choose when they are averaged."""
    import torch

    torch.set_num_threads(1)
    monkeypatch.setattr("procgroup.parallel.ddp.reducer.EARLY_BYTES", request.param)
