"""When an agent is lost, and when it has lost the others.

An agent is lost when its beats stand still for ``Lease.seconds`` on the clock of whoever watches it, and in so many
looks: a watcher that was itself away from its core takes nobody for lost. No times are exchanged. Each agent watches
the few before it in the ring of all, so that the requests stay few. An agent whose own requests fail has lost the
others, and says so by ``lost``, sooner than they can take it for lost: so its ranks have ended when others start::

    last answer ──Lease.patience──> lost: SIGTERM to its ranks ──Lease.grace──> SIGKILL
    last beat   ──Lease.seconds────────────────────────────────────────────────────────> the others go on

Where it is the store's host that is cut off, it finds that out by the beats of the others, after ``Lease.seconds``.
They find out sooner, and wait for as much longer before they begin a round at another store (``Timeouts.lead``).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import NamedTuple

from procgroup.launch.nodes.job_state import JobState, Node

Reasons = dict[str, str]

_WATCHED = 8


class Lease(NamedTuple):
    """How often an agent shows that it lives, and after how many seconds of silence it is lost."""

    interval: float = 1.0
    seconds: float = 5.0

    @property
    def looks(self) -> int:
        """How many looks in a row must find nothing new."""
        return max(2, int(self.seconds / self.interval))

    @property
    def request_seconds(self) -> float:
        """How long one request to the store may take."""
        return max(0.2, self.seconds / 6)

    @property
    def patience(self) -> float:
        """After how many seconds without an answer an agent has lost the others."""
        return 0.7 * self.seconds

    @property
    def grace(self) -> float:
        """How many seconds the ranks of an agent that has lost the others have to end."""
        return 0.15 * self.seconds


class Watcher:
    """Judges, for the agent ``node_id``, whether the agents that it watches live."""

    def __init__(self, node_id: str, lease: Lease) -> None:
        self._node_id = node_id
        self._lease = lease
        self._watched: dict[str, _Watched] = {}
        self._looked = time.monotonic()

    def nodes(self, state: JobState | None) -> list[Node]:
        """Return the nodes to look at: those before this one in the ring of all; none while it is no part of it."""
        nodes = [] if state is None else [*state.members, *state.waiting]
        here = next((index for index, node in enumerate(nodes) if node.id == self._node_id), None)
        if here is None or len(nodes) == 1 or state is None or state.phase == "ended":
            self._looked = time.monotonic()
            return []
        return [nodes[here - distance] for distance in range(1, min(_WATCHED + 1, len(nodes)))]

    def look(
        self, nodes: Sequence[Node], beats: Sequence[bytes], gone: set[str]
    ) -> tuple[dict[str, str], dict[str, str]]:
        """Return by id the nodes whose agents have died, and those that are silent, and how that was seen.

        ``beats`` are the nodes' beats by now, ``gone`` the ids of those whose connections have ended. An agent that
        dies ends its connections at once, between two beats. One that has lost this store ends them, too, but only
        after the lease's time, and may go on elsewhere: so the end of a connection is no death where the last beat is
        old, or where this agent was itself away and cannot tell.
        """
        now = time.monotonic()
        was_away = now - self._looked >= self._lease.seconds / 2
        self._looked = now
        self._watched = {node.id: self._watched.get(node.id, _Watched()) for node in nodes}
        dead, silent = {}, {}
        for node, beat in zip(nodes, beats, strict=True):
            watched = self._watched[node.id]
            stands_still = watched.stands_still(beat, self._lease)
            if node.id in gone and not was_away and watched.is_recent(self._lease):
                dead[node.id] = "its agent has ended"
            elif node.id in gone:
                silent[node.id] = "its agent has ended its connections"
            elif stands_still:
                silent[node.id] = f"its agent has been silent for {self._lease.seconds:g} s"
        return dead, silent


class _Watched:
    """What is known about another agent's beats."""

    def __init__(self) -> None:
        self._beat = b""
        self._since = 0.0
        self._looks = 0

    def stands_still(self, beat: bytes, lease: Lease) -> bool:
        """Return whether the beats have stood still for the lease's time and looks."""
        if beat != self._beat:
            self._beat, self._since, self._looks = beat, time.monotonic(), 0
            return False
        self._looks += 1
        return self._looks >= lease.looks and time.monotonic() - self._since >= lease.seconds

    def is_recent(self, lease: Lease) -> bool:
        """Return whether the last beat was not long ago."""
        return time.monotonic() - self._since < lease.seconds / 2
