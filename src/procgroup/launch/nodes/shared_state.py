"""The state of a job as its agents share it: versions in a store, each of which one agent writes.

A *version* of the state is one key of the store, written once and never changed. A *change* is a function from a state
to the next one (see job_changes.py). The agent that writes the key of the next version first decides that version; the
other agents apply their changes to it and try the version after it. So every agent sees the same states in the same
order, whatever the store is::

    latest       the number of a recent version, for agents that join         set
    state/N      version N as JSON; "passed" once 64 later ones exist         compare_set, expecting no value
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from procgroup.launch.nodes.job_changes import Change
from procgroup.launch.nodes.job_state import JobState, Settings
from procgroup.stores.store import Store

_KEPT_VERSIONS = 64
_PASSED = b"passed"


class SharedState:
    """One agent's view of the versions in a store; ``on_change`` is called when a later one is known.

    Its requests raise what the store raises. They may be repeated.
    """

    def __init__(self, store: Store, settings: Settings, on_change: Callable[[], None]) -> None:
        self.latest: JobState | None = None
        self._store = store
        self._settings = settings
        self._on_change = on_change
        self._lock = threading.Lock()

    def find(self) -> None:
        """Read the latest version, or write the first one."""
        if self._store.check(["latest"]):
            self._take(_read_latest(self._store))
        else:
            first = JobState(self._settings).to_json()
            self._take(self._store.compare_set("state/0", "", first))
            self._store.compare_set("latest", "", "0")

    def await_next(self, seconds: float) -> None:
        """Read the version after the latest known one, once it is written. Raises StoreTimeout."""
        assert self.latest is not None
        self._take(self._store.get(f"state/{self.latest.version + 1}", seconds))

    def apply(self, change: Change) -> None:
        """Write the version that the change makes of the latest one; try again after each version of another agent."""
        while True:
            state = self.latest
            assert state is not None
            changed = change(state)
            if changed is None:
                return
            changed = changed._replace(version=state.version + 1)
            text = changed.to_json().encode()
            written = self._store.compare_set(f"state/{changed.version}", "", text)
            self._take(written)
            if written == text:
                self._store.set("latest", str(changed.version))
                if changed.version >= _KEPT_VERSIONS:
                    self._store.set(f"state/{changed.version - _KEPT_VERSIONS}", _PASSED)
                return

    def _take(self, text: bytes) -> None:
        """Make a version the latest known one, unless a later one is known."""
        state = JobState.from_json(_read_latest(self._store) if text == _PASSED else text)
        with self._lock:
            if self.latest is not None and state.version <= self.latest.version:
                return
            self.latest = state
        self._on_change()


def read_latest(store: Store) -> JobState | None:
    """Return the latest state in a store; None where the job has none there. Raises ValueError for an unusable one."""
    return JobState.from_json(_read_latest(store)) if store.check(["latest"]) else None


def _read_latest(store: Store) -> bytes:
    while True:
        text = store.get("state/" + store.get("latest").decode())
        if text != _PASSED:
            return text
