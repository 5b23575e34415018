"""The patches of planted faults still apply to the sources; plant.py plants them."""

from __future__ import annotations

import shutil

import pytest

from faults import plant


@pytest.mark.skipif(shutil.which("git") is None, reason="git, which applies the patches, is not installed")
def test_every_planted_fault_still_applies() -> None:
    assert plant.problems() == []
    assert plant.faults()
