"""procgroup in Gloo's place: a program that says "gloo" runs unchanged, and is answered "gloo" where it asks.

torch makes a Gloo group by ProcessGroupGloo(store, rank, size, timeout), then tells it in ``options`` which global
ranks it has and asks it to agree on a sequence number. Only then are the ranks known, so there it connects.
"""

from __future__ import annotations

from datetime import timedelta
from types import SimpleNamespace
from typing import Any

from torch.distributed import distributed_c10d

from procgroup.torch_plugin.creation import make
from procgroup.torch_plugin.process_group import TorchProcessGroup
from procgroup.types import DEFAULT_TIMEOUT


class InPlaceOfGloo(TorchProcessGroup):
    """What torch takes for its ProcessGroupGloo."""

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta = DEFAULT_TIMEOUT) -> None:
        super().__init__(rank, size)
        self._place = rank, size
        self._store = store
        self._timeout = timeout
        self.options = SimpleNamespace(global_ranks_in_group=[], group_name="")

    def _set_sequence_number_for_group(self) -> None:
        """Connect with the other ranks: torch calls this once, when it has filled in ``options``."""
        rank, size = self._place
        members = list(self.options.global_ranks_in_group) or list(range(size))
        group = make(self._store, rank, members, self.options.group_name, self._timeout)
        self.stand_for(group, self._store, name="gloo", members=members)


def replace() -> None:
    """Let torch make groups of this kind where it would make Gloo's. Idempotent."""
    distributed_c10d.ProcessGroupGloo = InPlaceOfGloo
