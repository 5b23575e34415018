"""A job of one node: start the ranks, watch them, start them again after a failure, report the end.

::

    host the store ──> start the ranks ──> all have ended with exit status 0
          ^                     └────────> a rank has failed, and the others have had time to raise errors of their own
          │                                             │
          └───────────a restart is left <── the others have ended: SIGTERM ── grace ──> SIGKILL
                                                        └──> no restart is left: report the first failure

A signal ends the ranks, and then the job (see supervisor.py).
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from itertools import count
from typing import TYPE_CHECKING

from procgroup.launch.deadlines import REPORT_SECONDS, RESTART_REPORT_SECONDS
from procgroup.launch.program import RankRound
from procgroup.launch.supervisor import JobOutcome, Supervisor

if TYPE_CHECKING:
    from procgroup.launch.events import Events
    from procgroup.launch.failures.failure import RankFailure


def run_one_node(ranks: Supervisor, events: Events | None, *, reports: bool) -> JobOutcome:
    """Run the ranks until all have succeeded, no restart is left, or a signal has ended them.

    ``events``, if given, writes the end for other programs. With ``reports`` the failures are printed.
    """
    plan = ranks.program.plan
    failures: Sequence[RankFailure] = ()
    status, reason = 0, ""
    for restarts in count():
        try:
            store = ranks.host(plan.local_addr or plan.master_addr)
        except OSError as error:
            status, reason = 1, str(error)
            break
        host = plan.host or socket.gethostname()
        _run_round(ranks, RankRound(restarts, restarts, 0, host, (plan.processes,), (plan.role,), store))
        if ranks.received is not None:
            return ranks.finish(0)
        if ranks.group.has_succeeded:
            break
        if restarts == plan.max_restarts:
            failures = ranks.group.failures
            reason, status = ranks.failure_here()
            break
    if events is not None:
        events.show(ranks.group, status, node_rank=0, nodes=1, restarts=restarts)
    if reports and status:
        ranks.report(failures, reason)
    return ranks.finish(status, failures)


def _run_round(ranks: Supervisor, round_: RankRound) -> None:
    """Start the ranks, and return when all have ended: by themselves, after a failure, or by a signal."""
    most = ranks.program.plan.max_restarts
    is_last = round_.restarts == most
    report_seconds = REPORT_SECONDS if is_last else RESTART_REPORT_SECONDS
    ranks.start(round_)
    group = ranks.group
    while not (ranks.received or group.has_settled or group.has_succeeded):
        ranks.wait(report_seconds, restarts=round_.restarts)
    if group.has_settled and not ranks.received:
        if not is_last:
            ranks.output.say(f"{ranks.failure_here()[0]}; restart {round_.restarts + 1} of {most}")
        if group.living:
            ranks.end()
    while group.living:
        ranks.wait(report_seconds, restarts=round_.restarts)
