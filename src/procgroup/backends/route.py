"""TCP addresses at which the ranks of a group reach each other, derived from the store's address."""

from __future__ import annotations

import ipaddress
import socket
from typing import NamedTuple

from procgroup.stores.addresses import listen, numeric
from procgroup.stores.store import Store

_LOOPBACK = "127.0.0.1"


class Route(NamedTuple):
    """The way from this rank to the store's host.

    ``host`` is that host as the store was given it, ``store`` its literal address as seen from here, ``local`` the
    literal address of this rank's own host on the way there.
    """

    host: str
    store: str
    local: str

    @property
    def listening_host(self) -> str:
        """Where this rank listens so that the other ranks can reach it.

        That is ``local`` alone, unless ``local`` is a loopback address because the store's host has a name that leads
        to 127.0.1.1 on that host itself: then the other hosts reach this one at another address.
        """
        has_name = numeric(self.host) is None and self.host.lower() not in ("", "localhost")
        return self.host if has_name and _is_loopback(self.local) else self.local

    def listen(self) -> socket.socket:
        """Return a socket that listens on a free port at an address that the other ranks can reach."""
        return listen(self.listening_host, 0)

    def address_of(self, published: str) -> str:
        """Return the address at which this rank reaches a rank that published its ``local``.

        A rank with a loopback address is on the store's host, and other hosts reach it where they reach the store.
        """
        return self.store if _is_loopback(published) and not _is_loopback(self.local) else published


def route_to(store: Store) -> Route:
    """Return the way to the store's host; loopback for stores without a host."""
    inner = store
    while hasattr(inner, "underlying_store"):
        inner = inner.underlying_store
    host, port = getattr(inner, "host", None), getattr(inner, "port", None)
    if host is None or port is None:
        return Route(_LOOPBACK, _LOOPBACK, _LOOPBACK)
    name = host.encode() if host.isascii() else host  # see launch/nodes/reserved_port.py
    family, _, _, _, target = socket.getaddrinfo(name, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(target)
        return Route(str(host), str(target[0]), str(probe.getsockname()[0]))


def _is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback
