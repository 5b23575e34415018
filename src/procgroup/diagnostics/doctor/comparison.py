"""The report of a job, with findings about its hosts against each other: answers, versions, clocks, addresses."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from procgroup.cluster.topology import parse_cpus
from procgroup.diagnostics.doctor import reachability
from procgroup.diagnostics.doctor.findings import DoctorReport, Finding, HostReport, Section, note, ok, problem, warning
from procgroup.diagnostics.doctor.job import Answers, DoctorHost
from procgroup.diagnostics.doctor.speed_comparison import directions, links

CLOCK_LIMIT = 1.0
"""Seconds by which clocks may differ. Most logs and times of files have whole seconds: from a difference of one second
on, the order of events on two hosts cannot be read from them. NTP keeps clocks within some milliseconds, so a larger
difference means that it does not run. procgroup itself compares no clocks of different hosts."""


_EXPLAINED = {
    reachability.SILENT: "no answer, as if a firewall drops the packets",
    reachability.REFUSED: "refused, although a program listens there, as by a firewall that rejects",
}
_PORTS = "TCP to MASTER_PORT and to the ports of sysctl net.ipv4.ip_local_port_range"


def report(answers: Answers) -> DoctorReport:
    """Return the report of a job."""
    hosts = [HostReport(host.name, host.ranks, answers.checks.get(host.leader, [])) for host in answers.hosts]
    return DoctorReport(hosts, sections(answers), measured(answers))


def measured(answers: Answers) -> dict[str, Any]:
    """Return the measured values as JSON values: seconds, and bytes per second."""
    names = {str(host.leader): host.name for host in answers.hosts}
    return {
        "links": [direction._asdict() for direction in directions(answers)],
        "clock_offsets": {name: offset for name, (offset, _) in clock_offsets(answers).items()},
        "reached": {
            names[str(source)]: {names[target]: outcomes for target, outcomes in found.items()}
            for source, found in answers.reached.items()
        },
    }


def sections(answers: Answers) -> list[Section]:
    """Return the findings about the hosts against each other."""
    facts = {host.name: answers.facts[host.leader] for host in answers.hosts if host.leader in answers.facts}
    found = {
        "Ranks": [*_missing(answers), *_layout(answers), *_containers(answers.hosts)],
        "Versions": list(versions({name: of_host["versions"] for name, of_host in facts.items()})),
        "Clocks": list(clocks(answers)),
        "Reachability": list(reached(answers)),
        "Links": list(links(answers)),
    }
    return [Section(name, findings) for name, findings in found.items() if findings]


def _missing(answers: Answers) -> Iterator[Finding]:
    """Yield the ranks and hosts that have joined, but have not answered in time."""
    advice = "Check whether its process runs, and print its stack (py-spy dump --pid PID)"
    if answers.missing_ranks:
        ranks = ", ".join(map(str, answers.missing_ranks))
        yield problem(f"ranks that have joined the job, but did not answer: {ranks}", advice)
    for host in answers.hosts:
        steps = {
            "its facts": host.leader in answers.facts,
            "its own checks": host.leader in answers.checks,
            "its connections to other hosts": host.leader in answers.reached,
            "its links": set(host.ranks[:2]) <= answers.measured_by,
        }
        lacking = [step for step, is_there in steps.items() if not is_there]
        if lacking:
            yield problem(f"{host.name} did not answer in time: without {', '.join(lacking)}", advice)


def _layout(answers: Answers) -> Iterator[Finding]:
    """Yield the ranks of each host; a warning where they outnumber the CPUs that they may use together."""
    for host in answers.hosts:
        cpus = frozenset().union(*(parse_cpus(place.cpus) for place in host.places))
        ranks = _ranks(host)
        if len(host.ranks) > len(cpus):
            yield warning(
                f"{host.name} has {ranks}, which may use {len(cpus)} CPUs together: they wait for each other",
                "Start fewer ranks there, or do not bind several ranks to one CPU",
            )
        else:
            yield ok(f"{host.name} has {ranks} and {len(cpus)} CPUs for them")


def _ranks(host: DoctorHost) -> str:
    numbers = host.ranks
    if len(numbers) == 1:
        return f"rank {numbers[0]}"
    if numbers == tuple(range(numbers[0], numbers[-1] + 1)):
        return f"ranks {numbers[0]} to {numbers[-1]}"
    return f"ranks {', '.join(map(str, numbers))}"


def _containers(hosts: Sequence[DoctorHost]) -> Iterator[Finding]:
    """Yield hosts that are containers on one machine, whose ranks could share memory if they shared a network."""
    by_boot: dict[str, list[DoctorHost]] = {}
    for host in hosts:
        if host.places[0].boot and not host.places[0].host_id:
            by_boot.setdefault(host.places[0].boot, []).append(host)
    for together in by_boot.values():
        if len(together) > 1:
            names = ", ".join(host.name for host in together)
            yield warning(
                f"{names} are one machine with several network namespaces: their ranks use TCP, and share no memory",
                "If they are containers of one job, start them with one network (docker run --network=host)",
            )


def versions(by_host: Mapping[str, Mapping[str, str]]) -> Iterator[Finding]:
    """Yield what differs between the versions of the hosts."""
    names = dict.fromkeys(name for installed in by_host.values() for name in installed)
    alike = []
    for name in names:
        hosts: dict[str, list[str]] = {}
        for host, installed in by_host.items():
            hosts.setdefault(installed.get(name, "none"), []).append(host)
        if len(hosts) == 1:
            alike.append(f"{name} {next(iter(hosts))}")
            continue
        text = f"{name} differs: " + "; ".join(f"{version} on {', '.join(on)}" for version, on in hosts.items())
        yield _difference(name, text, list(hosts))
    if alike:
        yield ok(f"equal on all hosts: {', '.join(alike)}")


def _difference(name: str, text: str, found: Sequence[str]) -> Finding:
    if name == "procgroup":
        return problem(text, "Install one version on all hosts: versions do not speak one protocol")
    if name == "Python" and len({version.rpartition(".")[0] for version in found}) == 1:
        return note(text)
    return warning(text, f"Install one version of {name} on all hosts: pickled objects and results may differ")


def clocks(answers: Answers) -> Iterator[Finding]:
    """Yield how far the other hosts' clocks are ahead of that of rank 0's host."""
    own = answers.hosts[0].name
    for name, (offset, error) in clock_offsets(answers).items():
        text = f"the clocks of {own} and {name} are equal, to {_shown(error)}"
        if abs(offset) > error:
            direction = "ahead of" if offset > 0 else "behind"
            text = f"the clock of {name} is {_shown(abs(offset))} {direction} that of {own}"
        if abs(offset) - error > CLOCK_LIMIT:
            yield warning(
                f"{text}: their logs cannot be compared", "Let NTP set the clocks: chronyd, systemd-timesyncd"
            )
        else:
            yield ok(text)


def _shown(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1000:.3g} ms"


def clock_offsets(answers: Answers) -> dict[str, tuple[float, float]]:
    """Return by how many seconds each other host's clock is ahead of that of rank 0's host, and the error of that."""
    found = {}
    for host in answers.hosts[1:]:
        speed = next((one.speed for one in answers.measurements if (one.rank, one.peer) == (0, host.leader)), None)
        if speed is not None and speed.clock_offset is not None and speed.clock_error is not None:
            found[host.name] = (speed.clock_offset, speed.clock_error)
    return found


def reached(answers: Answers) -> Iterator[Finding]:
    """Yield for every host by which addresses the other hosts reach it, and which hosts reach none of them."""
    hosts = [host for host in answers.hosts if host.leader in answers.facts and host.leader in answers.reached]
    for target in hosts:
        others = [host for host in hosts if host is not target]
        if others and not answers.facts[target.leader]["addresses"]:
            text = f"{target.name} has no address that other hosts can reach"
            yield problem(text, "Give it a network: ip addr, ip link")
            continue
        tried = {source.name: answers.reached[source.leader].get(str(target.leader), {}) for source in others}
        yield from _reached_host(answers, target, {source: found for source, found in tried.items() if found})


def _reached_host(answers: Answers, target: DoctorHost, outcomes: Mapping[str, Mapping[str, str]]) -> Iterator[Finding]:
    """``outcomes``: of the hosts that have tried, by host and by address of ``target``."""
    facts = answers.facts[target.leader]
    shown = {address: f"{address} ({name})" for address, name in facts["addresses"].items()}
    for address, text in shown.items():
        sources = [source for source, found in outcomes.items() if found[address] == reachability.REACHED]
        if sources and len(sources) == len(outcomes):
            yield ok(
                f"{target.name} is reached at {text} from {sources[0] if len(outcomes) == 1 else 'all other hosts'}"
            )
        elif sources:
            yield note(f"{target.name} is reached at {text} from {', '.join(sources)} only")
        elif any(reachability.REACHED in found.values() for found in outcomes.values()):
            reasons = ", ".join(dict.fromkeys(found[address] for found in outcomes.values()))
            yield note(f"{target.name} is not reached at {text}: {reasons}")
    data_address = facts["data_address"]
    for source, found in outcomes.items():
        if reachability.REACHED not in found.values():
            yield _unreached(answers, source, target, {shown[address]: outcome for address, outcome in found.items()})
        elif (
            data_address
            and not ipaddress.ip_address(data_address.partition("%")[0]).is_loopback
            and found.get(data_address, reachability.REACHED) != reachability.REACHED
        ):
            yield _other_network(source, target, data_address, found)


def _unreached(answers: Answers, source: str, target: DoctorHost, outcomes: Mapping[str, str]) -> Finding:
    """Return the finding about a host that reaches no address of another one."""
    from_host = next(host for host in answers.hosts if host.name == source)
    back = answers.reached[target.leader].get(str(from_host.leader), {})
    tried = "; ".join(f"{address}: {_EXPLAINED.get(outcome, outcome)}" for address, outcome in outcomes.items())
    text = f"{source} cannot connect to {target.name} at any address: {tried}"
    if reachability.REACHED in back.values():
        return problem(
            f"{text}; {target.name} does connect to {source}, so one direction is blocked",
            f"Let the firewall of {target.name}, or one between the hosts, pass {_PORTS} from {source}",
        )
    return problem(text, f"Check the routes between the two hosts, and let firewalls pass {_PORTS}")


def _other_network(source: str, target: DoctorHost, data_address: str, outcomes: Mapping[str, str]) -> Finding:
    others = ", ".join(address for address, outcome in outcomes.items() if outcome == reachability.REACHED)
    return problem(
        f"{source} does not reach {target.name} at {data_address}, where the data goes: {outcomes[data_address]}; "
        f"it does reach {others}",
        "Set MASTER_ADDR to an address of rank 0's host in a network that all hosts reach: the data takes that network",
    )
