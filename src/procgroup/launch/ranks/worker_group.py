"""The ranks of one round on this host: started together, watched, ended together.

::

    a rank fails ──report_seconds, or all have ended──> has_settled: the caller decides
                 ──a replacement is left──────────────> the rank is started again, alone
                 ──keeps_going, while others live─────> nothing
    end(signal) ────────> the signal to all ──grace───> SIGKILL ──> all have ended
    kill() ─────────────> SIGKILL at once

After a failure the other ranks first get a moment to raise errors of their own, which name the rank that they lost. The
wait ends early when all ranks have ended. Every signal goes to a rank's whole process group. The kernel kills the ranks
of a launcher that is killed (``die_with_parent``); for that they are started from a thread that lives as long as the
process.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from procgroup.cluster.control_group import OutOfMemoryKills
from procgroup.launch.deadlines import CAUSE_SECONDS, UNKILLABLE_SECONDS, NextStep
from procgroup.launch.ranks.preemption import Notice
from procgroup.launch.ranks.rank_process import OutputStream, RankPlan, RankProcess, describe_error

if TYPE_CHECKING:
    from procgroup.launch.failures.failure import RankFailure
    from procgroup.launch.ranks.rank_process import HungRanks


class WorkerGroup:
    """The ranks of one round on the node ``node_rank``, whose name is ``host``.

    ``say`` prints a line of the launcher. ``awaits_cause``: the job has other nodes, on which the cause of a failure
    may be. ``hung`` finds ranks that hang. So many failed ranks (``replacements``) are started again, each alone.
    ``keeps_going``: the round fails only when all ranks have.
    """

    def __init__(
        self,
        plans: Sequence[RankPlan],
        round_number: int,
        say: Callable[[str], None],
        *,
        node_rank: int = 0,
        host: str = "",
        awaits_cause: bool = False,
        hung: HungRanks | None = None,
        replacements: int = 0,
        keeps_going: bool = False,
    ) -> None:
        self.round = round_number
        self.ranks: list[RankProcess] = []
        self.failures: list[RankFailure] = []
        self.incomplete: str = ""
        self.is_abandoned: bool = False
        self._plans = plans
        self._node_rank = node_rank
        self._host = host
        self._say = say
        self._steps = NextStep()
        self._settles_at: float | None = None
        self._failed_at = 0.0
        self._awaits_cause = awaits_cause
        self._notice = Notice()
        self._hung = hung
        self._most_replacements = replacements
        self._replacements = 0
        self._replaced: list[RankProcess] = []
        self._keeps_going = keeps_going
        self._done_without: list[RankFailure] = []

    def start(self, stops: Callable[[], bool]) -> None:
        """Start the ranks in order, until ``stops()`` returns True. A rank that cannot be started ends the others."""
        self._kills_before = OutOfMemoryKills.so_far()
        for plan in self._plans:
            if stops():
                return
            try:
                self.ranks.append(RankProcess(plan, self._notice.descriptor))
            except OSError as error:
                self.incomplete = f"cannot start rank {plan.rank}: {describe_error(error)}"
                self.kill()
                return

    @property
    def streams(self) -> list[OutputStream]:
        """The ranks' streams that are still open."""
        return [stream for rank in (*self._replaced, *self.ranks) for stream in rank.streams if stream.open]

    @property
    def living(self) -> list[RankProcess]:
        """The ranks that have not ended."""
        return [] if self.is_abandoned else [rank for rank in self.ranks if rank.ending is None]

    @property
    def has_succeeded(self) -> bool:
        """Whether all ranks have ended with exit status 0."""
        return not (self.living or self.failures or self.incomplete or self.is_abandoned) and all(
            rank.ending is not None and not rank.ended_by_launcher for rank in self.ranks
        )

    @property
    def has_settled(self) -> bool:
        """Whether a rank has failed, and the others have had their time to raise errors of their own.

        Where all failures on this node blame ranks of other nodes, those nodes get a moment to report first.
        """
        if self.incomplete:
            return True
        if self._settles_at is None or time.monotonic() >= max(self._settles_at, self._cause_until()):
            return self._settles_at is not None
        return not self.living and time.monotonic() >= self._cause_until()

    def watch(self, report_seconds: float) -> None:
        """Reap ranks that have ended, and take the next step of ending the others if it is due."""
        for rank in self.living:
            if rank.reap():
                self._record_end(rank, report_seconds)
        if self._hung is not None and self._settles_at is None:
            self._hung.look(self.living)
        self._steps.take_due()

    def next_event(self) -> float | None:
        """Return the time.monotonic() of the next change in ``watch`` or ``has_settled``; None: when a rank ends."""
        times = [self._steps.due] if self._steps.due is not None else []
        if self._hung is not None and self.living:
            times.append(self._hung.next_look)
        if self._settles_at is not None:
            later = (self._settles_at, self._cause_until())
            times += [instant for instant in later if instant > time.monotonic()]
        return min(times, default=None)

    def forward(self, number: signal.Signals) -> None:
        """Forward a signal to every rank."""
        for rank in self.living:
            rank.signal(number)

    def end(self, number: signal.Signals, grace: float) -> None:
        """Send a signal that ends the ranks, and plan to kill those that have not ended after so many seconds."""
        for rank in self.living:
            rank.ended_by_launcher = True
            rank.signal(number)
        self._steps.schedule(grace, self.kill)

    def hurry(self, grace: float) -> None:
        """Kill the ranks that are ending in so many seconds, where that is planned for later."""
        due = self._steps.due
        if due is not None and self._steps.is_planned(self.kill) and time.monotonic() + grace < due:
            self._steps.schedule(grace, self.kill)

    def preempt(self, grace: float) -> bool:
        """Give the ranks the preemption notice, and plan to kill those that have not ended after so many seconds.

        Returns False, and does nothing, where no rank has called ``preempted``.
        """
        if not self._notice.is_wanted:
            return False
        for rank in self.living:
            rank.ended_by_launcher = True
        self._notice.give(grace)
        self._steps.schedule(grace, self.kill)
        return True

    def warn(self, seconds: float) -> None:
        """Give the ranks the notice that another node is taken away in so many seconds."""
        self._notice.give(seconds)

    def close(self) -> None:
        """Release the page shared with the ranks, which have ended."""
        self._notice.close()

    def kill(self) -> None:
        """Kill every running rank."""
        for rank in self.living:
            rank.ended_by_launcher = True
            rank.signal(signal.SIGKILL)
        self._steps.schedule(UNKILLABLE_SECONDS, self._abandon)

    def _record_end(self, rank: RankProcess, report_seconds: float) -> None:
        """Record the failure of a rank that has just ended, if it failed."""
        assert rank.ending is not None
        if rank.ending.exit_code == 0 or rank.ended_by_launcher:
            return
        from procgroup.launch.failures.failure import RankFailure
        from procgroup.process.error_file import read_error_file  # these are needed after a failure only

        shown = rank.stderr.traceback_time if rank.ending.exit_code == 1 else None
        failure = RankFailure(
            rank=rank.rank,
            pid=rank.pid,
            exit_code=rank.ending.exit_code,
            time=shown or rank.ending.time,
            stderr=rank.stderr.tail.decode(errors="replace"),
            peak_memory=rank.ending.peak_memory,
            kills=OutOfMemoryKills.so_far().since(self._kills_before),
            host=self._host,
            node_rank=self._node_rank,
            record=read_error_file(Path(rank.error_file)) if rank.error_file else None,
            killed_for=rank.killed_for,
        )
        if self._replace(rank, failure) or self._go_on_without(failure):
            return
        self.failures += [*self._done_without, failure]
        if self._settles_at is None:
            self._failed_at = time.monotonic()
            self._settles_at = self._failed_at + report_seconds

    def _replace(self, rank: RankProcess, failure: RankFailure) -> bool:
        """Start a rank that has failed again; return False where that may not be done, or fails."""
        if self._replacements == self._most_replacements or self._settles_at is not None:
            return False
        place = self.ranks.index(rank)
        if rank.error_file:
            Path(rank.error_file).unlink(missing_ok=True)
        try:
            self.ranks[place] = RankProcess(self._plans[place], self._notice.descriptor)
        except OSError as error:
            self._say(f"cannot start rank {rank.rank} again: {describe_error(error)}")
            return False
        self._replacements += 1
        self._replaced.append(rank)
        counted = f"replacement {self._replacements} of {self._most_replacements}"
        self._say(f"rank {rank.rank} (pid {rank.pid}) failed: {failure.reason}; started again ({counted})")
        return True

    def _go_on_without(self, failure: RankFailure) -> bool:
        """Let the others go on, where that is asked for and one of them runs, or has succeeded."""
        has_succeeded = any(rank.ending is not None and rank.ending.exit_code == 0 for rank in self.ranks)
        if not (self._keeps_going and (self.living or has_succeeded)):
            return False
        self._done_without.append(failure)
        self._say(f"rank {failure.rank} (pid {failure.pid}) failed: {failure.reason}; the others go on")
        return True

    def _cause_until(self) -> float:
        """Return the time until which to wait for the cause, where all failures on this node blame other ranks."""
        has_cause_elsewhere = self._awaits_cause and all(failure.is_secondary for failure in self.failures)
        return self._failed_at + CAUSE_SECONDS if has_cause_elsewhere else 0.0

    def _abandon(self) -> None:
        """Stop waiting for ranks that hang in the kernel, where even SIGKILL does not end them."""
        for rank in self.living:
            self._say(f"rank {rank.rank} (pid {rank.pid}) hangs in the kernel and cannot be killed; leaving it")
        self.is_abandoned = True
