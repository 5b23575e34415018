"""Requests to the agents' store, repeated until the store answers or has been silent for too long (see leases.py)."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from procgroup.errors import DistStoreError, StoreLost, StoreTimeout
from procgroup.launch.nodes.leases import Lease

PAUSE_SECONDS = 0.02

_ATTEMPTS = 3


class StoreRequests:
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
                if self._closing.is_set() or (attempts >= _ATTEMPTS and self._is_late()):
                    raise DistStoreError(self._silence(error)) from None
            self._closing.wait(PAUSE_SECONDS)

    def _is_late(self) -> bool:
        """Return whether one more attempt could end too late to end this agent's ranks in time."""
        return time.monotonic() - self.beaten + self._attempt_seconds >= self._latest_loss

    def _silence(self, error: StoreTimeout | StoreLost) -> str:
        reason = f": {error.reason}" if isinstance(error, StoreLost) else ""
        return f"the agents' store at {self._place} has been silent for {time.monotonic() - self.beaten:.1f} s{reason}"
