"""The checks of a job: what its ranks do together, and rank 0's report of it.

::

    every rank     join the job; publish its place: so all know the hosts, and the leader of each
    leaders        listen, and publish their addresses; check their host
                   connect to every address of every other host, all at once
                   measure links: within the host with its second rank, then with the other hosts, in rounds
    rank 0         collect all of it, report, and release the other ranks

A host is the ranks that have one kernel and one network namespace: containers on one machine have separate networks
and addresses, and count as hosts; so do the hosts that PROCGROUP_HOST_ID makes.

The ranks exchange values through the group's store, and not by collectives, because a rank that does not answer must
not end the check of the others. Each step has a deadline. A host that does not answer by then takes no further part,
and is named.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import procgroup as dist
from procgroup.cluster.topology import format_cpus
from procgroup.diagnostics.doctor import interfaces, links, machine, reachability, software
from procgroup.diagnostics.doctor.findings import Section
from procgroup.diagnostics.doctor.system_files import read_text
from procgroup.errors import DistError, StoreTimeout
from procgroup.groups.group import ProcessGroup
from procgroup.process.environ import PROCGROUP_HOST_ID
from procgroup.stores.addresses import source_address
from procgroup.stores.store import Store

ANSWER_SECONDS = 15.0
"""What a step of a host may take: looking up a name may take 5 s, a library's version some seconds."""
_PROBE_SECONDS = 2.0
"""A connection that waits longer has lost its first packet and the second one, sent after 1 s."""
_ROUND_SECONDS = links.MESSAGE_SECONDS + 2.0


class RankPlace(NamedTuple):
    """Where one rank runs: a host's name, the machine's boot, the network namespace, and the CPUs of its affinity.

    ``cpus`` are in Linux's form, such as 0-3,8, because all ranks read the places of all.
    """

    host_name: str
    boot: str
    network: int
    host_id: str
    cpus: str

    @classmethod
    def of_this_process(cls, root: Path = Path("/")) -> RankPlace:
        """Return the place of this process."""
        try:
            network = (root / "proc/self/ns/net").stat().st_ino
        except OSError:
            network = 0
        boot = read_text(root / "proc/sys/kernel/random/boot_id")
        return cls(socket.gethostname(), boot, network, PROCGROUP_HOST_ID.get(), format_cpus(os.sched_getaffinity(0)))

    @property
    def identity(self) -> tuple[str, str, int, str]:
        """What the ranks of one host have in common."""
        return (self.host_name, self.boot, self.network, self.host_id)


class DoctorHost(NamedTuple):
    """The ranks of one host. The name is unique in the job."""

    name: str
    ranks: tuple[int, ...]
    places: tuple[RankPlace, ...]

    @property
    def leader(self) -> int:
        """The rank that checks the host."""
        return self.ranks[0]


def hosts_of(places: Mapping[int, RankPlace]) -> list[DoctorHost]:
    """Return the hosts, in the order of their lowest ranks. Names that several hosts have get these ranks, too."""
    groups: dict[tuple[str, str, int, str], list[int]] = {}
    for rank in sorted(places):
        groups.setdefault(places[rank].identity, []).append(rank)
    names = Counter(identity[0] for identity in groups)
    return [
        DoctorHost(
            identity[0] if names[identity[0]] == 1 else f"{identity[0]} (rank {ranks[0]})",
            tuple(ranks),
            tuple(places[rank] for rank in ranks),
        )
        for identity, ranks in groups.items()
    ]


class Exchange:
    """This rank's values, and those of the other ranks, by stage. Raises DistStoreError when the store is lost."""

    def __init__(self, store: Store, rank: int) -> None:
        self._store = store
        self.rank = rank

    def publish(self, stage: str, value: Any) -> None:
        """Publish this rank's value of a stage: anything that JSON has."""
        self._store.set(_key(stage, self.rank), json.dumps(value))

    def collect(self, stage: str, ranks: Collection[int], seconds: float) -> dict[int, Any]:
        """Return the values of these ranks, in their order; without those that have none after ``seconds``."""
        answered = list(ranks)
        try:
            values = self._store.multi_get([_key(stage, rank) for rank in answered], seconds)
        except StoreTimeout:
            answered = [rank for rank in ranks if self._store.check([_key(stage, rank)])]
            values = self._store.multi_get([_key(stage, rank) for rank in answered]) if answered else []
        return {rank: json.loads(value) for rank, value in zip(answered, values, strict=True)}


