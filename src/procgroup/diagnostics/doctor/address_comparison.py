"""Findings about the addresses of the hosts of a job: which host reaches which, and where a firewall may be."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator, Mapping, Sequence

from procgroup.diagnostics.doctor import reachability
from procgroup.diagnostics.doctor.findings import Finding, note, ok, problem
from procgroup.diagnostics.doctor.hosts import Host
from procgroup.diagnostics.doctor.job import Answers

_PORTS = "TCP to MASTER_PORT and to the ports of sysctl net.ipv4.ip_local_port_range"


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


def _reached_host(answers: Answers, target: Host, outcomes: Mapping[str, Mapping[str, str]]) -> Iterator[Finding]:
    """``outcomes``: of the hosts that have tried, by host and by address of ``target``."""
    facts = answers.facts[target.leader]
    shown = {address: f"{address} ({name})" for address, name in facts["addresses"].items()}
    for address, text in shown.items():
        sources = [source for source, found in outcomes.items() if found[address] == reachability.REACHED]
        if sources and len(sources) == len(outcomes):
            yield ok(f"{target.name} is reached at {text} from {_all_or(sources, outcomes)}")
        elif sources:
            yield note(f"{target.name} is reached at {text} from {', '.join(sources)} only")
        elif any(reachability.REACHED in found.values() for found in outcomes.values()):
            reasons = ", ".join(dict.fromkeys(found[address] for found in outcomes.values()))
            yield note(f"{target.name} is not reached at {text}: {reasons}")
    for source, found in outcomes.items():
        if reachability.REACHED not in found.values():
            yield _unreached(answers, source, target, {shown[address]: outcome for address, outcome in found.items()})
        elif _is_unreached(facts["data_address"], found):
            yield _other_network(source, target, facts["data_address"], found)


def _all_or(sources: Sequence[str], outcomes: Mapping[str, object]) -> str:
    return sources[0] if len(outcomes) == 1 else "all other hosts"


def _unreached(answers: Answers, source: str, target: Host, outcomes: Mapping[str, str]) -> Finding:
    """Return the finding about a host that reaches no address of another one."""
    from_host = next(host for host in answers.hosts if host.name == source)
    back = answers.reached[target.leader].get(str(from_host.leader), {})
    tried = "; ".join(f"{address}: {_explained(outcome)}" for address, outcome in outcomes.items())
    text = f"{source} cannot connect to {target.name} at any address: {tried}"
    if reachability.REACHED in back.values():
        return problem(
            f"{text}; {target.name} does connect to {source}, so one direction is blocked",
            f"Let the firewall of {target.name}, or one between the hosts, pass {_PORTS} from {source}",
        )
    return problem(text, f"Check the routes between the two hosts, and let firewalls pass {_PORTS}")


def _explained(outcome: str) -> str:
    return {
        reachability.SILENT: "no answer, as if a firewall drops the packets",
        reachability.REFUSED: "refused, although a program listens there, as by a firewall that rejects",
    }.get(outcome, outcome)


def _is_unreached(data_address: str, outcomes: Mapping[str, str]) -> bool:
    if not data_address or ipaddress.ip_address(data_address.partition("%")[0]).is_loopback:
        return False
    return outcomes.get(data_address, reachability.REACHED) != reachability.REACHED


def _other_network(source: str, target: Host, data_address: str, outcomes: Mapping[str, str]) -> Finding:
    others = ", ".join(address for address, outcome in outcomes.items() if outcome == reachability.REACHED)
    return problem(
        f"{source} does not reach {target.name} at {data_address}, where the data goes: {outcomes[data_address]}; "
        f"it does reach {others}",
        "Set MASTER_ADDR to an address of rank 0's host in a network that all hosts reach: the data takes that network",
    )
