"""A backend that moves bytes through the group's store, in as few lines as that takes: it checks and awaits nothing."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Generator, Iterator
from datetime import timedelta
from typing import Any

import numpy as np

from procgroup.groups.backend import Call
from procgroup.stores.store import Store

REDUCE = {"SUM": np.add, "AVG": np.add, "PRODUCT": np.multiply, "MIN": np.minimum}
REDUCE |= {"MAX": np.maximum, "BAND": np.bitwise_and, "BOR": np.bitwise_or, "BXOR": np.bitwise_xor}


class StoreBackend:
    """Each rank puts its blocks into the store, and takes from there what it needs of the others'."""

    def __init__(self, store: Store, rank: int, size: int, timeout: timedelta) -> None:
        self.store, self.rank, self.size = store, rank, size
        self.numbers = itertools.count()
        self.messages: Counter[str] = Counter()
        self.is_closed = False

    def supports(self, op: str, dtype: str, reduce_op: str) -> bool:
        return True

    def move(self, call: Call) -> Iterator[int]:
        if call.op in ("send", "recv"):
            return self._move_message(call)
        return self._move_blocks(call, next(self.numbers))

    def close(self, failed: bool) -> None:
        self.is_closed = True

    def _move_message(self, call: Call) -> Iterator[int]:
        ends = (self.rank, call.root) if call.op == "send" else (call.root, self.rank)
        key = f"{ends}/{call.tag}"
        self.messages[key] += 1
        key = f"{key}/{self.messages[key]}"
        for block in call.inputs:
            self.store.set(key, block.tobytes())
        for block in call.outputs:
            block[:] = yield from self._get(key, call.root)

    def _move_blocks(self, call: Call, number: int) -> Iterator[int]:
        for index, block in enumerate(call.inputs):
            self.store.set(f"{number}/{self.rank}/{index}", block.tobytes())
        if not call.outputs:
            return
        mine = self.rank if call.op in ("scatter", "reduce_scatter", "all_to_all") else 0
        if call.reduce_op is None:
            givers = range(self.size) if call.root < 0 or call.op == "gather" else [call.root]
            for giver, block in zip(givers, call.outputs, strict=True):
                block[:] = yield from self._get(f"{number}/{giver}/{mine}", giver)
            return
        givers = range({"scan": self.rank + 1, "exscan": self.rank}.get(call.op, self.size))
        dtype = np.dtype(call.dtype)
        result = (yield from self._get(f"{number}/0/{mine}", 0)).view(dtype)
        for giver in givers[1:]:
            other = yield from self._get(f"{number}/{giver}/{mine}", giver)
            result = REDUCE[call.reduce_op](result, other.view(dtype))
        if call.reduce_op == "AVG":
            result = (result / len(givers)).astype(dtype)
        call.outputs[0].view(dtype)[:] = result

    def _get(self, key: str, giver: int) -> Generator[int, None, Any]:
        while not self.store.check([key]):
            yield giver
        return np.frombuffer(self.store.get(key), np.uint8)
