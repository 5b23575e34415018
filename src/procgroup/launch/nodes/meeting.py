"""How the agents of a job agree on its state, through a store that all of them reach.

The versions of the state are in shared_state.py. Beside them the store has two keys for each agent::

    beat/ID      a counter; agent ID sets it 1 higher in every interval       set
    gone/ID      exists when the store has seen the connection of ID end      set_on_disconnect

leases.py defines when an agent is lost, and when it has lost the others. No times are exchanged.

Two threads serve one agent: one waits for the next version of the state; the other renews the agent's lease, watches
those of others, and applies changes. The agent's own thread never waits for the store.
"""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial

from procgroup.errors import DistError, DistStoreError, JobConflict, JobEnded, StoreLost, StoreTimeout
from procgroup.launch.deadlines import (
    AGENTS_LINGER_SECONDS,
    ELSEWHERE_SECONDS,
    LOOK_ELSEWHERE_SECONDS,
    MEETING_CLOSE_SECONDS,
    REQUEST_PAUSE_SECONDS,
)
from procgroup.launch.nodes import job_changes
from procgroup.launch.nodes.endpoints import FoundStore
from procgroup.launch.nodes.job_changes import Change
from procgroup.launch.nodes.job_state import JobState, is_active
from procgroup.launch.nodes.leases import Lease, LeaseRequests, Watcher
from procgroup.launch.nodes.meeting_plan import MeetingPlan
from procgroup.launch.nodes.shared_state import SharedState, read_latest
from procgroup.stores.prefix import PrefixStore
from procgroup.stores.store import OnDisconnect, Store


