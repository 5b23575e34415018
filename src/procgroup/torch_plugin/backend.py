"""The backend that torch from 2.15 on looks for in a process group: a Backend.

It carries torch's hooks and the other features that ``PyProcessGroup`` lacks. It is not used without that class, in a
process group of torch's: the works of such a group hide all of a Python work but ``wait`` and its future, and would
report that a call has never completed.
"""

from __future__ import annotations

import functools

from torch._C._distributed_c10d import Backend

from procgroup.api import exit_hooks
from procgroup.arrays.untraced import untraced
from procgroup.groups.group import ProcessGroup
from procgroup.torch_plugin.calls import TorchCalls


@functools.cache
def takes_backends() -> bool:
    """Tell whether this torch lets Python make a Backend: some have the class, and no constructor."""
    try:
        Backend.__init__(Backend.__new__(type("Probe", (Backend,), {})), 0, 1)
    except TypeError:
        return False
    return True


@untraced
class TorchBackend(TorchCalls, Backend):  # type: ignore[misc, unused-ignore]
    """A torch Backend for CPU tensors around ``group``, one of procgroup's."""

    def __init__(self, group: ProcessGroup, *, name: str) -> None:
        Backend.__init__(self, group.rank(), group.size())
        self.group = group
        self._name = name

    def shutdown(self) -> None:
        """Leave in order; what was sent still arrives. Idempotent."""
        exit_hooks.leave(self.group)

    def abort(self) -> None:
        """Make every call in progress fail at once on this rank, and notify the others. Idempotent."""
        self.group.abort()
