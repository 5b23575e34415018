"""Whether an object that arrived is the one that was sent, arrays and their dtypes included."""

from __future__ import annotations

from typing import Any

import numpy as np


def same(left: Any, right: Any) -> bool:
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same(left[key], right[key]) for key in left)
    if isinstance(left, list):
        return len(left) == len(right) and all(map(same, left, right))
    if isinstance(left, np.ndarray):
        return left.dtype == right.dtype and left.shape == right.shape and bool((left == right).all())
    return type(left) is type(right) and bool(left == right)
