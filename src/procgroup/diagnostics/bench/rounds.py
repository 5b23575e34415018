"""The interleaved run: for each size, rounds of all peers. Who measures when, and for how long."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil

from procgroup.diagnostics.bench.intervals import Ratio, ratio_of_rounds
from procgroup.diagnostics.bench.peer import BenchPeer, Plan
from procgroup.errors import PeerFailure

SHORTEST_SAMPLE_NS = 10_000
"""A sample takes at least this long, so that reading the clock (about 50 ns) costs less than a percent of it."""

SHORTEST_SHARED_SAMPLE_NS = 5_000_000
"""The same where ranks share cores: in a shorter sample a rank that may run ahead of the others measures its own turns
on the core, and the median leaves out its waits for theirs."""

FEWEST_SAMPLES = 3
MOST_SAMPLES = 1000


@dataclass(frozen=True)
class BenchRound:
    """What one peer took in one round, in nanoseconds per call."""

    median_ns: float
    minimum_ns: float


@dataclass
class SizeResult:
    """All rounds of one size; a peer that failed on the way has fewer of them, the earliest."""

    size: int
    rounds: dict[str, list[BenchRound]] = field(default_factory=dict)

    def median_ns(self, peer: str) -> float:
        return statistics.median(one.median_ns for one in self.rounds[peer])

    def minimum_ns(self, peer: str) -> float:
        return min(one.minimum_ns for one in self.rounds[peer])

    def ratio(self, peer: str, reference: str) -> Ratio | None:
        """Return the peer's time over the reference's, from the rounds that both finished; None when there are none."""
        pairs = list(zip(self.rounds.get(peer, []), self.rounds.get(reference, []), strict=False))
        if not pairs:
            return None
        return ratio_of_rounds([one.median_ns for one, _ in pairs], [other.median_ns for _, other in pairs])


@dataclass
class InterleavedRun:
    """Measures one operation on all peers, and leaves out those that fail, with a line through ``tell``.

    ``seconds`` is about how long one peer's turn takes; ``timeout`` is after how many seconds a
    turn counts as stuck. ``shares_cores``: there are more ranks than usable cores.
    """

    operation: str
    peers: dict[str, BenchPeer]
    rounds: int
    seconds: float
    timeout: float
    tell: Callable[[str], None]
    left_out: dict[str, str] = field(default_factory=dict)
    shares_cores: bool = False

    def sizes(self, sizes: Iterable[int]) -> list[SizeResult]:
        """Measure every size in turn; ends early when no peer is left."""
        return [self._one_size(size) for size in sizes if self.peers]

    def _one_size(self, size: int) -> SizeResult:
        result = SizeResult(size)
        plans = {name: plan for name in list(self.peers) if (plan := self._calibrate(name, size))}
        names = list(plans)
        for round_index in range(self.rounds):
            for name in rotating_order(names, round_index):
                times = self._turn(name, size, plans[name])
                if times:
                    one = BenchRound(statistics.median(times), min(times))
                    result.rounds.setdefault(name, []).append(one)
        return result

    def _calibrate(self, name: str, size: int) -> Plan | None:
        first = self._turn(name, size, Plan(FEWEST_SAMPLES, calls=1))
        if not first:
            return None
        # The fewest samples: where other programs hold the cores, the usual call takes a hundred times the fastest one.
        second = self._turn(name, size, self._plan(min(first), seconds=0))
        return self._plan(statistics.median(second), self.seconds) if second else None

    def _plan(self, call_ns: float, seconds: float) -> Plan:
        return plan_for(call_ns, seconds, shares_cores=self.shares_cores)

    def _turn(self, name: str, size: int, plan: Plan) -> Sequence[float]:
        """Return the times of one turn; an empty list when the peer is, or just was, left out."""
        peer = self.peers.get(name)
        if peer is None:
            return []
        try:
            return peer.measure(self.operation, size, plan, self.timeout)
        except PeerFailure as failure:
            self.leave_out(failure)
            return []

    def leave_out(self, failure: PeerFailure) -> None:
        self.left_out[failure.peer] = failure.reason
        self.tell(f"left out from here on: {failure}")
        self.peers.pop(failure.peer).kill()


def connect_all(peers: Mapping[str, BenchPeer], timeout: float) -> list[PeerFailure]:
    """Wait until the ranks of all peers are ready; return the failures of those that are not."""
    failures = []
    for peer in peers.values():
        try:
            peer.connect(timeout)
        except PeerFailure as failure:
            failures.append(failure)
    return failures


def rotating_order(names: Sequence[str], round_index: int) -> list[str]:
    """Return the order of the peers in a round: rotated every second round, and backwards in the odd ones.

    Over ``2 * len(names)`` rounds each peer stands twice at each place, and follows each neighbour as often as it
    precedes it, so what one peer leaves in the caches is not always found by the same other one.
    """
    shift = (round_index // 2) % len(names) if names else 0
    order = [*names[shift:], *names[:shift]]
    return order[::-1] if round_index % 2 else order


def plan_for(call_ns: float, seconds: float, *, shares_cores: bool = False) -> Plan:
    """Return the plan that fills about ``seconds`` with calls of ``call_ns`` nanoseconds each."""
    call_ns = max(call_ns, 1.0)
    calls = max(1, ceil((SHORTEST_SHARED_SAMPLE_NS if shares_cores else SHORTEST_SAMPLE_NS) / call_ns))
    samples = int(seconds * 1e9 / (calls * call_ns))
    return Plan(samples=min(max(samples, FEWEST_SAMPLES), MOST_SAMPLES), calls=calls)
