"""The meeting of a job that has one node: what Meeting is for several, without a store."""

from __future__ import annotations

from collections.abc import Callable

from procgroup.launch.nodes import job_changes
from procgroup.launch.nodes.job_changes import Change
from procgroup.launch.nodes.job_state import JobState, Node, Settings


class Solo:
    """The meeting of a job with one node: it agrees with itself at once."""

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
        """Apply a change to the state, where it applies."""
        assert self.state is not None
        changed = change(self.state)
        if changed is not None:
            self.state = changed._replace(version=self.state.version + 1)
            self._wake()

    def settle(self, seconds: float) -> None:
        """Wait until what was proposed is done; it is."""

    def hand_over(self, seconds: float) -> None:
        """Let the others go on without this node; there are none."""

    def forget_torch(self) -> None:
        """Forget the keys of PyTorch's clients; there are none."""

    def close(self) -> None:
        """Leave nothing; there is nothing."""
