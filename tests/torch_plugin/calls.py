"""What a PyTorch program may call, of all files of calls."""

from __future__ import annotations

from torch_plugin import calls_of_operations, calls_of_works_and_groups  # noqa: F401 - both enter their calls
from torch_plugin.call_table import CALLS

__all__ = ["CALLS"]
