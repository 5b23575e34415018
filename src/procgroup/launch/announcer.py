"""What an agent says about the job: what has happened to it, for whom it waits, and how it has ended."""

from __future__ import annotations

import socket
import time

from procgroup.launch import job_changes
from procgroup.launch.console import Console
from procgroup.launch.job_state import JobState
from procgroup.launch.report import Failure, describe, first_failure
from procgroup.launch.worker_group import WorkerGroup

WAIT_REPORT_SECONDS = 5.0
"""After how many seconds an agent says for which nodes it waits, and once a minute from then on."""

_REPEAT_SECONDS = 60.0


class Announcer:
    """Says on the console what changes from one state of the job to the next.

    ``reports_own_ranks_only``: the agent whose rank failed first reports; the others write to the same console.
    """

    def __init__(self, console: Console, reports_own_ranks_only: bool = False) -> None:
        self.waits_since: float = time.monotonic()
        self._console = console
        self._reports_own_ranks_only = reports_own_ranks_only
        self._seen: JobState | None = None
        self._next_report = WAIT_REPORT_SECONDS

    def waited(self) -> float:
        """Return the seconds since the job was in another phase."""
        return time.monotonic() - self.waits_since

    def next_line(self) -> float:
        """Return the time.monotonic() at which ``wait_for_nodes`` has something to say."""
        return self.waits_since + self._next_report

    def follow(self, state: JobState) -> None:
        """Say why the ranks end, where they are to start again."""
        earlier, self._seen = self._seen, state
        if earlier is None or (state.phase, state.round) == (earlier.phase, earlier.round):
            return
        self.waits_since = time.monotonic()
        self._next_report = WAIT_REPORT_SECONDS
        if state.reason and not state.is_last and state.reason != earlier.reason:
            counted = f"restart {state.restarts} of {state.settings.max_restarts}"
            is_counted = state.restarts > earlier.restarts
            self._console.say(
                f"{state.reason}; {counted if is_counted else 'all ranks start again, which is not counted'}"
            )

    def wait_for_nodes(self, state: JobState | None) -> None:
        """Say for which nodes this one waits, when it has waited for a while."""
        if self.waited() >= self._next_report and (state is None or not job_changes.has_enough(state)):
            self._next_report = self.waited() + _REPEAT_SECONDS
            self._console.say(f"waiting: {describe_waiting(state)}")

    def conclude(self, state: JobState, group: WorkerGroup | None) -> int:
        """Put the report behind the ranks' output; return the exit status: that of the first failure."""
        failures = [failure for text in state.failures if (failure := Failure.from_json(text)) is not None]
        if failures:
            ranks = group.ranks if group is not None else []
            first = first_failure(failures)
            if self._reports_own_ranks_only and first.rank not in [rank.rank for rank in ranks]:
                return first.exit_status
            ended = [rank.rank for rank in ranks if rank.told_to_end]
            left = [rank.rank for rank in ranks if not rank.told_to_end and rank.ending and not rank.ending.exit_code]
            self._console.put(describe(failures, ended, left, socket.gethostname()))
            return first.exit_status
        if state.exit_status and state.reason and (group is None or state.reason != group.incomplete):
            self._console.say(f"the job has ended: {state.reason}")
        return state.exit_status


def describe_waiting(state: JobState | None) -> str:
    """Return for what a node waits: the store of the agents, or other nodes."""
    if state is None:
        return "no agent hosts the store at which the nodes meet, or it is not reached"
    here, hosts = len(state.members), ", ".join(node.host for node in state.members)
    if here < state.settings.min_nodes:
        return f"{here} of at least {state.settings.min_nodes} nodes are here ({hosts})"
    return (
        f"{job_changes.present(state)} of the {len(state.previous)} nodes of the last round are here ({hosts}); while "
        "the others may be at work somewhere, only more than half go on (half with --on-partition continue)"
    )
