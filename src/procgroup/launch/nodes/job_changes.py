"""The changes that a job's state goes through: pure functions from one version to the next.

Each change is applied to the latest state, and the store accepts only one agent's result for each version (see
shared_state.py)::

    forming ──enough members──> running ──a rank fails, a node comes or goes──> stopping
       ^                           │                                               │
       │                    all have finished                         all members have stopped
       │                           v                                               │
       │                         ended  <──────────no restart is left──────────────┤
       └───────────────────────────────────round + 1───────────────────────────────┘

A change returns None where it no longer applies: another agent has made it, or another round has begun. No change
reads a clock: the agents decide how long to wait for further members, and when a node is lost.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from procgroup.errors import JobConflict, JobEnded
from procgroup.launch.hosted_store import WorkerStore
from procgroup.launch.nodes.job_state import JobState, Node, Settings, can_begin

Change = Callable[[JobState], JobState | None]
"""A function from a state to the next one; None where it does not apply."""

MAX_FAILURES = 64
"""The largest number of failures that the state holds; further ones are left out."""


def join(state: JobState, node: Node, settings: Settings) -> JobState | None:
    """Add a node: to the members while a round is forming, else to the nodes that wait for the next round.

    Raises JobConflict where the job has other settings or another node holds the node's rank, JobEnded where the job
    has ended. A round that runs with fewer nodes than the maximum is stopped, so that the next one has the node, too.
    An agent that joins again has ended its ranks, so its earlier node is removed as lost.
    """
    if state.node(node.id) is not None:
        return None
    here = (*state.members, *state.waiting)
    earlier = {other.id: "its agent had lost the store" for other in here if other.agent == node.agent}
    if earlier:
        state = lose(state, earlier, silent=True) or state
    if state.phase == "ended":
        raise JobEnded(f"the job has ended: {state.reason or 'all its ranks have finished'}")
    _check_settings(state, settings)
    _check_node_rank(state, node)
    if state.phase == "forming":
        return _begin_when_full(state._replace(members=(*state.members, node)))
    state = state._replace(waiting=(*state.waiting, node))
    if state.phase == "running" and len(state.members) < settings.max_nodes:
        return _stop(state, f"{state.name(node)} has joined")
    return state


def recall(state: JobState, memory: JobState) -> JobState | None:
    """Bring the state of a new store up to the state that an agent remembers from a lost store.

    The number of the round goes on, and the quorum refers to the last round that ran. A store that holds a later round
    is not changed.
    """
    if state.phase != "forming" or state.round > memory.round:
        return None
    return state._replace(
        round=memory.round + 1,
        restarts=max(state.restarts, memory.restarts),
        previous=memory.previous,
        is_recovery=True,
    )


def begin(state: JobState, round_number: int) -> JobState | None:
    """Begin the forming round, without waiting for further nodes."""
    if state.round != round_number or not can_begin(state):
        return None
    return _begin(state)


def publish(state: JobState, round_number: int, store: WorkerStore) -> JobState | None:
    """Publish the store of the running round's ranks."""
    if state.round != round_number or state.phase != "running" or state.store is not None:
        return None
    return state._replace(store=store)


def finish(state: JobState, round_number: int, node_id: str) -> JobState | None:
    """Record that all ranks of a member have ended with exit status 0; with the last member the job ends."""
    if state.round != round_number or state.phase != "running" or node_id in state.passed:
        return None
    state = state._replace(passed=(*state.passed, node_id))
    return state._replace(phase="ended") if _all_passed(state) else state


def fail(
    state: JobState, round_number: int, reason: str, failures: Sequence[str] = (), exit_status: int = 1
) -> JobState | None:
    """Stop the running round because a rank failed or could not be started; it counts as one restart of the job.

    When the round is being stopped already, the failures are added to what is known about it.
    """
    if state.round != round_number or state.phase not in ("running", "stopping"):
        return None
    new = [failure for failure in failures if failure not in state.failures]
    merged = (*state.failures, *new)[:MAX_FAILURES]
    if state.phase == "stopping":
        return state._replace(failures=merged) if new else None
    return _stop_after_failure(state._replace(failures=merged), reason, exit_status)


