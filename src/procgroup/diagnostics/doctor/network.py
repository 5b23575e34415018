"""The network of this host: interfaces, loopback, the host's own name, and MASTER_ADDR:MASTER_PORT."""

from __future__ import annotations

import errno
import ipaddress
import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

from procgroup.cluster.addresses import parse_port
from procgroup.diagnostics.doctor import interfaces
from procgroup.diagnostics.doctor.findings import Finding, note, ok, problem, warning
from procgroup.errors import DistNetworkError
from procgroup.stores.addresses import is_literal, is_local, listen, resolve

Resolve = Callable[[str, float], Sequence[str]]

_RESOLVE_SECONDS = 5.0
_SLOW_SECONDS = 0.5
"""A name that takes longer delays every start that looks it up."""
_CONNECT_SECONDS = 3.0


def check(environment: Mapping[str, str] = os.environ, *, tries_port: bool = True) -> Iterator[Finding]:
    """Yield findings about the network. ``tries_port`` is False where this process itself may listen at MASTER_PORT."""
    yield from _interfaces()
    yield loopback()
    yield own_name(socket.gethostname())
    if environment.get("MASTER_ADDR"):
        yield from master_address(environment)
        if tries_port:
            yield from master_port(environment)


def _interfaces() -> Iterator[Finding]:
    try:
        found = interfaces.addresses()
    except OSError as error:
        yield note(f"this system does not list its network interfaces: {error}")
        return
    names = dict.fromkeys(interface.name for interface in found if interface.is_candidate)
    for name in names:
        listed = ", ".join(f"{one.address}/{one.prefix}" for one in found if one.name == name and one.is_candidate)
        megabits, mtu = interfaces.speed(name), interfaces.mtu(name)
        details = [f"{megabits} Mbit/s"] if megabits else []
        details += [f"packets of {mtu} bytes"] if mtu else []
        yield ok(f"interface {name}: {listed}" + (f" ({', '.join(details)})" if details else ""))
    if not names:
        yield note("no interface has an address that other hosts can reach: jobs of this host only")


def loopback() -> Finding:
    """Return whether this host reaches itself at 127.0.0.1."""
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            socket.create_connection(server.getsockname(), _CONNECT_SECONDS).close()
    except OSError as error:
        return problem(
            f"this host does not reach itself at 127.0.0.1: {error.strerror or error}",
            "Start the loopback interface: ip link set lo up",
        )
    return ok("this host reaches itself at 127.0.0.1")


def own_name(name: str, resolver: Resolve = resolve, clock: Callable[[], float] = time.monotonic) -> Finding:
    """Return whether this host's own name leads to an address, and how soon."""
    started = clock()
    addresses = resolver(name, _RESOLVE_SECONDS)
    seconds = clock() - started
    others = "procgroup does not need it, but Gloo, MPI and torchrun look it up"
    advice = f"Add the name with its address to /etc/hosts, such as: 192.168.1.5 {name}"
    if not addresses and seconds >= _RESOLVE_SECONDS:
        return warning(f"the host's own name {name} has no address after {seconds:.1f} s ({others})", advice)
    if not addresses:
        return warning(f"the host's own name {name} has no address ({others})", advice)
    text = f"the host's own name {name} leads to {', '.join(addresses)}"
    if seconds > _SLOW_SECONDS:
        return warning(f"{text}, after {seconds:.1f} s ({others})", advice)
    if all(ipaddress.ip_address(address.partition("%")[0]).is_loopback for address in addresses):
        return note(f"{text}, which no other host reaches: do not use it as MASTER_ADDR for several hosts")
    return ok(text)


def master_address(environment: Mapping[str, str], resolver: Resolve = resolve) -> Iterator[Finding]:
    """Yield whether MASTER_ADDR has an address."""
    host = environment["MASTER_ADDR"]
    addresses = resolver(host, _RESOLVE_SECONDS)
    if not addresses:
        yield problem(
            f"MASTER_ADDR={host} has no address",
            "Set MASTER_ADDR to an address of rank 0's host, or to a name that is in DNS or /etc/hosts on every host",
        )
    elif not is_literal(host):
        yield ok(f"MASTER_ADDR={host} leads to {', '.join(addresses)}")


def master_port(environment: Mapping[str, str], resolver: Resolve = resolve) -> Iterator[Finding]:
    """Yield whether rank 0 can listen at MASTER_ADDR:MASTER_PORT, or whether this host reaches it there."""
    host = environment["MASTER_ADDR"]
    try:
        port = parse_port(environment.get("MASTER_PORT", ""))
    except ValueError:  # reported among the variables
        return
    if is_local(host):
        yield _listen(host, port, environment)
    elif addresses := resolver(host, _RESOLVE_SECONDS):
        yield _connect(host, addresses, port)


def _listen(host: str, port: int, environment: Mapping[str, str]) -> Finding:
    """Return whether the store of rank 0 can listen at an address of this host."""
    where = f"MASTER_ADDR:MASTER_PORT, {host}:{port}"
    try:
        listen(host, port).close()
    except DistNetworkError as error:
        cause = error.__cause__
        is_taken = isinstance(cause, OSError) and cause.errno == errno.EADDRINUSE
        if is_taken and environment.get("RANK", "0") != "0":
            return ok(f"{where}, is this host, and a program listens there")
        if is_taken and (environment.get("PROCGROUP_STORE") or environment.get("TORCHELASTIC_USE_AGENT_STORE")):
            return ok(f"{where}, is this host, and the launcher listens there")
        reason = "another program listens there" if is_taken else str(cause)
        return problem(
            f"{where}, is this host, but rank 0 cannot listen there: {reason}",
            "Choose another MASTER_PORT on all ranks, or end that program",
        )
    return ok(f"{where}, is this host, and rank 0 can listen there")


def _connect(host: str, addresses: Sequence[str], port: int) -> Finding:
    """Return whether this host reaches another host's address; rank 0 may not listen there yet."""
    where = f"MASTER_ADDR:MASTER_PORT, {host}:{port}"
    refused, reasons = False, []
    for address in addresses:
        try:
            socket.create_connection((address, port), _CONNECT_SECONDS).close()
            return ok(f"{where}, is another host, and a program listens there")
        except ConnectionRefusedError:
            refused = True
        except TimeoutError:
            reasons.append(f"{address} does not answer within {_CONNECT_SECONDS:g} s")
        except OSError as error:
            reasons.append(f"{address}: {error.strerror or error}")
    if refused:
        return note(f"{where}, is another host, where no program listens yet, or a firewall refuses the port")
    return problem(
        f"{where}, is another host, which is not reached: {'; '.join(reasons)}",
        f"Check the address, and let firewalls pass TCP to port {port} of that host",
    )
