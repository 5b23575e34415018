"""Requests to the agents' store, repeated until it answers or has been silent for too long (see leases.py)."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from procgroup.errors import DistStoreError, StoreLost, StoreTimeout
from procgroup.launch.nodes.leases import Lease

PAUSE_SECONDS = 0.02

_ATTEMPTS = 3


class StoreRequests:
    """How one agent gets answers from the agents' store, which is at ``place``.

    ``is_on_server`` says that no agent hosts the store: a server that is gone may be back soon, or another member of
    its cluster may answer. ``closing`` is set when the agent needs no answer any more. ``beaten`` is when this agent
    last showed that it lives.
    """

    def __init__(self, lease: Lease, place: str, closing: threading.Event, *, is_on_server: bool) -> None:
        self.is_on_server = is_on_server
        self.interval: float = lease.server_interval if is_on_server else lease.interval
        self.beaten: float = time.monotonic()
        self._attempt_seconds = lease.server_request_seconds if is_on_server else lease.request_seconds
        self._latest = lease.latest
        self._place = place
        self._closing = closing

    def persist(self, request: Callable[[], object]) -> None:
        """Make a request again until the store answers; it may reach the store more than once.

        Raises StoreLost when the agent that hosts the store is gone, DistStoreError when the store has been silent for
        too long. Several attempts in a row must have failed, so that an agent which was itself away takes no store for
        lost.
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
                if self._closing.is_set() or (attempts >= _ATTEMPTS and self._is_late()):
                    raise DistStoreError(self._silence(error)) from None
            self._closing.wait(PAUSE_SECONDS)

    def _is_late(self) -> bool:
        """Return whether one more attempt could end too late for this agent's ranks."""
        return time.monotonic() - self.beaten + self._attempt_seconds >= self._latest

    def _silence(self, error: StoreTimeout | StoreLost) -> str:
        reason = f": {error.reason}" if isinstance(error, StoreLost) else ""
        return f"the agents' store at {self._place} has been silent for {time.monotonic() - self.beaten:.1f} s{reason}"
