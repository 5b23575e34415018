"""The limits in seconds of the launcher and of ``spawn``, and the steps that follow when processes do not end in time.

docs/watching.md has those that users notice. The limits of ranks are elsewhere: ranks do not import this module.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable

# The ranks of a node.

INTERRUPT_SECONDS = 2.0
"""From Ctrl-C to SIGKILL, without --shutdown-timeout."""

SHUTDOWN_SECONDS = 30.0
"""From SIGTERM to SIGKILL, without --shutdown-timeout."""

UNKILLABLE_SECONDS = 30.0
"""From SIGKILL until the wait for a process ends that hangs in the kernel."""

REPORT_SECONDS = 2.0
"""How long the other ranks may take, after the first failure, to raise errors of their own, when no restart is left."""

RESTART_REPORT_SECONDS = 0.3
"""The same when the ranks will be started again."""

CAUSE_SECONDS = 1.5
"""How long to wait for the failure of a rank that all known failures blame."""

HANG_LOOK_SECONDS = 5.0
"""How often the ranks' states are read."""

HANG_REPORT_SECONDS = 10.0
"""After how many seconds a rank that is stopped or blocked in the kernel is reported."""

# Output.

FLUSH_SECONDS = 1.0
"""How long to try, after a signal, to write output that its reader does not read."""

STATUS_DELAY_SECONDS = 1.0
"""A job that ends sooner shows no status line."""

STATUS_INTERVAL_SECONDS = 0.5
"""The least time between two changes of the status line."""

COLLAPSE_SECONDS = 0.2
"""How long a line waits for other ranks to write the same."""

# Several nodes: to meet.

STATIC_TIMEOUT_SECONDS = 900.0
"""How long the nodes of a static job wait for each other; torchrun's."""

JOIN_TIMEOUT_SECONDS = 600.0
"""How long the nodes of an elastic job wait for enough of them; torchrun's."""

LAST_CALL_SECONDS = 30.0
"""How long enough nodes wait for further ones before the first round; torchrun's."""

RECOVERY_SECONDS = 1.5
"""How long an agent waits for further nodes before a round after the store was lost."""

WAIT_REPORT_SECONDS = 5.0
"""After how many seconds an agent prints which nodes it waits for."""

WAIT_REPEAT_SECONDS = 60.0
"""After how many seconds it repeats that line."""

TAKEOVER_SECONDS = 1.0
"""How long an endpoint may be silent before the owner of the next one hosts the store."""

ENDPOINT_CONNECT_SECONDS = 0.75
"""How long one attempt to connect to an endpoint may take."""

HANDSHAKE_SECONDS = 1.0
"""How long the store at an endpoint may take to answer a new connection."""

FOREIGN_SECONDS = 5.0
"""For how long a foreign program at an endpoint is not an error yet, because it may be about to end."""

ENDPOINT_PAUSE_SECONDS = 0.1
"""The pause between two attempts to find the store."""

ENDPOINT_REPORT_SECONDS = 3.0
"""After how many seconds an agent checks the names of the endpoints, and reports a busy port."""

SERVER_CONNECT_SECONDS = 5.0
"""How long one attempt to connect to an etcd or Redis server may take."""

# Several nodes: to stay together, and to part.

KEEP_ALIVE_SECONDS = 1.0
"""How often an agent renews its lease. See leases.py for what follows from it."""

KEEP_ALIVE_ATTEMPTS = 5
"""How many renewals must be missing before an agent is lost."""

REQUEST_PAUSE_SECONDS = 0.02
"""The pause before a request to the agents' store is repeated."""

LOOK_ELSEWHERE_SECONDS = 5.0
"""How often an agent that runs a round looks for more nodes at other endpoints."""

ELSEWHERE_SECONDS = 1.0
"""How long one request to the store of another endpoint may take."""

SETTLE_SECONDS = 3.0
"""How long an agent that leaves tries to write its departure to the store."""

AGENTS_LINGER_SECONDS = 10.0
"""How long an agent that hosts the store waits until the others have read how the job ended."""

MEETING_CLOSE_SECONDS = 2.0
"""How long the threads of an agent's meeting may take to end."""

# Hosts over ssh.

MARGIN_SECONDS = 5.0
"""How much longer than its ranks an agent on another host may take to end."""

HOSTS_JOIN_SECONDS = 60
"""How long the started agents may take to meet, without join_timeout in --rdzv-conf."""

SSH_CONNECT_SECONDS = 15
"""How long ssh may take to connect, unless its configuration has a value."""

SSH_ALIVE_SECONDS = 5
"""The silence after which ssh probes the host, unless its configuration has a value. After three probes it ends."""

SSH_QUERY_SECONDS = 10.0
"""How long ``ssh -G`` may take to read its configuration."""

# Other commands and flags.

RESOLVE_SECONDS = 5.0
"""How long ``--dry-run`` waits for the addresses of a name."""

SUBMIT_SECONDS = 120.0
"""How long a scheduler's client may take to submit a job."""

RAY_START_SECONDS = 600.0
"""How long ``submit ray`` waits for free resources in the cluster."""

RAY_PLACE_SECONDS = 60.0
"""How long Ray's actors, which run by then, may take to return their addresses."""


def shutdown_seconds(timeout: float | None, number: signal.Signals = signal.SIGTERM) -> float:
    """Return the seconds from a signal to SIGKILL: those of ``--shutdown-timeout``, or a default for the signal."""
    if timeout is not None:
        return timeout
    return INTERRUPT_SECONDS if number is signal.SIGINT else SHUTDOWN_SECONDS


class NextStep:
    """A timer for the next step of ending processes; one step is planned at a time."""

    def __init__(self) -> None:
        self.due: float | None = None
        self._step: Callable[[], None] | None = None

    def schedule(self, seconds: float, step: Callable[[], None]) -> None:
        """Plan a step in so many seconds; it replaces the planned one."""
        self.due, self._step = time.monotonic() + seconds, step

    def is_planned(self, step: Callable[[], None]) -> bool:
        """Return whether this is the step that was planned."""
        return self._step == step

    def cancel(self) -> None:
        """Plan nothing. Idempotent."""
        self.due = self._step = None

    def take_due(self) -> None:
        """Take the step if its time has come."""
        step = self._step
        if step is not None and self.due is not None and time.monotonic() >= self.due:
            self.cancel()
            step()
