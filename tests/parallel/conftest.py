from __future__ import annotations

import pytest


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