def _key(stage: str, rank: int) -> str:
    return f"doctor/{stage}/{rank}"


class Measurement(NamedTuple):
    """A link as measured by ``rank``: to ``peer``, over ``transport``; an ``error`` in place of a speed."""

    rank: int
    peer: int
    transport: str
    speed: links.Speed | None
    error: str = ""


class Answers(NamedTuple):
    """What rank 0 has collected: by leader, except ``measurements``. Leaders that did not answer have no entry."""

    hosts: list[DoctorHost]
    missing_ranks: list[int]
    facts: dict[int, dict[str, Any]]
    checks: dict[int, list[Section]]
    reached: dict[int, dict[str, dict[str, str]]]
    measurements: list[Measurement]
    measured_by: set[int]


def check(seconds: float) -> Answers | None:
    """Join the job within ``seconds``, and check its hosts; return the answers on rank 0, None on the other ranks.

    Raises what init_process_group raises when the ranks do not come together, DistError when the store is lost.
    """
    dist.init_process_group(timeout=seconds)
    try:
        world = dist.group.WORLD
        assert world is not None
        return JobCheck(world, RankPlace.of_this_process()).run()
    finally:
        with contextlib.suppress(DistError, OSError):
            dist.destroy_process_group()


class JobCheck:
    """One rank's part in the checks. A step of another host may take ``answer_seconds``."""

    def __init__(self, world: ProcessGroup, place: RankPlace, answer_seconds: float = ANSWER_SECONDS) -> None:
        self._world = world
        self._rank = world.rank()
        self._place = place
        self._answer_seconds = answer_seconds
        self._exchange = Exchange(world.get_group_store(), self._rank)
        self._hosts: list[DoctorHost] = []
        self._answering: list[int] = []
        """The leaders that have taken part so far."""

    def run(self) -> Answers | None:
        """Take part; return the answers on rank 0, None on the other ranks."""
        try:
            self._exchange.publish("place", self._place)
            places = self._exchange.collect("place", range(self._world.size()), self._answer_seconds)
            self._hosts = hosts_of({rank: RankPlace(*values) for rank, values in places.items()})
            self._check_own_host()
            if self._rank == 0:
                return self._collect()
        finally:
            if self._rank == 0:
                self._exchange.publish("done", True)
        # A rank that left now could be taken for a lost one.
        self._exchange.collect("done", [0], self._longest() + 3 * self._answer_seconds)
        return None

    def _check_own_host(self) -> None:
        own = next(host for host in self._hosts if self._rank in host.ranks)
        pair = own.ranks[:2]
        if self._rank == own.leader:
            with reachability.Listener() as listener:
                self._check_addresses(listener)
                self._exchange.publish("links", [*self._local_link(pair), *self._links()])
        elif self._rank in pair:
            self._exchange.publish("links", list(self._local_link(pair)))

    def _check_addresses(self, listener: reachability.Listener) -> None:
        """Check this host, and connect to the addresses of the others."""
        self._exchange.publish("facts", _facts(listener, self._world.get_group_store()))
        found = machine.sections(machine.checks(tries_port=False))
        self._exchange.publish("checks", [section.as_dict() for section in found])
        facts = self._exchange.collect("facts", [host.leader for host in self._hosts], self._answer_seconds)
        self._exchange.publish("reached", _probe(facts, self._rank))
        # All hosts have closed their connections and made their checks when the first link is measured.
        self._answering = list(self._exchange.collect("reached", list(facts), self._answer_seconds))

    def _local_link(self, pair: Sequence[int]) -> Iterator[Measurement]:
        """Measure the link between this host's first two ranks."""
        if len(pair) < 2:
            return
        peer = pair[1] if self._rank == pair[0] else pair[0]
        try:
            group = dist.new_group(pair, timeout=links.MESSAGE_SECONDS, use_local_synchronization=True)
            yield self._measure(group, peer)
        except DistError as error:
            yield Measurement(self._rank, peer, "", None, str(error))

    def _links(self) -> Iterator[Measurement]:
        """Measure the links to the other hosts that answer, one after the other."""
        for pairs in links.rounds(len(self._answering)):
            for pair in ([self._answering[a], self._answering[b]] for a, b in pairs):
                if self._rank in pair:
                    peer = pair[1] if self._rank == pair[0] else pair[0]
                    try:
                        yield self._measure(self._world, peer)
                    except DistError as error:
                        yield Measurement(self._rank, peer, "tcp", None, str(error))

    def _measure(self, group: ProcessGroup, peer: int) -> Measurement:
        is_initiator = self._rank < peer
        measure = links.measure_as_initiator if is_initiator else links.measure_as_partner
        transport = "tcp" if group is self._world else group.transport
        return Measurement(self._rank, peer, transport, measure(group, group.group_rank(peer)))

    def _longest(self) -> float:
        """Return how many seconds the links of all hosts may take."""
        return _ROUND_SECONDS * (len(self._hosts) + 1)

    def _collect(self) -> Answers:
        leaders = [host.leader for host in self._hosts]
        measuring = [rank for host in self._hosts for rank in host.ranks[:2]]
        awaited = [rank for host in self._hosts if host.leader in self._answering for rank in host.ranks[:2]]
        self._exchange.collect("links", awaited, self._longest())
        measured = self._exchange.collect("links", measuring, 0)
        checks = self._exchange.collect("checks", leaders, 0)
        present = [rank for host in self._hosts for rank in host.ranks]
        return Answers(
            hosts=self._hosts,
            missing_ranks=[rank for rank in range(self._world.size()) if rank not in present],
            facts=self._exchange.collect("facts", leaders, 0),
            checks={rank: [Section.from_dict(one) for one in sections] for rank, sections in checks.items()},
            reached=self._exchange.collect("reached", leaders, 0),
            measurements=[
                Measurement(rank, peer, transport, speed and links.Speed(*speed), error)
                for of_rank in measured.values()
                for rank, peer, transport, speed, error in of_rank
            ],
            measured_by=set(measured),
        )


