"""How an agent leaves the job: in order, after a signal; or because it cannot reach the other agents."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from procgroup.launch.nodes import job_changes
from procgroup.launch.nodes.job_state import JobState
from procgroup.launch.nodes.signals import with_forwarded
from procgroup.launch.nodes.solo import Solo
from procgroup.launch.output.job_output import JobOutput
from procgroup.launch.ranks.deadlines import shutdown_seconds
from procgroup.launch.ranks.worker_group import WorkerGroup

if TYPE_CHECKING:
    from procgroup.launch.nodes.meeting import Meeting

SETTLE_SECONDS = 3.0
"""How long an agent that leaves tries to write its departure to the store."""


class Departure:
    """Handles signals to the agent: its ranks end, the node leaves the job, and the other nodes go on or end.

    ``numbers`` are the signals that end the ranks; ``shutdown`` is how many seconds the ranks have then (None: the
    defaults of ``shutdown_seconds``). ``received`` is the first of these signals that has come.
    """

    def __init__(self, numbers: Sequence[signal.Signals], shutdown: float | None, output: JobOutput) -> None:
        self.received: signal.Signals | None = None
        self.numbers: list[signal.Signals] = with_forwarded(numbers)
        self._ending = frozenset(numbers)
        self._shutdown = shutdown
        self._output = output

    @property
    def exit_status(self) -> int | None:
        """The exit status of an agent that a signal has ended; None without a signal."""
        return None if self.received is None else 128 + self.received

    def note(self, numbers: Sequence[signal.Signals]) -> bool:
        """Record the signals that come while the last output is written; return whether one of them ends the agent."""
        self.received = next((number for number in numbers if number in self._ending), self.received)
        return self.received is not None

    def heed(self, numbers: Sequence[signal.Signals], group: WorkerGroup, meeting: Meeting | Solo) -> None:
        """End the ranks on the first signal; kill them on a Ctrl-C after it; forward all other signals."""
        for number in numbers:
            if number not in self._ending:
                group.forward(number)
            elif self.received is None:
                self.received = number
                self._output.say(f"{number.name}: ending {_count_ranks(group)}")
                self._end_by(number, group, meeting)
            elif number is signal.SIGINT:
                self._output.say(f"SIGINT again: killing {_count_ranks(group)}")
                group.kill()
            else:
                group.forward(number)

    def leave(self, meeting: Meeting | Solo) -> None:
        """Remove the node from the job, once its ranks have ended."""
        number = self.received
        assert number is not None
        meeting.propose(
            partial(
                job_changes.leave,
                node_id=meeting.node_id,
                reason=number.name,
                exit_status=128 + number,
                for_good=number is signal.SIGINT,
            )
        )
        meeting.settle(SETTLE_SECONDS)
        meeting.hand_over(SETTLE_SECONDS)

    def _end_by(self, number: signal.Signals, group: WorkerGroup, meeting: Meeting | Solo) -> None:
        """Send the signal to the ranks; in the place of SIGTERM give ranks that call ``preempted`` the notice."""
        grace = shutdown_seconds(self._shutdown, number)
        if number is signal.SIGTERM and group.preempt(grace):
            meeting.propose(partial(job_changes.warn, round_number=group.round, seconds=grace))
        else:
            group.end(number, grace)


class Loss(NamedTuple):
    """An agent's loss of the other agents.

    ``text`` is the line to print. ``memory`` is the last known state, which the agent brings to the next meeting;
    ``is_end`` means that the agent may not join another meeting.
    """

    text: str = ""
    memory: JobState | None = None
    is_end: bool = False


def find_loss(meeting: Meeting | Solo, *, has_joined: bool) -> Loss | None:
    """Return the loss where the store cannot be reached, or the others declared this agent lost; else None.

    ``has_joined``: the agent was a member or waited to become one.
    """
    state = meeting.state
    if state is None:
        return Loss() if meeting.lost else None
    if state.phase == "ended":
        return None
    if not meeting.lost:
        was_removed = has_joined and state.node(meeting.node_id) is None
        return Loss("the other nodes declared this one lost; it joins them again") if was_removed else None
    if meeting.moves:
        return Loss(f"{meeting.lost}; this node joins them there")
    return _loss_of_store(meeting, state)


def _loss_of_store(meeting: Meeting | Solo, state: JobState) -> Loss:
    memory = job_changes.after_losing_store(state, silent=meeting.is_silent)
    host = next((state.name(node) for node in state.members if node.hosts_store), "")
    how = meeting.lost.rstrip(".")
    why = f"{host} was lost, which hosted the agents' store: {how}" if host else how
    most = state.settings.max_restarts
    if memory.restarts > most:
        return Loss(f"{why}; no restart is left", is_end=True)
    counted = f"; restart {memory.restarts} of {most}" if memory.restarts > state.restarts else ""
    return Loss(f"{why}{counted}", memory)


def _count_ranks(group: WorkerGroup) -> str:
    number = len(group.living)
    return "1 rank" if number == 1 else f"{number} ranks"
