from __future__ import annotations

import pytest


@pytest.fixture
def average_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let small models be averaged beside the backward, as large ones are."""
    import torch

    torch.set_num_threads(1)
    monkeypatch.setattr("procgroup.parallel.reducer.EARLY_BYTES", 0)
