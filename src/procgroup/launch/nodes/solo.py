"""The meeting of a job that has one node: the methods of Meeting, without a store."""

from __future__ import annotations

from collections.abc import Callable

from procgroup.launch.nodes import job_changes
from procgroup.launch.nodes.job_changes import Change
from procgroup.launch.nodes.job_state import JobState, Node, Settings


class Solo:
    """The meeting of a job with one node, which applies each change at once."""

    def __init__(self, node: Node, settings: Settings, wake: Callable[[], None]) -> None:
        self.state: JobState | None = job_changes.join(JobState(settings), node, settings)
        self.node_id: str = node.id
        self.place: str = ""
        self.lost: str = ""
        self.is_silent: bool = False
        self.moves: bool = False
        self.error: Exception | None = None
        self._wake = wake

    def propose(self, change: Change) -> None:
        """Apply a change to the state."""
        assert self.state is not None
        changed = change(self.state)
        if changed is not None:
            self.state = changed._replace(version=self.state.version + 1)
            self._wake()

    def settle(self, seconds: float) -> None:
        """Do nothing: changes are applied when they are proposed."""

    def hand_over(self, seconds: float) -> None:
        """Do nothing: there are no other nodes."""

    def forget_torch(self) -> None:
        """Do nothing: no agents' store serves PyTorch's clients."""

    def close(self) -> None:
        """Do nothing: there is no store."""
