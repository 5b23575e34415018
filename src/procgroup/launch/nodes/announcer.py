"""The lines that an agent prints about the job: its restarts, and the nodes that it waits for."""

from __future__ import annotations

import time

from procgroup.launch.deadlines import WAIT_REPEAT_SECONDS, WAIT_REPORT_SECONDS
from procgroup.launch.nodes.job_state import JobState, can_begin, returning_members
from procgroup.launch.output.job_output import JobOutput


class Announcer:
    """Prints what has changed from one state of the job to the next."""

    def __init__(self, output: JobOutput) -> None:
        self.waits_since: float = time.monotonic()
        self._output = output
        self._seen: JobState | None = None
        self._next_report = WAIT_REPORT_SECONDS
        self._is_spare = False

    def waited(self) -> float:
        """Return the seconds since the last change of the job's phase."""
        return time.monotonic() - self.waits_since

    def next_line(self) -> float:
        """Return the time.monotonic() at which ``wait_for_nodes`` has a line to print."""
        return self.waits_since + self._next_report

    def follow(self, state: JobState, node_id: str) -> None:
        """Print why the ranks end when they will be started again, and that this node has become a spare."""
        earlier, self._seen = self._seen, state
        if state.node_rank(node_id) is None and state.phase == "running" and not self._is_spare:
            self._is_spare = True
            self._output.say(
                f"this node is a spare: {len(state.members)} nodes run the job, and it replaces one that leaves"
            )
        if earlier is None or (state.phase, state.round) == (earlier.phase, earlier.round):
            return
        self.waits_since = time.monotonic()
        self._next_report = WAIT_REPORT_SECONDS
        if state.reason and not state.is_last and state.reason != earlier.reason:
            counted = f"restart {state.restarts} of {state.settings.max_restarts}"
            is_counted = state.restarts > earlier.restarts
            self._output.say(
                f"{state.reason}; {counted if is_counted else 'all ranks start again, which is not counted'}"
            )

    def wait_for_nodes(self, state: JobState | None, place: str) -> None:
        """Print which nodes, or which store at ``place``, this node waits for, once it has waited for a while."""
        if self.waited() >= self._next_report and (state is None or not can_begin(state)):
            self._next_report = self.waited() + WAIT_REPEAT_SECONDS
            self._output.say(f"waiting: {describe_waiting(state, place)}")


def describe_waiting(state: JobState | None, place: str) -> str:
    """Describe what a node waits for: the agents' store at ``place``, or other nodes."""
    if state is None:
        return f"the nodes' store at {place} is not reached, or an earlier job of this name has just ended there"
    here, hosts = len(state.members), state.hosts
    if here < state.settings.min_nodes:
        return f"{here} of at least {state.settings.min_nodes} nodes are here ({hosts}), at {place}"
    return (
        f"{returning_members(state)} of the {len(state.previous)} nodes of the last round are here ({hosts}); "
        "while the others may run ranks somewhere, only more than half go on (half with --on-partition continue)"
    )
