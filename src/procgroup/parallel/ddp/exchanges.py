"""Exchanges between the ranks of a model, which the others make again without a rank that is lost.

An *exchange* is what the ranks do together as one: average the gradients of a round, copy the buffers of a rank, or
call a function of the program::

    attempt     collectives, and what can be done again; on GPUs with a barrier, which waits for their end
    barrier     a rank that is in it has all *results* of the exchange
    committed   the program goes on

A rank that is lost leaves the others at most one exchange apart: nobody commits one before all have its results. They
make a smaller group, and tell each other how many exchanges each has committed and whether it has the results of the
next one. An exchange that a rank has committed, or of which all ranks have the results, counts; another one is
attempted again by all.

With ``on_lost_rank="replace"`` they also agree on the round after which they *fill up* the group: at the beginning of
the next forward they wait for a new process in the place of each lost one, and give it their state.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TypeVar

from procgroup import log
from procgroup.api.shrinking import shrink_group
from procgroup.errors import GroupBroken, PeerFailed, PeerLost
from procgroup.groups.group import ProcessGroup
from procgroup.parallel.rank_comparison import gather

Result = TypeVar("Result")

ChangeGroup = Callable[[ProcessGroup], None]

RANK_WAS_LOST = (PeerLost, PeerFailed)


class Exchanges:
    """The exchanges of the models that share a group, on this rank: see ``exchanges_of``."""

    def __init__(self, group: ProcessGroup) -> None:
        self.group: ProcessGroup = group
        self.rounds: int = 0
        """Rounds that this rank has committed."""
        self.has_begun_round: bool = False
        """Whether this rank has begun the forward of the next round."""
        self.committed: int = 0
        self._change_group: list[weakref.WeakMethod[ChangeGroup]] = []
        self._fills_up = False
        self._is_running = False
        self._fill_up_after: int | None = None
        self._has_results = False

    def add_model(self, change_group: ChangeGroup, *, fills_up: bool) -> None:
        """Call ``change_group``, a method, with each new group. Its object is referenced weakly."""
        living = [method for method in self._change_group if method() is not None]
        self._change_group = [*living, weakref.WeakMethod(change_group)]
        self._fills_up = self._fills_up or fills_up

    @property
    def is_fill_up_due(self) -> bool:
        """Whether the next forward begins with new processes in the place of the lost ones."""
        after = self._fill_up_after
        return after is not None and after <= self.rounds and not self.has_begun_round

    def run(self, attempt: Callable[[], Result], rewind: Callable[[], None] = lambda: None) -> Result:
        """Make an exchange, on all ranks; ``rewind`` prepares another attempt. Return what the last attempt returned.

        Exceptions other than those of lost ranks are the caller's. Raises RuntimeError inside of an exchange.
        """
        if self._is_running:
            raise RuntimeError("retry() and a forward or backward of the model cannot be inside of one another")
        self._is_running = True
        try:
            return self._run(attempt, rewind)
        finally:
            self._is_running = self._has_results = False

    def _run(self, attempt: Callable[[], Result], rewind: Callable[[], None]) -> Result:
        while True:
            self._has_results = False
            try:
                result = attempt()
                if "cuda" in self.group.backends:
                    self.group.barrier()  # calls of NCCL have only been queued: here they end
                self._has_results = True
                self.group.barrier()
                break
            except (GroupBroken, *RANK_WAS_LOST) as error:
                if isinstance(error, GroupBroken) and not self.group.calls.has_lost_member:
                    raise
                if self._recover(error):
                    break
            rewind()
        self.committed += 1
        return result

    def use(self, group: ProcessGroup) -> None:
        """Make the exchanges on another group from now on."""
        self.group = group
        for method in self._change_group:
            if (change_group := method()) is not None:
                change_group(group)

    def end_round(self) -> None:
        """Count a round that has been committed."""
        self.rounds += 1
        self.has_begun_round = False

    def begin(self, committed: int, rounds: int) -> None:
        """Go on in a group that is complete, after that many exchanges and rounds of its ranks."""
        self.committed, self.rounds = committed, rounds
        self._fill_up_after = None

    def _recover(self, lost: Exception) -> bool:
        """Make a group of the ranks that live, and use it. Return whether the exchange in which this was counts."""
        before = self.group.size()
        while True:
            made = shrink_group()
            self.use(made)
            try:
                states = gather(made, [self.committed, self._has_results, self.rounds + self.has_begun_round])
                break
            except RANK_WAS_LOST:  # another one: begin again
                continue
        log.warning(f"DistributedDataParallel goes on with {made.size()} of {before} ranks: {lost}")
        if self._fills_up:
            self._fill_up_after = max(rounds for _, _, rounds in states)
        newest = max(committed for committed, _, _ in states)
        if newest > self.committed:
            assert self._has_results
            return True
        return all(has_results and committed == newest for committed, has_results, _ in states)


_EXCHANGES: weakref.WeakSet[Exchanges] = weakref.WeakSet()


def exchanges_of(group: ProcessGroup) -> Exchanges:
    """Return the exchanges of all models of a group: the group changes for all of them at once."""
    for known in _EXCHANGES:
        if known.group is group:
            return known
    made = Exchanges(group)
    _EXCHANGES.add(made)
    return made