def _facts(listener: reachability.Listener, store: Store) -> dict[str, Any]:
    """Return what the other hosts need to know about this one."""
    try:
        found = [one for one in interfaces.addresses() if one.is_candidate]
    except OSError:
        found = []
    return {
        "versions": software.versions(),
        "addresses": {one.address: one.name for one in found},
        "packets": {one.name: interfaces.mtu(one.name) for one in found},
        "data_address": _data_address(store) or "",
        "port": listener.port,
        "token": listener.token,
    }


def _data_address(store: Store) -> str | None:
    """Return the address of this host in the network that leads to the store, which the data takes."""
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    host, port = getattr(store, "host", None), getattr(store, "port", None)
    return source_address(host, port, _PROBE_SECONDS) if host and port else None


def _probe(facts: dict[int, dict[str, Any]], own: int) -> dict[int, dict[str, str]]:
    """Connect to the addresses of the other hosts; return an outcome for each address, by the host's leader."""
    places = [(rank, address) for rank, other in facts.items() if rank != own for address in other["addresses"]]
    targets = [reachability.Target(address, facts[rank]["port"], facts[rank]["token"]) for rank, address in places]
    found: dict[int, dict[str, str]] = {rank: {} for rank in facts if rank != own}
    for (rank, address), outcome in zip(places, reachability.probe(targets, _PROBE_SECONDS), strict=True):
        found[rank][address] = outcome
    return found
