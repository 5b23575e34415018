"""The agent of one node: runs the node's ranks in the rounds that the agents of all nodes agree on.

The agent's loop also waits for the meeting, whose own threads agree with the other nodes (see meeting.py). The job's
state and the agent's own ranks determine what the agent does::

    state       ranks here            what the agent does
    forming     none                  waits; begins the round when there are enough nodes and no further one has joined
                                      for a while
    running     none yet              hosts the ranks' store on the first node; starts the ranks on every node
                all ended with 0      proposes "finish"
                one failed            waits a moment for the errors of the others, then proposes "fail" with all errors;
                                      with --replace: starts that rank again, as long as it may
    stopping    some                  sends SIGTERM ── grace ──> SIGKILL
                none                  proposes "stopped"
    ended       none                  reports the first failure; exits with its status

When a signal to the agent has ended its ranks (see supervisor.py), the node leaves the job, and the other nodes go on
or end. An agent that cannot reach the others ends its ranks, because the others declare it lost, and then tries to join
them again.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from procgroup.launch.deadlines import RECOVERY_SECONDS, REPORT_SECONDS, RESTART_REPORT_SECONDS, SETTLE_SECONDS
from procgroup.launch.nodes import job_changes
from procgroup.launch.nodes.announcer import Announcer, describe_waiting
from procgroup.launch.nodes.job_state import JobState, can_begin, has_quorum
from procgroup.launch.nodes.meeting import Meeting
from procgroup.launch.nodes.meeting_plan import MeetingPlan
from procgroup.launch.supervisor import JobOutcome, Supervisor, WakePipe

if TYPE_CHECKING:
    from procgroup.launch.events import Events
    from procgroup.launch.failures.failure import RankFailure


class Loss(NamedTuple):
    """An agent's loss of the other agents.

    ``text`` is the line to print. ``memory`` is the last known state, which the agent brings to the next meeting;
    ``is_end`` means that the agent may not join another meeting.
    """

    text: str = ""
    memory: JobState | None = None
    is_end: bool = False


class Agent:
    """Runs one node's part of the job with ``ranks``. It meets the others by ``plan``, and again after a loss.

    With ``reports`` it prints the failures that ended the job; where all agents write to the same terminal
    (``shares_console``), only the agent of the first failure does. ``events``, if given, writes the end of the job for
    other programs.
    """

    def __init__(
        self, ranks: Supervisor, plan: MeetingPlan, events: Events | None, *, reports: bool, shares_console: bool
    ) -> None:
        self._ranks = ranks
        self._plan = plan
        self._output = ranks.output
        self._events = events
        self._reports = reports
        self._shares_console = shares_console
        self._proposed: tuple[str, int] = ("", -1)
        self._announcer = Announcer(self._output)
        self._enough_since: float | None = None
        self._has_joined = False
        self._loss: Loss | None = None
        self._lost_silently = False
        self._end: tuple[int, Sequence[RankFailure]] | None = None
        self._wakes = WakePipe()
        self._meeting = Meeting(plan, self._wakes.wake, None)

    def run(self) -> JobOutcome:
        """Run this node's part until the job ends or a signal ends it."""
        try:
            while self._end is None:
                self._follow()
                if self._end is None:
                    self._turn()
            return self._ranks.finish(*self._end)
        finally:
            self._ranks.kill()
            self._meeting.close()
            self._wakes.close()

    def _turn(self) -> None:
        """Wait for the next event, and handle it."""
        state = self._meeting.state
        restarts = state.restarts if state is not None else 0
        is_last = state is None or restarts >= state.settings.max_restarts
        self._ranks.wait(
            REPORT_SECONDS if is_last else RESTART_REPORT_SECONDS,
            restarts=restarts,
            until=self._until(state),
            wake=[self._wakes.descriptor],
        )
        self._wakes.drain()

    def _until(self, state: JobState | None) -> float | None:
        """Return the time.monotonic() of the next step while nodes are missing; None for no limit."""
        if state is not None and state.phase != "forming":
            return None
        times = [self._announcer.next_line(), self._announcer.waits_since + self._plan.join]
        if state is not None and self._enough_since is not None:
            times.append(self._begins_at(state, self._enough_since))
        return min(times)

    def _follow(self) -> None:
        """Take the step that the job's state and this node's ranks require."""
        if self._ranks.received is not None:
            self._leave_when_ended(self._ranks.received)
        elif self._meeting.error is not None:
            self._fail_alone(str(self._meeting.error))
        elif (loss := self._find_loss()) is not None:
            self._look_for_the_others(loss)
        elif (state := self._meeting.state) is None:
            self._wait_for_nodes(None)
        else:
            self._has_joined |= state.node(self._node_id) is not None
            self._announcer.follow(state, self._node_id)
            steps = {
                "forming": self._form,
                "running": self._run_round,
                "stopping": self._stop_round,
                "ended": self._conclude,
            }
            steps[state.phase](state)

    def _form(self, state: JobState) -> None:
        """Wait for nodes; begin when there are enough and no further one has joined for a while."""
        self._wait_for_nodes(state)
        if not can_begin(state):
            self._enough_since = None
            self._proposed = ("", -1)
            return
        if self._enough_since is None:
            self._enough_since = time.monotonic()
        if time.monotonic() >= self._begins_at(state, self._enough_since):
            self._propose("begin", state, partial(job_changes.begin, round_number=state.round))

    def _begins_at(self, state: JobState, since: float) -> float:
        if state.is_recovery:
            # The host of a silent store may be cut off. It notices that later than this agent, and then ends its ranks.
            return since + RECOVERY_SECONDS + (self._plan.lease.lead if self._lost_silently else 0.0)
        return since + (self._plan.last_call if state.round == 0 else 0.0)

    def _run_round(self, state: JobState) -> None:
        self._enough_since = None
        group, node_rank = self._ranks.group, state.node_rank(self._node_id)
        if node_rank is None:
            return  # a spare node, until a member leaves
        if group.round != state.round:
            self._start(state, node_rank)
        elif state.notice and self._proposed != ("warn", state.round):
            self._proposed = ("warn", state.round)
            group.warn(state.notice)
        elif group.has_settled:
            reason, status = self._ranks.failure_here()
            failures = [failure.to_json() for failure in group.failures]
            change = partial(job_changes.fail, round_number=state.round, reason=reason, failures=failures)
            self._propose("fail", state, partial(change, exit_status=status))
        elif group.has_succeeded:
            self._propose("finish", state, partial(job_changes.finish, round_number=state.round, node_id=self._node_id))

    def _start(self, state: JobState, node_rank: int) -> None:
        """Start this node's ranks, once the first node has published the address of the ranks' store."""
        if state.store is not None:
            self._ranks.start(state.round_of(node_rank, state.store))
        elif node_rank == 0 and self._proposed != ("publish", state.round):
            self._meeting.forget_torch()
            try:
                store = self._ranks.host(state.members[0].address)
            except OSError as error:
                self._propose("publish", state, partial(job_changes.end, reason=str(error), exit_status=1))
            else:
                change = partial(job_changes.publish, round_number=state.round, store=store)
                self._propose("publish", state, change)

    def _stop_round(self, state: JobState) -> None:
        """End this node's ranks, then propose "stopped"."""
        group = self._ranks.group
        if group.round == state.round and group.living:
            self._end_ranks(others_go_on=not has_quorum(state))
        elif state.node_rank(self._node_id) is not None and self._node_id not in state.passed:
            known = set(state.failures)
            failures = [text for text in (failure.to_json() for failure in group.failures) if text not in known]
            change = partial(job_changes.stopped, round_number=state.round, node_id=self._node_id, failures=failures)
            self._propose("stopped", state, change)

    def _end_ranks(self, *, others_go_on: bool = False) -> None:
        """Send SIGTERM; kill the ranks early where other nodes may start the ranks of the next round."""
        group = self._ranks.group
        if self._proposed != ("end", group.round):
            self._proposed = ("end", group.round)
            self._ranks.end()
        if others_go_on and self._plan.job.shutdown is None:
            group.hurry(self._plan.lease.grace)

    def _conclude(self, state: JobState) -> None:
        """Report, once this node's ranks have ended; the job's exit status is that of the first failure."""
        if self._ranks.group.living:
            self._end_ranks()
            return
        status, node_rank = state.exit_status, state.node_rank(self._node_id)
        failures: Sequence[RankFailure] = ()
        first_node = node_rank
        if state.failures:
            from procgroup.launch.failures.report import first_failure, read  # needed after a failure only

            failures = read(state.failures, self._ranks.group.failures)
            if failures:
                first = first_failure(failures)
                status, first_node = first.exit_status, first.node_rank
        if self._events is not None:
            nodes = len(state.members)
            self._events.show(self._ranks.group, status, node_rank=node_rank, nodes=nodes, restarts=state.restarts)
        if self._reports and (first_node == node_rank or not self._shares_console):
            self._ranks.report(failures, state.reason if state.exit_status else "")
        self._end = (status, failures)

    def _wait_for_nodes(self, state: JobState | None) -> None:
        """End this node's part when the awaited nodes have not joined in time."""
        if self._announcer.waited() >= self._plan.join and (state is None or not can_begin(state)):
            waits_for = describe_waiting(state, self._meeting.place)
            self._fail_alone(f"the nodes have not come together within {self._plan.join:g} s: {waits_for}")
        else:
            self._announcer.wait_for_nodes(state, self._meeting.place)

    def _find_loss(self) -> Loss | None:
        """Return the loss where the store cannot be reached, or the others declared this agent lost; else None."""
        meeting, state = self._meeting, self._meeting.state
        if state is None:
            return Loss() if meeting.lost else None
        if state.phase == "ended":
            return None
        if not meeting.lost:
            was_removed = self._has_joined and state.node(self._node_id) is None
            return Loss("the other nodes declared this one lost; it joins them again") if was_removed else None
        if meeting.moves:
            return Loss(f"{meeting.lost}; this node joins them there")
        return _loss_of_store(meeting, state)

    def _look_for_the_others(self, loss: Loss) -> None:
        """End this node's ranks, because the others may soon run without them; then join the other agents again."""
        if self._loss is None:
            self._loss = loss
            if loss.text:
                self._output.say(loss.text)
        if self._ranks.group.living:
            self._end_ranks(others_go_on=True)
            return
        if self._loss.is_end:
            self._end = (1, ())
            return
        self._meeting.close()
        self._ranks.forget()
        memory, self._loss = self._loss.memory, None
        self._lost_silently = self._meeting.is_silent
        self._proposed = ("", -1)
        self._has_joined = False
        self._announcer = Announcer(self._output)
        self._meeting = Meeting(self._plan, self._wakes.wake, memory)

    def _fail_alone(self, reason: str) -> None:
        """End this node's part with an error of its own."""
        if self._ranks.group.living:
            self._end_ranks()
            return
        self._output.say(reason)
        self._end = (1, ())

    def _leave_when_ended(self, number: signal.Signals) -> None:
        """Remove the node from the job once its ranks have ended; warn the ranks of the others until then."""
        group = self._ranks.group
        if self._ranks.notice and self._proposed != ("warn others", group.round):
            self._proposed = ("warn others", group.round)
            self._meeting.propose(partial(job_changes.warn, round_number=group.round, seconds=self._ranks.notice))
        if group.living:
            return
        self._meeting.propose(
            partial(
                job_changes.leave,
                node_id=self._node_id,
                reason=number.name,
                exit_status=128 + number,
                for_good=number is signal.SIGINT,
            )
        )
        self._meeting.settle(SETTLE_SECONDS)
        self._meeting.hand_over(SETTLE_SECONDS)
        self._end = (128 + number, ())

    def _propose(self, name: str, state: JobState, change: Callable[[JobState], JobState | None]) -> None:
        """Propose a change, once in each round; the meeting applies it to the latest state."""
        if self._proposed != (name, state.round):
            self._proposed = (name, state.round)
            self._meeting.propose(change)

    @property
    def _node_id(self) -> str:
        return self._meeting.node_id


def _loss_of_store(meeting: Meeting, state: JobState) -> Loss:
    memory = job_changes.after_losing_store(state, silent=meeting.is_silent)
    host = next((state.name(node) for node in state.members if node.hosts_store), "")
    how = meeting.lost.rstrip(".")
    why = f"{host} was lost, which hosted the agents' store: {how}" if host else how
    most = state.settings.max_restarts
    if memory.restarts > most:
        return Loss(f"{why}; no restart is left", is_end=True)
    counted = f"; restart {memory.restarts} of {most}" if memory.restarts > state.restarts else ""
    return Loss(f"{why}{counted}", memory)