def warn(state: JobState, round_number: int, seconds: float) -> JobState | None:
    """Record that a scheduler takes a node away in so many seconds, for the ranks of all members."""
    if state.round != round_number or state.phase != "running" or state.notice:
        return None
    return state._replace(notice=seconds)


def stopped(state: JobState, round_number: int, node_id: str, failures: Sequence[str] = ()) -> JobState | None:
    """Record that the ranks of a member have ended in a stopping round; with the last member the round ends."""
    if state.round != round_number or state.phase != "stopping" or node_id in state.passed:
        return None
    merged = (*state.failures, *failures)[:MAX_FAILURES]
    return _conclude(state._replace(passed=(*state.passed, node_id), failures=merged))


def lose(state: JobState, nodes: Mapping[str, str], *, silent: bool) -> JobState | None:
    """Remove lost nodes; ``nodes`` maps the id of each to a description of how its loss was seen.

    ``silent`` nodes may still run behind a network that is cut, and so count in the quorum. A loss in a running round
    counts as one restart of the job. The loss of a member that has finished changes nothing.
    """
    gone = [node for node in (*state.members, *state.waiting) if node.id in nodes]
    if state.phase == "running":
        gone = [node for node in gone if node.id not in state.passed]
    if not gone or state.phase == "ended":
        return None
    were_members = [node for node in gone if node in state.members]
    how = "; ".join(f"{state.name(node)} was lost: {nodes[node.id]}" for node in gone)
    state = _without(state, gone, keep_in_previous=silent)
    if not state.members:
        return _anew(state)
    if state.phase == "running" and were_members:
        return _stop_after_failure(state, how, 1)
    return _conclude(state) if state.phase == "stopping" else state


def leave(state: JobState, node_id: str, reason: str, *, exit_status: int, for_good: bool) -> JobState | None:
    """Remove a node that leaves in order after its ranks have ended; the others go on if they are enough.

    If they are too few, they wait for another node, provided that a restart is left and the node does not leave
    ``for_good``; otherwise the job ends everywhere.
    """
    node = state.node(node_id)
    if node is None or state.phase == "ended":
        return None
    was_member = node in state.members
    said = f"{state.name(node)} has left: {reason}"
    state = _without(state, [node], keep_in_previous=False)
    state = state._replace(is_moving=state.is_moving or node.hosts_store)
    if state.phase == "forming" or not was_member:
        return state
    left = len(state.members) + len(state.waiting)
    has_store = not node.hosts_store or any(other.can_host for other in (*state.members, *state.waiting))
    can_go_on = left >= state.settings.min_nodes and has_store
    can_wait = not for_good and state.restarts < state.settings.max_restarts
    if state.phase == "running":
        if can_go_on or can_wait:
            return _conclude(_stop(state, said))
        state = _stop(state, said, is_last=True, exit_status=exit_status)
    return _conclude(state)


def anew(state: JobState) -> JobState | None:
    """Begin a new job in the place of one that has ended and whose agents have exited."""
    return _anew(state)._replace(restarts=0) if state.phase == "ended" else None


def after_losing_store(state: JobState, *, silent: bool) -> JobState:
    """Return the state that an agent remembers after the loss of the store, which counts like the loss of a node.

    Unless the store is ``silent``, its connections have ended, so the agent that hosted it has exited and cannot run
    ranks elsewhere.
    """
    hosts = [] if silent else [node.agent for node in state.members if node.hosts_store]
    return state._replace(
        restarts=state.restarts + (state.phase == "running" and not state.is_moving),
        previous=tuple(old for old in state.previous if old not in hosts),
    )


def end(state: JobState, reason: str, exit_status: int) -> JobState | None:
    """End the job everywhere."""
    if state.phase == "ended":
        return None
    if state.phase == "forming":
        return state._replace(phase="ended", is_last=True, reason=reason, exit_status=exit_status)
    return _conclude(_stop(state, reason, is_last=True, exit_status=exit_status))


