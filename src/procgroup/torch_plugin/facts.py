"""What torch asks of a process group and of a backend alike, beside the calls: names, places, capabilities."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from procgroup.arrays.untraced import untraced
from procgroup.groups.group import ProcessGroup


@untraced
class TorchFacts:
    """The facts about ``group``, one of procgroup's."""

    group: ProcessGroup
    _name: str

    supports_splitting = False
    supports_coalescing = False
    supports_shrinking = False
    supports_tensor_alloc = False
    supports_time_estimate = False

    def name(self) -> str:
        """Return the backend's name."""
        return self._name

    _get_backend_name = name

    def getBackendName(self) -> str:  # noqa: N802
        """Return the backend's name for torch's C++ code, which takes one that is called gloo for its own Gloo."""
        return "procgroup"

    def rank(self) -> int:
        """Return this process's rank in the group."""
        return self.group.rank()

    def size(self) -> int:
        """Return how many ranks the group has."""
        return self.group.size()

    getRank = rank  # noqa: N815
    getSize = size  # noqa: N815

    def _gathered(self, output_tensors: Any) -> Any:
        """Return what futures give of the ranks' tensors: a list in a list, as on NCCL."""
        return output_tensors

    def set_timeout(self, timeout: timedelta) -> None:
        """Set how long a call may take when it has no timeout of its own."""
        self.group.set_timeout(timeout)

    _set_default_timeout = set_timeout

    def _set_sequence_number_for_group(self) -> None:
        """Do nothing: the engine numbers the calls of each group by itself."""
