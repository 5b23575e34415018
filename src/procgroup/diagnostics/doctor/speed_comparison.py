"""Findings about the speed of links: of each link, and which ones are slow beside the others."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from procgroup.diagnostics.doctor.findings import Finding, note, ok, problem, warning
from procgroup.diagnostics.doctor.job import Answers, DoctorHost, Measurement
from procgroup.diagnostics.doctor.links import LARGEST_BYTES
from procgroup.diagnostics.doctor.system_files import show_bytes

SLOW = 2.0
"""How many times slower than the median of all links a link is when it is reported."""

_LATENCY_NOISE = 50e-6
"""By how many seconds a latency has to exceed the median, too: smaller ones vary with what else a host does."""

_LISTED = 12
"""The largest number of links that are printed one by one."""


class Direction(NamedTuple):
    """A link one way: from one host to another, or within one (both names are equal)."""

    source: str
    target: str
    transport: str
    bandwidth: float
    latency: float
    size: int

    @property
    def is_local(self) -> bool:
        """Whether both ends are on one host."""
        return self.source == self.target


def directions(answers: Answers) -> list[Direction]:
    """Return the measured links, each way. The latency is measured by one end, and counts for both ways."""
    names = {rank: host.name for host in answers.hosts for rank in host.ranks}
    measured = {(one.rank, one.peer): one.speed for one in answers.measurements if one.speed is not None}
    found = []
    for one in answers.measurements:
        speeds = [speed for speed in (one.speed, measured.get((one.peer, one.rank))) if speed is not None]
        latency = next((speed.latency for speed in speeds if speed.latency is not None), None)
        if one.speed is not None and latency is not None:
            ends = names[one.rank], names[one.peer]
            found.append(Direction(*ends, one.transport, one.speed.bandwidth, latency, one.speed.size))
    return found


def links(answers: Answers) -> Iterator[Finding]:
    """Yield findings about the links of a job."""
    yield from _failed(answers)
    found = directions(answers)
    within, between = [one for one in found if one.is_local], [one for one in found if not one.is_local]
    yield from _within(answers.hosts, within)
    yield from _between(between)
    if len({one.source for one in within}) > 1:
        yield from slow(within)
    yield from slow(between)


def _within(hosts: Sequence[DoctorHost], found: Sequence[Direction]) -> Iterator[Finding]:
    alone = [host.name for host in hosts if len(host.ranks) == 1]
    if alone:
        yield note(f"one rank only on {', '.join(alone)}: no link within the host")
    by_host = {one.source: one for one in found}
    for one in by_host.values():
        text = f"within {one.source}: {one.transport}, {_latency(one)}, {_rate(one)}"
        if one.transport == "shared memory":
            yield ok(text)
        else:
            yield warning(
                f"{text}; the ranks of this host share no memory",
                "See the findings about memory and variables of this host; containers need one network and one user",
            )


def _between(found: Sequence[Direction]) -> Iterator[Finding]:
    pairs: dict[frozenset[str], list[Direction]] = {}
    for one in found:
        pairs.setdefault(frozenset((one.source, one.target)), []).append(one)
    if len(pairs) > _LISTED:
        yield _summary(found, len(pairs))
        return
    for both in pairs.values():
        rates = ", ".join(f"{_rate(one)} to {one.target}" for one in both)
        yield ok(f"{both[0].source} and {both[0].target}: {_latency(both[0])}, {rates}")


def _summary(found: Sequence[Direction], pairs: int) -> Finding:
    slowest, fastest = (choose(found, key=lambda one: one.bandwidth) for choose in (min, max))
    middle = statistics.median(one.bandwidth for one in found)
    latency = statistics.median(one.latency for one in found)
    return ok(
        f"{pairs} pairs of hosts: {latency * 1e6:.3g} us and {_per_second(middle)} in the median; "
        f"{_rate(slowest)} from {slowest.source} to {slowest.target}, "
        f"{_rate(fastest)} from {fastest.source} to {fastest.target}"
    )


def slow(found: Sequence[Direction]) -> Iterator[Finding]:
    """Yield the links that are slow beside the median of all these links; none of fewer than two."""
    if len(found) < 2:
        return
    bandwidth = statistics.median(one.bandwidth for one in found)
    latency = statistics.median(one.latency for one in found)
    advice = "Look at its cables, its switch and its settings (ethtool, ip -s link), and for other programs that use it"
    for one in found:
        where = f"within {one.source}" if one.is_local else f"from {one.source} to {one.target}"
        if one.bandwidth * SLOW < bandwidth:
            text = f"slow link {where}: {_rate(one)}, the median of all is {_per_second(bandwidth)}"
            yield warning(text, advice)
        if one.latency > latency * SLOW and one.latency > latency + _LATENCY_NOISE:
            text = f"late link {where}: {_latency(one)}, the median of all is {latency * 1e6:.3g} us"
            yield warning(text, advice)


def _failed(answers: Answers) -> Iterator[Finding]:
    """Yield the links that could not be measured, once for each pair of hosts."""
    names = {rank: host.name for host in answers.hosts for rank in host.ranks}
    pairs: dict[frozenset[int], Measurement] = {}
    for one in answers.measurements:
        if one.speed is None:
            pairs.setdefault(frozenset((one.rank, one.peer)), one)
    for one in pairs.values():
        advice = f"Try both hosts alone, and compare the packet sizes of their interfaces{_packets(answers, one)}"
        yield problem(f"the link from {names[one.rank]} to {names[one.peer]} was not measured: {one.error}", advice)


def _packets(answers: Answers, one: Measurement) -> str:
    """Return the sizes of packets of both hosts: large messages are lost where a network has smaller ones."""
    leaders = {rank: host.leader for host in answers.hosts for rank in host.ranks}
    sizes: list[Mapping[str, int]] = [
        answers.facts[leaders[rank]]["packets"] for rank in (one.rank, one.peer) if leaders[rank] in answers.facts
    ]
    shown = "; ".join(", ".join(f"{name} {size}" for name, size in host.items()) for host in sizes)
    return f": {shown}" if shown else ""


def _latency(one: Direction) -> str:
    return f"{one.latency * 1e6:.3g} us"


def _rate(one: Direction) -> str:
    of_size = "" if one.size == LARGEST_BYTES else f" (messages of {show_bytes(one.size)})"
    return f"{_per_second(one.bandwidth)}{of_size}"


def _per_second(rate: float) -> str:
    return f"{rate / 1e9:.3g} GB/s" if rate >= 1e8 else f"{rate / 1e6:.3g} MB/s"
