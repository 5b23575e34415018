"""Host names to listening sockets and numeric addresses, for stores and their clients."""

from __future__ import annotations

import errno
import ipaddress
import queue
import socket
import threading
import time
from contextlib import suppress

from procgroup.errors import DistNetworkError

_BACKLOG = 4096
_LOOPBACK = ("127.0.0.1", "::1")
_RESOLVE_SECONDS = 5.0
# An address of the block for documentation (RFC 5737), which no host has: its route is the default route.
_OTHER_NETWORK = "192.0.2.1"
_DISCARD_PORT = 9


def numeric(host: str) -> str | None:
    """Return the host if it is a literal IPv4 or IPv6 address, without brackets."""
    literal = host.removeprefix("[").removesuffix("]")
    try:
        ipaddress.ip_address(literal)
    except ValueError:
        return None
    return literal


def resolve(host: str, seconds: float) -> list[str]:
    """Return the numeric addresses of a host; an empty list when it has none, or none in time.

    A literal address and "localhost" need no resolver. A resolver may block for longer than ``seconds`` and
    cannot be interrupted, so it runs in a daemon thread, which is then abandoned.
    """
    literal = numeric(host)
    if literal is not None:
        # No client can connect to a wildcard: the loopback address replaces it.
        return [{"0.0.0.0": _LOOPBACK[0], "::": _LOOPBACK[1]}.get(literal, literal)]
    if host.lower() in ("localhost", ""):
        return list(_LOOPBACK)
    found: queue.SimpleQueue[list[str]] = queue.SimpleQueue()
    threading.Thread(target=_call_resolver, args=(host, found), daemon=True).start()
    try:
        return found.get(timeout=min(seconds, threading.TIMEOUT_MAX))
    except queue.Empty:
        return []


def _call_resolver(host: str, found: queue.SimpleQueue[list[str]]) -> None:
    from procgroup import _native

    _native.add_own_thread()
    try:
        answers = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        found.put([])
    else:
        found.put(list(dict.fromkeys(str(answer[4][0]) for answer in answers)))


def resolve_until(host: str, seconds: float) -> list[str]:
    """Return a host's addresses; repeat until it has one, for at most ``seconds``."""
    deadline = time.monotonic() + seconds
    pause = 0.05
    while True:
        addresses = resolve(host, max(0.0, deadline - time.monotonic()))
        left = deadline - time.monotonic()
        if addresses or left <= 0:
            return addresses
        time.sleep(min(pause, left))
        pause = min(pause * 2, 1.0)


def listen(host: str, port: int) -> socket.socket:
    """Return a listening socket: on the address alone if ``host`` is an address of this host, else on every address.

    A host's own name may map to 127.0.1.1, and the address of a service belongs to no host: so another name,
    or an address of another host, listens on the wildcard. "localhost" is the loopback address.
    Raises DistNetworkError when the port is taken or not allowed.
    """
    literal = _LOOPBACK[0] if host.lower() == "localhost" else numeric(host)
    try:
        if literal is None:
            return _listen_everywhere(port)
        try:
            return _listen_on(literal, port)
        except OSError as error:
            if error.errno != errno.EADDRNOTAVAIL:
                raise
            return _listen_everywhere(port)
    except OSError as error:
        raise DistNetworkError(_listen_text(host, port, error)) from error


def listen_if_local(host: str, port: int) -> socket.socket | None:
    """Return a listening socket, as ``listen`` does, if ``host`` is an address or a name of this host; else None.

    Raises DistNetworkError when the port is taken or not allowed.
    """
    return listen(host, port) if is_local(host) else None


def is_local(host: str) -> bool:
    """Return whether ``host`` is this host: whether one of its addresses can be bound here."""
    candidates = [numeric(host) or _LOOPBACK[0]] if is_literal(host) else resolve(host, _RESOLVE_SECONDS)
    return any(map(_is_bindable, candidates))


def is_literal(host: str) -> bool:
    """Return whether ``host`` is an address or "localhost", for which no resolver is needed."""
    return numeric(host) is not None or host.lower() == "localhost"


def source_address(host: str, port: int, seconds: float) -> str | None:
    """Return this host's source address for packets to ``host``; None without a route.

    The name is resolved for at most ``seconds``.
    """
    for found in resolve(host, seconds):
        family = socket.AF_INET6 if ":" in found else socket.AF_INET
        with suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((found, port))  # of a datagram socket: nothing is sent
            return str(probe.getsockname()[0])
    return None


def outward_address() -> str | None:
    """Return this host's source address for packets to other networks; None without a route."""
    return source_address(_OTHER_NETWORK, _DISCARD_PORT, 0.0)


def _is_bindable(address: str) -> bool:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.bind((address, 0))
    except OSError:
        return False
    return True


def _listen_on(address: str, port: int, *, dual_stack: bool = False) -> socket.socket:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0 if dual_stack else 1)
        listener.bind((address, port))
        listener.listen(_BACKLOG)
    except BaseException:
        listener.close()
        raise
    return listener


def _listen_everywhere(port: int) -> socket.socket:
    try:
        return _listen_on("::", port, dual_stack=True)
    except OSError as error:
        if error.errno not in (errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL, errno.EINVAL, errno.EPROTONOSUPPORT):
            raise
        return _listen_on("0.0.0.0", port)


def _listen_text(host: str, port: int, error: OSError) -> str:
    number = error.errno or 0
    name = errno.errorcode.get(number, "unknown")
    advice = {
        errno.EADDRINUSE: "Another program listens there: choose another port, or 0 for any free one",
        errno.EACCES: "Choose a port above 1023",
    }.get(number, "Choose another address or port")
    return (
        f"The server socket has failed to listen on any local network address. host: {host}, port: {port}, "
        f"code: {-number}, name: {name}, message: {error.strerror}. {advice}."
    )