class Meeting:
    """One agent's view of the job, which threads of its own keep up to date.

    ``state`` is the latest known state, None until this node has joined. ``wake`` is called in another thread whenever
    ``state``, ``lost`` or ``error`` has changed. ``lost`` is the reason why the store at ``place`` cannot be reached;
    then ``is_silent`` means that the store's connections have not ended, and ``moves`` that this agent left the store
    for a better one. ``error`` is the exception that keeps the node out of the job. ``memory`` is the last state that
    this agent knows from a store that was lost.

    While nodes are missing at the store that this agent hosts, the agent checks whether more nodes have met at another
    endpoint of the plan.
    """

    def __init__(self, plan: MeetingPlan, wake: Callable[[], None], memory: JobState | None) -> None:
        self.node_id: str = os.urandom(8).hex()
        self.place: str = plan.meeting_place()
        self.lost: str = ""
        self.is_silent: bool = False
        self.moves: bool = False
        self.error: Exception | None = None
        self._plan = plan
        self._memory = memory
        self._lease: Lease = plan.lease
        self._wake = wake
        self._changes: queue.SimpleQueue[Change | threading.Event] = queue.SimpleQueue()
        self._closing = threading.Event()
        self._joined = threading.Event()
        self._found: FoundStore | None = None
        self._shared: SharedState | None = None
        self._has_joined = False
        self._has_handed_over = False
        self._store: Store
        self._watcher = Watcher(self.node_id, self._lease)
        self._looks_elsewhere_at = 0.0
        self._beats = 0
        self._on_disconnect: OnDisconnect | None = None
        self._requests: LeaseRequests
        self._threads = [
            threading.Thread(target=self._guarded, args=(serve,), name=name, daemon=True)
            for serve, name in ((self._serve, "procgroup-beat"), (self._follow, "procgroup-follow"))
        ]
        for thread in self._threads:
            thread.start()

    @property
    def _known(self) -> JobState | None:
        return self._shared.latest if self._shared is not None else None

    @property
    def state(self) -> JobState | None:
        """The latest known state, once this node has joined."""
        return self._known if self._has_joined else None

    def propose(self, change: Change) -> None:
        """Queue a change, which is applied as soon as the store answers. Never waits."""
        self._changes.put(change)

    def settle(self, seconds: float) -> None:
        """Wait until all proposed changes have reached the store, at most so many seconds."""
        if not self._has_joined:
            return
        done = threading.Event()
        self._changes.put(done)
        done.wait(seconds)

    def hand_over(self, seconds: float) -> None:
        """Wait until the others have ended their ranks where this agent hosts the store, at most so many seconds."""
        deadline = time.monotonic() + seconds
        while self._is_moving() and time.monotonic() < deadline and not self.lost:
            time.sleep(REQUEST_PAUSE_SECONDS)
        self._has_handed_over = self._found is not None and self._known is not None and self._known.is_moving

    def _is_moving(self) -> bool:
        state = self._known
        return state is not None and state.is_moving and state.phase == "stopping" and bool(state.members)

    def forget_torch(self) -> None:
        """Forget the keys of PyTorch's clients, where this agent hosts them: the next round must not see them."""
        if self._found is not None and self._found.server is not None:
            self._found.server.forget_torch()

    def close(self) -> None:
        """End the threads and close the store; the other agents then know that this one has ended. Idempotent."""
        deadline = time.monotonic() + MEETING_CLOSE_SECONDS
        self._closing.set()
        self._changes.put(lambda state: None)
        self._joined.set()
        # Closing the connections ends a thread that waits for a store which does not answer.
        self._threads[0].join(0.0 if self.lost else MEETING_CLOSE_SECONDS)
        if self._found is not None:
            leaves_at_once = bool(self.lost or self.error is not None or self._has_handed_over)
            self._found.close_after_clients(0.0 if leaves_at_once else AGENTS_LINGER_SECONDS)
        for thread in self._threads:
            thread.join(max(REQUEST_PAUSE_SECONDS, deadline - time.monotonic()))

    def _guarded(self, serve: Callable[[], None]) -> None:
        try:
            serve()
        except (JobConflict, JobEnded) as error:
            self.error = error
        except DistError as error:
            if self._found is None:
                self.error = self.error or error
            elif not self._closing.is_set():
                self.is_silent = self.is_silent or not isinstance(error, StoreLost)
                self.lost = self.lost or str(error)
        except Exception as error:
            self.error = error
        self._joined.set()
        self._wake()

    def _serve(self) -> None:
        self._join()
        next_beat = time.monotonic()
        while not self._closing.is_set():
            with suppress(queue.Empty):
                self._take_one(max(0.0, next_beat - time.monotonic()))
            if time.monotonic() >= next_beat:
                next_beat = time.monotonic() + self._requests.interval
                self._look_after_leases()
                self._look_elsewhere()
        if self._on_disconnect is not None:
            with suppress(DistError):
                self._on_disconnect.withdraw()

    def _take_one(self, seconds: float) -> None:
        change = self._changes.get(timeout=seconds)
        if isinstance(change, threading.Event):
            change.set()
        else:
            self._apply(change)

    def _join(self) -> None:
        self._found = self._plan.find_store(self._closing.is_set)
        self._store = PrefixStore(
            f"agents/{self._plan.job.run_id}", self._found.store.with_timeout(self._lease.request_seconds)
        )
        node = self._plan.node(self.node_id, self._found)
        is_on_server = self._found.is_on_server
        self._requests = LeaseRequests(self._lease, self.place, self._closing, is_on_server=is_on_server)
        self._requests.persist(self._beat)
        self._on_disconnect = self._store.set_on_disconnect(f"gone/{self.node_id}", "")
        self._shared = SharedState(self._store, self._plan.settings, self._wake)
        self._requests.persist(self._shared.find)
        if self._memory is not None:
            memory = self._memory
            self._apply(lambda state: job_changes.recall(state, memory))
        join = partial(job_changes.join, node=node, settings=self._plan.settings)
        try:
            self._apply(join)
        except JobEnded:
            # If no agent of the job that has ended still runs, a new job may use the store.
            keys = [f"beat/{node.id}" for node in (self._known.members if self._known is not None else ())]
            before = self._store.multi_get(keys)
            if not self._closing.wait(self._lease.seconds) and self._store.multi_get(keys) != before:
                raise
            self._apply(job_changes.anew)
            self._apply(join)
        self._has_joined = True
        self._joined.set()
        self._wake()

    def _beat(self) -> None:
        """Renew this agent's lease: raise its counter in the store by 1."""
        began = time.monotonic()
        self._beats += 1
        # Where one member of a cluster does not answer, the request is sent to another: a value may be set twice, while
        # a sum would count twice.
        self._store.set(f"beat/{self.node_id}", str(self._beats))
        self._requests.beaten = began

    def _follow(self) -> None:
        self._joined.wait()
        while self._shared is not None and not (self._closing.is_set() or self.lost or self.error):
            if self._shared.latest is None or self._shared.latest.phase == "ended":
                return
            try:
                self._shared.await_next(self._lease.interval)
            except StoreTimeout:
                pass
            except StoreLost:
                if not self._requests.is_on_server:
                    raise
                self._closing.wait(
                    REQUEST_PAUSE_SECONDS
                )  # the requests of the other thread decide when the store is lost

    def _apply(self, change: Change) -> None:
        """Change the state, as soon as the store answers."""
        assert self._shared is not None
        self._requests.persist(partial(self._shared.apply, change))

    def _look_after_leases(self) -> None:
        """Renew this agent's lease, and check the leases of the agents that it watches."""
        self._requests.persist(self._beat)
        nodes = self._watcher.nodes(self._known)
        if not nodes:
            return
        beats: list[bytes] = []
        gone: list[str] = []

        def look() -> None:
            beats[:] = self._store.multi_get([f"beat/{node.id}" for node in nodes])
            gone[:] = self._store.list_keys("gone/") if self._on_disconnect is not None else []

        self._requests.persist(look)
        dead, silent = self._watcher.look(nodes, beats, {key.removeprefix("gone/") for key in gone})
        for lost, is_silent in ((dead, False), (silent, True)):
            if lost:
                self._apply(partial(job_changes.lose, nodes=lost, silent=is_silent))

    def _look_elsewhere(self) -> None:
        """Leave the store that this agent hosts for one at which more nodes have met; if equal, for the first listed.

        Two stores exist when agents were started, or lost their store, while a network was cut.
        """
        state, found = self._known, self._found
        if len(self._plan.endpoints) < 2 or found is None or found.server is None or state is None:
            return
        if state.phase not in ("forming", "running") or len(state.members) == state.settings.max_nodes:
            return
        if time.monotonic() < self._looks_elsewhere_at:
            return
        with suppress(DistError):
            self.moves = any(self._is_better(place, other, state) for place, other in self._plan.others(found))
        pause = LOOK_ELSEWHERE_SECONDS if is_active(state) else 0.0
        self._looks_elsewhere_at = time.monotonic() + pause
        if self.moves:
            raise DistStoreError("more of the other nodes have met at another endpoint")

    def _is_better(self, place: int, other: FoundStore, mine: JobState) -> bool:
        """Return whether to move to another store, ``place`` entries further in the list of endpoints; close it."""
        try:
            store = PrefixStore(f"agents/{self._plan.job.run_id}", other.store.with_timeout(ELSEWHERE_SECONDS))
            theirs = read_latest(store)
        except (DistError, ValueError):
            return False
        finally:
            other.close_after_clients(0)
        if theirs is None or theirs.phase == "ended":
            return False
        weights = [(is_active(state), len(state.members)) for state in (mine, theirs)]
        return weights[1] > weights[0] or (weights[1] == weights[0] and place < 0)
