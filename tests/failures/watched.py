"""Arrays of calls that are to be refused: what they held before is what they must hold afterwards."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]


@dataclass
class Arrays:
    """Arrays of one call, each with the values that it must still have when the call was refused."""

    made: list[tuple[Array, Array]] = field(default_factory=list)

    def __call__(self, count: int = 4, dtype: str = "float64", readonly: bool = False) -> Array:
        array = np.arange(count).astype(dtype)
        return self.watched(array, readonly)

    def watched(self, array: Array, readonly: bool = False) -> Array:
        array.flags.writeable = not readonly
        self.made.append((array, array.copy()))
        return array

    def list(self, *counts: int, **how: Any) -> list[Array]:
        return [self(count, **how) for count in counts]

    def are_unchanged(self) -> bool:
        return all(np.array_equal(array, before) for array, before in self.made)
