"""What the ranks of the job give each other: values in the group's store, each awaited until a deadline.

The store is used, and not a collective, because a rank that does not answer must not end the check of the others: it is
left out and named.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from typing import Any

from procgroup.errors import StoreTimeout
from procgroup.stores.store import Store


class Exchange:
    """This rank's values, and those of the other ranks, by stage. Raises DistStoreError when the store is lost."""

    def __init__(self, store: Store, rank: int) -> None:
        self._store = store
        self.rank = rank

    def publish(self, stage: str, value: Any) -> None:
        """Publish this rank's value of a stage: anything that JSON has."""
        self._store.set(_key(stage, self.rank), json.dumps(value))

    def collect(self, stage: str, ranks: Collection[int], seconds: float) -> dict[int, Any]:
        """Return the values of these ranks, in their order; without those that have none after ``seconds``."""
        answered = list(ranks)
        try:
            values = self._store.multi_get([_key(stage, rank) for rank in answered], seconds)
        except StoreTimeout:
            answered = [rank for rank in ranks if self._store.check([_key(stage, rank)])]
            values = self._store.multi_get([_key(stage, rank) for rank in answered]) if answered else []
        return {rank: json.loads(value) for rank, value in zip(answered, values, strict=True)}


def _key(stage: str, rank: int) -> str:
    return f"doctor/{stage}/{rank}"
