"""The pytest plug-in. PYTEST_DONT_REWRITE: importing it costs next to nothing until a test takes the fixture."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest


@pytest.fixture  # type: ignore[untyped-decorator]
def ranks() -> Callable[..., list[Any]]:
    """Call a function on several ranks: ``ranks(function, 4)``; see procgroup.testing.run_ranks."""
    from procgroup.testing import run_ranks

    return run_ranks
