"""The agent of one node: runs the node's ranks in the rounds that the agents of all nodes agree on.

One thread runs one loop without polling. The loop waits for the ranks' pipes and exits (pidfd), the launcher's outputs,
signals, and the meeting, whose own threads agree with the other nodes (see meeting.py; a job of one node needs no
agreement, see solo.py). The job's state and the agent's own ranks determine what the agent does::

    state       ranks here            what the agent does
    forming     none                  waits; begins the round when there are enough nodes and no further one has joined
                                      for a while
    running     none yet              hosts the ranks' store on the first node; starts the ranks on every node
                all ended with 0      proposes "finish"
                one failed            waits a moment for the errors of the others, then proposes "fail" with all errors;
                                      with --replace: starts that rank again, as long as it may;
                                      with --keep-going: waits for the others
    stopping    some                  sends SIGTERM ── grace ──> SIGKILL
                none                  proposes "stopped"
    ended       none                  reports the first failure; exits with its status

A signal to the agent goes to its ranks. When they have ended, the node leaves the job, and the other nodes go on or
end. A second Ctrl-C kills the ranks at once. An agent that cannot reach the others ends its ranks, because the others
declare it lost, and then tries to join them again (both are in departure.py).
"""

from __future__ import annotations

import signal
import socket
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from procgroup.errors import DistError
from procgroup.launch.nodes import job_changes, quorum
from procgroup.launch.nodes.announcer import Announcer, describe_waiting
from procgroup.launch.nodes.departure import Departure, Loss, find_loss
from procgroup.launch.nodes.hosted_store import HostedStore
from procgroup.launch.nodes.job_state import JobState
from procgroup.launch.nodes.signals import SignalInbox, WakePipe
from procgroup.launch.nodes.solo import Solo
from procgroup.launch.output.job_output import JobOutput
from procgroup.launch.ranks.deadlines import shutdown_seconds
from procgroup.launch.ranks.hung_ranks import HungRanks
from procgroup.launch.ranks.worker_group import WorkerGroup

if TYPE_CHECKING:
    from procgroup.launch.failures.failure import Failure
    from procgroup.launch.nodes.events import Events
    from procgroup.launch.nodes.meeting import Meeting
    from procgroup.launch.nodes.program import CommandProgram

REPORT_SECONDS = 2.0
"""How long the other ranks may take, after the first failure, to raise errors of their own, when no restart is left."""

RESTART_REPORT_SECONDS = 0.3
"""The same when the ranks will be started again."""


class Timeouts(NamedTuple):
    """The timeouts of an agent, in seconds.

    ``join`` is how long the agent waits for enough nodes, ``last_call`` how long for further ones before the first
    round, ``recovery`` the same after the store was lost. ``shutdown`` is how long ranks have from SIGTERM to SIGKILL
    (None: the defaults of ``shutdown_seconds``), ``cut_off`` the same when other nodes may start the next round
    meanwhile and no ``shutdown`` was asked for. A rank that hangs for ``hang`` seconds is killed (None: never).
    ``lead`` is the time between an agent's end of waiting for a silent store and the moment at which the store's host
    declares that agent lost.
    """

    join: float = 600.0
    last_call: float = 30.0
    recovery: float = 1.5
    shutdown: float | None = None
    hang: float | None = None
    cut_off: float = 0.75
    lead: float = 1.5


