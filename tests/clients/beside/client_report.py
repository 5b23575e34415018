"""What a client's program reports, to be compared between Gloo and procgroup."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

BACKEND = os.environ.get("CLIENT_BACKEND", "gloo")
"""The backend that the program is to name: "gloo", "procgroup" or, on GPUs, "nccl"."""

DEVICE = os.environ.get("CLIENT_DEVICE", "cpu")
"""What the program is to compute on: "cpu" or "cuda"."""


def report(rank: int, name: str, value: Any) -> None:
    """Write down one result of a rank: tensors, arrays, numbers, texts, and lists and dicts of them.

    The results of one name must be equal on Gloo and on procgroup. A name is reported once on each rank.
    """
    with Path(os.environ["CLIENT_RESULTS"], f"values-{os.getpid()}").open("a") as file:
        file.write(f"{json.dumps([rank, name, _plain(value)])}\n")


def _plain(value: Any) -> Any:
    if hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, dict):
        return {str(key): _plain(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(one) for one in value]
    return value
