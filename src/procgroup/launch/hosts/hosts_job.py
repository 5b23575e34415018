"""``procgroup run --hosts``: start an agent on each host, show the agents' output, end all agents together.

Among themselves the agents agree as those of any job with several nodes (see agent.py). They start in two steps, so a
host that cannot be reached, or lacks the program, ends the job before any rank has begun::

    all hosts   ssh ... remote_agent            the first host's agent reserves the port of the agents' store
    all ready   "begin, at this endpoint"       the agents meet, and start their ranks
    one ended   the others have time to end, then get SIGTERM, then their connections are closed

A signal to this command goes to every agent; ssh itself does not get a terminal's Ctrl-C. When this command is killed,
its connections end, and each agent ends with its connection.
"""

from __future__ import annotations

import argparse
import signal
import time
from collections.abc import Sequence

from procgroup import __version__
from procgroup.launch.deadlines import MARGIN_SECONDS, NextStep, shutdown_seconds
from procgroup.launch.hosts.host_agent import HostAgent
from procgroup.launch.hosts.hosts_plan import HostsPlan, plan_hosts
from procgroup.launch.output.sinks import flush, move_bytes, open_sinks
from procgroup.launch.ranks.rank_process import describe_error
from procgroup.launch.supervisor import SignalInbox, with_forwarded


def run_on_hosts(options: argparse.Namespace, script_arguments: Sequence[str]) -> int:
    """Start the ranks that the parsed ``options`` describe on their hosts; return the exit status of the job."""
    return HostsJob(plan_hosts(options, script_arguments)).run()


class HostsJob:
    """The agents of a job, one for each host."""

    def __init__(self, plan: HostsPlan) -> None:
        self._plan = plan
        self._sinks = open_sinks()
        self._agents: list[HostAgent] = []
        self._has_begun = False
        self._has_failed = False
        self._ends_the_rest = False
        self._received: signal.Signals | None = None
        self._ended: list[HostAgent] = []
        self._steps = NextStep()

    def run(self) -> int:
        """Start the agents and wait until all have ended; return the exit status of the first rank that failed."""
        numbers = with_forwarded(self._plan.signals)
        with SignalInbox(numbers) as inbox:
            try:
                self._start()
                while self._living:
                    self._turn(inbox)
                self._flush(inbox)
            finally:
                self._kill()
        return self._exit_status()

    @property
    def _living(self) -> list[HostAgent]:
        return [agent for agent in self._agents if agent.status is None]

    def _start(self) -> None:
        for plan in self._plan.agents:
            try:
                self._agents.append(HostAgent(plan.host, plan.command, plan.assignment, self._sinks))
            except OSError as error:
                self._fail_start(f"cannot start {plan.command[0]} for {plan.host.name}: {describe_error(error)}")
                return
        self._steps.schedule(self._plan.start_seconds, self._fail_late_start)

    def _turn(self, inbox: SignalInbox) -> None:
        """Wait for the next event, and handle it."""
        due = self._steps.due
        self._move_bytes(inbox.descriptor, None if due is None else max(0.0, due - time.monotonic()))
        self._heed(inbox)
        self._read_answers()
        for agent in self._living:
            if agent.reap():
                self._record_end(agent)
        if not (self._has_begun or self._has_failed or self._received) and all(agent.ready for agent in self._agents):
            self._begin()
        self._steps.take_due()

    def _begin(self) -> None:
        self._has_begun = True
        self._steps.cancel()
        ports = [agent.ready.port for agent in self._agents if agent.ready is not None]
        for agent in self._agents:
            agent.begin(self._plan.endpoint(ports[0] or 0))

    def _read_answers(self) -> None:
        for agent in self._living:
            try:
                if agent.read_answer():
                    self._check_version(agent)
            except ValueError as error:
                self._fail_start(f"{agent.host.name}: {error}")

    def _record_end(self, agent: HostAgent) -> None:
        """Handle the end of an agent."""
        if self._received is not None or self._has_failed or self._ends_the_rest:
            return
        self._ended.append(agent)
        if not self._has_begun:
            self._fail_start(agent.describe_failed_start(self._plan.python))
            return
        if agent.was_lost:
            self._say(agent.describe_loss())
        if self._steps.due is None:
            self._steps.schedule(shutdown_seconds(self._plan.shutdown) + MARGIN_SECONDS, self._end_the_rest)

    def _check_version(self, agent: HostAgent) -> None:
        assert agent.ready is not None
        if agent.ready.version != __version__:
            self._fail_start(
                f"{agent.host.name} has procgroup {agent.ready.version}, and here it is {__version__}: "
                f"install the same one for {self._plan.python} there, or name another interpreter by --remote-python"
            )

    def _fail_start(self, reason: str) -> None:
        """End the job before any rank has begun."""
        if not self._has_failed:
            self._has_failed = True
            self._say(reason)
            self._kill()

    def _fail_late_start(self) -> None:
        late = ", ".join(agent.host.name for agent in self._living if agent.ready is None)
        self._fail_start(f"no agent within {self._plan.start_seconds:g} s (--ssh-timeout) on {late}")

    def _end_the_rest(self) -> None:
        """End the agents that go on although the agent of another host has ended."""
        self._ends_the_rest = True
        names = ", ".join(agent.host.name for agent in self._living)
        self._say(f"the agent on {self._ended[0].host.name} has ended, so those on {names} are ended, too")
        self._end(signal.SIGTERM)

    def _end(self, number: signal.Signals) -> None:
        for agent in self._living:
            agent.signal(number)
        self._steps.schedule(shutdown_seconds(self._plan.shutdown, number) + MARGIN_SECONDS, self._cut_off)

    def _cut_off(self) -> None:
        self._say(f"cutting the connections to {', '.join(agent.host.name for agent in self._living)}")
        self._kill()

    def _kill(self) -> None:
        for agent in self._living:
            agent.kill()

    def _heed(self, inbox: SignalInbox) -> None:
        """Forward signals to the agents. Before the ranks have begun, an ending signal closes the connections."""
        for number in inbox.take():
            if number not in self._plan.signals:
                for agent in self._living if self._has_begun else ():
                    agent.signal(number)
                continue
            self._received = self._received or number
            if self._has_begun:
                self._end(number)
            else:
                self._kill()

    def _exit_status(self) -> int:
        """Return the exit status of the job, on which the agents agree: that of the first rank that failed.

        The status of an agent that was lost counts only where no other agent has failed.
        """
        if self._received is not None:
            return 128 + self._received
        if self._has_failed:
            return 1
        in_order = sorted(self._ended, key=lambda agent: agent.was_lost)
        status = next((agent.status for agent in in_order if agent.status), 0)
        if status < 0:
            return 128 - status
        return status or int(any(sink.has_failed for sink in self._sinks))

    def _say(self, text: str) -> None:
        self._sinks[1].put_lines(None, f"procgroup run: {text}\n".encode())

    def _move_bytes(self, wake: int, timeout: float | None) -> None:
        """Wait until data can be moved, ``wake`` can be read or an agent ends; then move the data."""
        streams = [stream for agent in self._living for stream in agent.streams]
        sinks = [*self._sinks, *(agent.channel for agent in self._living)]
        move_bytes(streams, sinks, [wake, *(agent.descriptor for agent in self._living)], timeout)

    def _flush(self, inbox: SignalInbox) -> None:
        """Write all pending output."""

        def was_interrupted() -> bool:
            self._heed(inbox)
            return self._received is not None

        flush(self._sinks, lambda seconds: self._move_bytes(inbox.descriptor, seconds), was_interrupted)
