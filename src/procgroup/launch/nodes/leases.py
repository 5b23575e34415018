"""Leases: when an agent is lost, and when it has lost the others.

Each agent counts a key of the store up. A watcher declares the agent lost when that count has not changed for
``Lease.seconds`` on the watcher's own clock, and in ``Lease.looks`` reads in a row: a watcher that was itself not
scheduled declares no agent lost. No times are exchanged. The agents form a ring, and each watches the few before it, so
the requests stay few. An agent whose own requests fail has lost the others. It sets ``Meeting.lost`` sooner than they
can declare it lost, so its ranks have ended when the others start::

    last beat ──Lease.latest_loss──> lost: SIGTERM to its ranks ──Lease.grace──> SIGKILL
    last beat ──Lease.seconds────────────────────────────────────────────────────────────> the others go on

A database server may be silent for a while, as when a cluster elects its leader. So that the agents survive that,
their beats and reads there are twice as frequent, and their requests have half the timeout: the last beat is more
recent, the last request can begin later, and the reads that were missed are soon made up for.

When the store's host is cut off, that host notices it after ``Lease.seconds``, by the counts of the others. The others
notice it sooner, and wait for the difference before they begin a round at another store (``Lease.lead``).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from procgroup.errors import DistStoreError, StoreLost, StoreTimeout
from procgroup.launch.deadlines import REQUEST_PAUSE_SECONDS
from procgroup.launch.nodes.job_state import JobState, Node

_WATCHED = 8


class Lease(NamedTuple):
    """The interval at which an agent renews its lease, and the seconds after which the lease ends."""

    interval: float = 1.0
    seconds: float = 5.0

    @property
    def server_interval(self) -> float:
        """The interval where the store is on a database server."""
        return self.interval / 2

    @property
    def looks(self) -> int:
        """How many reads in a row must find the same count."""
        return max(2, int(self.seconds / self.interval))

    @property
    def request_seconds(self) -> float:
        """How long one request to the store may take."""
        return max(0.2, self.seconds / 6)

    @property
    def server_request_seconds(self) -> float:
        """How long one request may take where the store is on a database server."""
        return max(0.2, self.seconds / 12)

    @property
    def earliest_loss(self) -> float:
        """How many seconds after its last beat an agent whose store is silent has lost the others, at the earliest."""
        return 0.7 * self.seconds

    @property
    def latest_loss(self) -> float:
        """The same, at the latest: a last request begins up to ``earliest_loss``."""
        return self.earliest_loss + self.request_seconds

    @property
    def lead(self) -> float:
        """The time between an agent's end of waiting for a silent store, and its loss as the store's host sees it."""
        return self.seconds - self.earliest_loss

    @property
    def grace(self) -> float:
        """How many seconds ranks have to end when their agent has lost the others."""
        return 0.15 * self.seconds


class Watcher:
    """Decides, for the agent ``node_id``, which of the agents that it watches are lost."""

    def __init__(self, node_id: str, lease: Lease) -> None:
        self._node_id = node_id
        self._lease = lease
        self._watched: dict[str, _WatchedAgent] = {}
        self._looked = time.monotonic()

    def nodes(self, state: JobState | None) -> list[Node]:
        """Return the nodes to watch: those before this one in the ring; none while this node is not in it."""
        nodes = [] if state is None else [*state.members, *state.waiting]
        here = next((index for index, node in enumerate(nodes) if node.id == self._node_id), None)
        if here is None or len(nodes) == 1 or state is None or state.phase == "ended":
            self._looked = time.monotonic()
            return []
        return [nodes[here - distance] for distance in range(1, min(_WATCHED + 1, len(nodes)))]

    def look(
        self, nodes: Sequence[Node], beats: Sequence[bytes], gone: set[str]
    ) -> tuple[dict[str, str], dict[str, str]]:
        """Return the nodes whose agents have died, and those whose agents are silent: id to how that was seen.

        ``beats`` are the nodes' present counts, ``gone`` the ids of those whose connections have ended. The connections
        of an agent that dies end at once, between two counts. An agent that has lost this store ends them, too, but
        late, and may go on elsewhere. So the end of a connection is a death only where the last count is recent, and
        where this agent was itself scheduled meanwhile.
        """
        now = time.monotonic()
        was_away = now - self._looked >= self._lease.seconds / 2
        self._looked = now
        self._watched = {node.id: self._watched.get(node.id, _WatchedAgent()) for node in nodes}
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


class _WatchedAgent:
    """What a watcher knows of another agent's count."""

    def __init__(self) -> None:
        self._beat = b""
        self._since = 0.0
        self._looks = 0

    def stands_still(self, beat: bytes, lease: Lease) -> bool:
        """Return whether the count has not changed for the lease's seconds and reads."""
        if beat != self._beat:
            self._beat, self._since, self._looks = beat, time.monotonic(), 0
            return False
        self._looks += 1
        return self._looks >= lease.looks and time.monotonic() - self._since >= lease.seconds

    def is_recent(self, lease: Lease) -> bool:
        """Return whether the count has changed within half of the lease's seconds."""
        return time.monotonic() - self._since < lease.seconds / 2


_ATTEMPTS = 3


class LeaseRequests:
    """Repeats one agent's requests to the agents' store at ``place``.

    ``is_on_server`` means that the store is on a database server and not hosted by an agent: a server that cannot
    be reached may be back soon, or another member of its cluster may answer. ``closing`` is set when the agent needs no
    more answers. ``beaten`` is the time of the agent's last beat.
    """

    def __init__(self, lease: Lease, place: str, closing: threading.Event, *, is_on_server: bool) -> None:
        self.is_on_server = is_on_server
        self.interval: float = lease.server_interval if is_on_server else lease.interval
        self.beaten: float = time.monotonic()
        self._attempt_seconds = lease.server_request_seconds if is_on_server else lease.request_seconds
        self._latest_loss = lease.latest_loss
        self._place = place
        self._closing = closing

    def persist(self, request: Callable[[], object]) -> None:
        """Repeat a request until the store answers; the store may execute it more than once.

        Raises StoreLost when the agent that hosts the store has ended, DistStoreError when the store has been silent
        for too long. Several attempts in a row must have failed, so that an agent which was itself not scheduled does
        not declare the store lost.
        """
        attempts = 0
        while True:
            attempts += 1
            try:
                request()
                return
            except (StoreTimeout, StoreLost) as error:
                if isinstance(error, StoreLost) and not self.is_on_server:
                    raise
                # One more attempt could end too late to end this agent's ranks in time.
                is_late = time.monotonic() - self.beaten + self._attempt_seconds >= self._latest_loss
                if self._closing.is_set() or (attempts >= _ATTEMPTS and is_late):
                    raise DistStoreError(self._silence(error)) from None
            self._closing.wait(REQUEST_PAUSE_SECONDS)

    def _silence(self, error: StoreTimeout | StoreLost) -> str:
        reason = f": {error.reason}" if isinstance(error, StoreLost) else ""
        return f"the agents' store at {self._place} has been silent for {time.monotonic() - self.beaten:.1f} s{reason}"
