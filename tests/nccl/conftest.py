"""Builds the stand-ins for NCCL and CUDA before the tests that load them."""

from __future__ import annotations

import pytest
from nccl import stand_ins


@pytest.fixture(scope="module", autouse=True)
def built_before_the_deadlines_of_worlds_begin(request: pytest.FixtureRequest) -> None:
    if "real_gpu" not in request.module.__name__:
        stand_ins.build()