def _check_settings(state: JobState, settings: Settings) -> None:
    for name, theirs in state.settings._asdict().items():
        mine = getattr(settings, name)
        if mine != theirs:
            others = state.hosts or "the job"
            flag = {"min_nodes": "nnodes", "max_nodes": "nnodes"}.get(name, name.replace("_", "-"))
            raise JobConflict(
                f"the nodes disagree: {name} is {mine!r} here and {theirs!r} on {others}. "
                f"Give every node the same --{flag.replace('_', '-')}."
            )


def _check_node_rank(state: JobState, node: Node) -> None:
    for other in (*state.members, *state.waiting):
        if node.rank is not None and other.rank == node.rank:
            raise JobConflict(
                f"two nodes have --node-rank {node.rank}: {other} and {node}. Number the nodes from 0 to "
                f"{state.settings.max_nodes - 1}, each with a different number."
            )


def _begin_when_full(state: JobState) -> JobState:
    return _begin(state) if len(state.members) == state.settings.max_nodes else state


def _begin(state: JobState) -> JobState:
    places = {agent: place for place, agent in enumerate(state.previous)}
    came_last = len(places)
    members = tuple(
        sorted(state.members, key=lambda node: places.get(node.agent, came_last) if node.rank is None else node.rank)
    )
    return state._replace(
        phase="running",
        members=members,
        passed=(),
        previous=tuple(node.agent for node in members),
        is_recovery=False,
        reason="",
        failures=(),
        store=None,
        notice=0.0,
    )


def _stop(state: JobState, reason: str, *, is_last: bool = False, exit_status: int = 0) -> JobState:
    """Stop the round on every member; a member that has finished takes part in the next round, too."""
    if state.phase == "stopping":
        return state._replace(
            is_last=state.is_last or is_last,
            reason=state.reason if state.is_last else reason,
            exit_status=state.exit_status or exit_status,
        )
    return state._replace(phase="stopping", passed=(), reason=reason, is_last=is_last, exit_status=exit_status)


def _stop_after_failure(state: JobState, reason: str, exit_status: int) -> JobState:
    if state.restarts >= state.settings.max_restarts:
        return _conclude(_stop(state, reason, is_last=True, exit_status=exit_status))
    return _conclude(_stop(state, reason)._replace(restarts=state.restarts + 1))


def _anew(state: JobState) -> JobState:
    """Begin again with the waiting nodes as the members; the number of used restarts is kept."""
    fresh = JobState(state.settings, version=state.version, round=state.round + 1, members=state.waiting)
    return _begin_when_full(fresh._replace(restarts=state.restarts))


def _all_passed(state: JobState) -> bool:
    return all(node.id in state.passed for node in state.members)


def _conclude(state: JobState) -> JobState:
    """End a stopping round once the ranks of every member have ended: form the next round, or end the job."""
    if state.phase != "stopping" or not _all_passed(state):
        return state
    if state.is_last:
        return state._replace(phase="ended")
    room = state.settings.max_nodes - len(state.members)
    state = state._replace(
        phase="forming",
        round=state.round + 1,
        members=(*state.members, *state.waiting[:room]),
        waiting=state.waiting[room:],
        passed=(),
        store=None,
    )
    return _begin(state) if can_begin(state) else state


def _without(state: JobState, gone: Sequence[Node], *, keep_in_previous: bool) -> JobState:
    ids = {node.id for node in gone}
    agents = {node.agent for node in gone}
    return state._replace(
        members=_others(state.members, ids),
        waiting=_others(state.waiting, ids),
        passed=tuple(node_id for node_id in state.passed if node_id not in ids),
        previous=state.previous if keep_in_previous else tuple(old for old in state.previous if old not in agents),
    )


def _others(nodes: Iterable[Node], ids: set[str]) -> tuple[Node, ...]:
    return tuple(node for node in nodes if node.id not in ids)