class Agent:
    """Runs one node's part of the job. It meets the others by the program's plan, and anew after a loss.

    After ``run``, ``failures`` are the failures that ended the job. ``run`` prints them unless ``reports`` is False;
    with ``shares_console``, where all agents write to the same terminal, only the agent of the first failure prints
    them. ``events``, if given, writes the end of the job for other programs.
    """

    def __init__(self, program: CommandProgram, output: JobOutput) -> None:
        self._program = program
        self._meet = program.plan.meet
        self._timeouts: Timeouts = program.plan.timeouts
        self._output = output
        self._departure = Departure(program.plan.signals, self._timeouts.shutdown, output)
        # The ranks of the last round that began on this node; none before it, and none after a loss.
        self._group = WorkerGroup((), -1, output.say)
        self._store: HostedStore | None = None
        self._proposed: tuple[str, int] = ("", -1)
        self._announcer = Announcer(output)
        self._enough_since: float | None = None
        self._has_joined = False
        self._loss: Loss | None = None
        self._lost_silently = False
        self.reports: bool = True
        self.shares_console: bool = False
        self.events: Events | None = None
        self.failures: list[Failure] = []
        self._status: int | None = None
        self._wakes = WakePipe()
        self._meeting: Meeting | Solo = self._meet(self._wakes.wake, None)

    @property
    def ranks(self) -> list[int]:
        """The global ranks of the last round that this node started."""
        return [rank.rank for rank in self._group.ranks]

    def run(self) -> int:
        """Run this node's part until the job ends or a signal ends it; return the exit status."""
        with SignalInbox(self._departure.numbers) as inbox:
            try:
                while self._status is None:
                    self._follow(inbox)
                    if self._status is None:
                        self._turn(inbox)
                self._flush(inbox)
                return self._departure.exit_status or self._status
            finally:
                for rank in self._group.ranks:
                    rank.signal(signal.SIGKILL)
                self._meeting.close()
                self._close()

    def _turn(self, inbox: SignalInbox) -> None:
        """Wait for the next event, and record it."""
        self._announcer.count(self._group)
        ends = [rank.descriptor for rank in self._group.living]
        wake = [inbox.descriptor, self._wakes.descriptor, *ends]
        self._output.move_bytes(self._group.streams, wake, self._timeout())
        self._wakes.drain()
        self._departure.heed(inbox.take(), self._group, self._meeting)
        self._group.watch(self._report_seconds())

    def _follow(self, inbox: SignalInbox) -> None:
        """Take the step that the job's state and this node's ranks require."""
        if self._departure.received is not None:
            self._leave_when_ended()
        elif self._meeting.error is not None:
            self._fail_alone(str(self._meeting.error))
        elif (loss := find_loss(self._meeting, has_joined=self._has_joined)) is not None:
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
            steps[state.phase](state, inbox)

    def _form(self, state: JobState, inbox: SignalInbox) -> None:
        """Wait for nodes; begin when there are enough and no further one has joined for a while."""
        self._wait_for_nodes(state)
        if not quorum.can_begin(state):
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
            return since + self._timeouts.recovery + (self._timeouts.lead if self._lost_silently else 0.0)
        return since + (self._timeouts.last_call if state.round == 0 else 0.0)

    def _run_round(self, state: JobState, inbox: SignalInbox) -> None:
        self._enough_since = None
        node_rank = state.node_rank(self._node_id)
        if node_rank is None:
            return  # a spare node, until a member leaves
        if self._group.round != state.round:
            self._start(state, node_rank, inbox)
        elif state.notice and self._proposed != ("warn", state.round):
            self._proposed = ("warn", state.round)
            self._group.warn(state.notice)
        elif self._group.has_settled:
            reason, failures, status = self._failures_here()
            change = partial(job_changes.fail, round_number=state.round, reason=reason, failures=failures)
            self._propose("fail", state, partial(change, exit_status=status))
        elif self._group.has_succeeded:
            self._propose("finish", state, partial(job_changes.finish, round_number=state.round, node_id=self._node_id))

    def _start(self, state: JobState, node_rank: int, inbox: SignalInbox) -> None:
        """Start this node's ranks, once the first node has published the address of the ranks' store."""
        if state.store is None:
            if node_rank == 0 and self._proposed != ("publish", state.round):
                self._host(state)
            return
        self._group.close()
        self._group = group = WorkerGroup(
            self._program.plans(state, node_rank),
            state.round,
            self._output.say,
            node_rank=node_rank,
            host=state.members[node_rank].host,
            awaits_cause=len(state.members) > 1,
            hung=HungRanks(self._timeouts.hang, self._output.last_reports, self._output.say),
            replacements=self._program.plan.replacements,
            keeps_going=self._program.plan.keeps_going,
        )

        def stops() -> bool:
            self._departure.heed(inbox.take(), self._group, self._meeting)
            return self._departure.received is not None

        group.start(stops)
        if group.incomplete:
            self._output.say(group.incomplete)

    def _host(self, state: JobState) -> None:
        earlier = self._store
        self._meeting.forget_torch()
        try:
            self._store = self._program.host(state)
        except (DistError, OSError) as error:
            reason = f"{socket.gethostname()} cannot host the ranks' store: {error}"
            self._propose("publish", state, partial(job_changes.end, reason=reason, exit_status=1))
            return
        finally:
            if earlier is not None:
                earlier.close()
        change = partial(job_changes.publish, round_number=state.round, store=self._store.record())
        self._propose("publish", state, change)

    def _stop_round(self, state: JobState, inbox: SignalInbox) -> None:
        """End this node's ranks, then propose "stopped"."""
        group = self._group
        if group.round == state.round and group.living:
            self._end_group(group, others_go_on=not quorum.has_quorum(state))
        elif state.node_rank(self._node_id) is not None and self._node_id not in state.passed:
            known = set(state.failures)
            failures = [text for text in self._failures_here()[1] if text not in known]
            change = partial(job_changes.stopped, round_number=state.round, node_id=self._node_id, failures=failures)
            self._propose("stopped", state, change)

    def _end_group(self, group: WorkerGroup, *, others_go_on: bool = False) -> None:
        """Send SIGTERM; kill the ranks early where other nodes may start the ranks of the next round."""
        shutdown = self._timeouts.shutdown
        if self._proposed != ("end", group.round):
            self._proposed = ("end", group.round)
            group.end(signal.SIGTERM, shutdown_seconds(shutdown))
        if others_go_on and shutdown is None:
            group.hurry(self._timeouts.cut_off)

    def _conclude(self, state: JobState, inbox: SignalInbox) -> None:
        """Report, once this node's ranks have ended; the job's exit status is that of the first failure."""
        if self._group.living:
            self._end_group(self._group)
            return
        self._status = state.exit_status
        if state.failures:
            from procgroup.launch.failures.report import first_failure, read  # needed after a failure only

            self.failures = read(state.failures, self._group.failures)
            self._status = first_failure(self.failures).exit_status if self.failures else state.exit_status
        if self.events is not None:
            self.events.show(state, state.node_rank(self._node_id), self._group, self._status)
        if self.reports and self._is_reporter(state):
            self._announcer.conclude(state, self.failures, self._group)

    def _is_reporter(self, state: JobState) -> bool:
        """Return whether this agent prints how the job has ended."""
        if not (self.shares_console and self.failures):
            return True
        from procgroup.launch.failures.report import first_failure

        return first_failure(self.failures).node_rank == state.node_rank(self._node_id)

    def _failures_here(self) -> tuple[str, list[str], int]:
        """Return why this node's ranks failed: one line, the records for the other nodes, and an exit status."""
        group = self._group
        if not group.failures:
            return group.incomplete, [], 1
        from procgroup.launch.failures.report import first_failure, summary

        records = [failure.to_json() for failure in group.failures]
        return summary(group.failures), records, first_failure(group.failures).exit_status

    def _wait_for_nodes(self, state: JobState | None) -> None:
        """End this node's part when the awaited nodes have not joined in time."""
        if self._announcer.waited() >= self._timeouts.join and (state is None or not quorum.can_begin(state)):
            waits_for = describe_waiting(state, self._meeting.place)
            self._fail_alone(f"the nodes have not come together within {self._timeouts.join:g} s: {waits_for}")
        else:
            self._announcer.wait_for_nodes(state, self._meeting.place)

    def _look_for_the_others(self, loss: Loss) -> None:
        """End this node's ranks, because the others may soon run without them; then join the other agents anew."""
        group = self._group
        if self._loss is None:
            self._loss = loss
            if loss.text:
                self._output.say(loss.text)
        if group.living:
            self._end_group(group, others_go_on=True)
            return
        if self._loss.is_end:
            self._status = 1
            return
        self._meeting.close()
        group.close()
        memory, self._loss = self._loss.memory, None
        self._lost_silently = self._meeting.is_silent
        self._group = WorkerGroup((), -1, self._output.say)
        self._proposed = ("", -1)
        self._has_joined = False
        self._announcer = Announcer(self._output)
        self._meeting = self._meet(self._wakes.wake, memory)

    def _fail_alone(self, reason: str) -> None:
        """End this node's part with an error of its own."""
        if self._group.living:
            self._end_group(self._group)
            return
        self._output.say(reason)
        self._status = 1

    def _leave_when_ended(self) -> None:
        if not self._group.living:
            self._departure.leave(self._meeting)
            self._status = self._departure.exit_status

    def _propose(self, name: str, state: JobState, change: Callable[[JobState], JobState | None]) -> None:
        """Propose a change, once in each round; the meeting applies it to the latest state."""
        if self._proposed != (name, state.round):
            self._proposed = (name, state.round)
            self._meeting.propose(change)

    @property
    def _node_id(self) -> str:
        return self._meeting.node_id

    def _report_seconds(self) -> float:
        state = self._meeting.state
        restarts = state is not None and state.restarts < state.settings.max_restarts
        return RESTART_REPORT_SECONDS if restarts else REPORT_SECONDS

    def _timeout(self) -> float | None:
        """Return how long the loop may wait, in seconds; None for no limit."""
        times = []
        if (event := self._group.next_event()) is not None:
            times.append(event)
        state = self._meeting.state
        if state is None or state.phase == "forming":
            times += [self._announcer.next_line(), self._announcer.waits_since + self._timeouts.join]
            if state is not None and self._enough_since is not None:
                times.append(self._begins_at(state, self._enough_since))
        return max(0.0, min(times) - time.monotonic()) if times else None

    def _close(self) -> None:
        """Close the descriptors that this agent has made."""
        if self._store is not None:
            self._store.close()
            self._store = None  # its descriptors end with it, and this agent is part of reference cycles
        self._group.close()
        self._wakes.close()

    def _flush(self, inbox: SignalInbox) -> None:
        self._output.flush(self._group.streams, inbox.descriptor, lambda: self._departure.note(inbox.take()))
