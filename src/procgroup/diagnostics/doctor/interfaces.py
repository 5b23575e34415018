"""The network interfaces of this host, with their addresses: rtnetlink's answer to RTM_GETADDR (man 7 rtnetlink).

The answer is that of this process's network namespace, also where /sys shows the interfaces of another one.
"""

from __future__ import annotations

import fcntl
import ipaddress
import socket
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from procgroup.diagnostics.doctor.system_files import read_number

_GET_ADDRESSES = 22  # RTM_GETADDR
_NEW_ADDRESS = 20  # RTM_NEWADDR
_DONE = 3  # NLMSG_DONE
_REQUEST_DUMP = 0x301  # NLM_F_REQUEST | NLM_F_DUMP
_ADDRESS, _LOCAL = 1, 2  # IFA_ADDRESS, IFA_LOCAL
_HEADER = struct.Struct("=IHHII")  # of a message: length, type, flags, sequence number, port
_INTERFACE = struct.Struct("=BBBBI")  # of an address: family, prefix length, flags, scope, index of the interface
_ATTRIBUTE = struct.Struct("=HH")  # length, type
_GET_MTU = 0x8921  # SIOCGIFMTU
_SECONDS = 2


class Interface(NamedTuple):
    """One address of this host: the interface's name, the address, and the length of its network's prefix."""

    name: str
    address: str
    prefix: int

    @property
    def is_loopback(self) -> bool:
        """Whether only this host reaches the address."""
        return ipaddress.ip_address(self.address).is_loopback

    @property
    def is_candidate(self) -> bool:
        """Whether another host may reach the address without the name of an interface."""
        found = ipaddress.ip_address(self.address)
        return not (found.is_loopback or found.is_link_local)


def addresses() -> list[Interface]:
    """Return all addresses of this host. Raises OSError where the system does not list them."""
    found: list[Interface] = []
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, socket.NETLINK_ROUTE) as connection:
        connection.settimeout(_SECONDS)
        body = _INTERFACE.pack(socket.AF_UNSPEC, 0, 0, 0, 0)
        connection.send(_HEADER.pack(_HEADER.size + len(body), _GET_ADDRESSES, _REQUEST_DUMP, 1, 0) + body)
        while True:
            for kind, message in _split(connection.recv(65536), _HEADER):
                if kind == _DONE:
                    return found
                if kind == _NEW_ADDRESS and (interface := _parse(message)):
                    found.append(interface)


def mtu(name: str) -> int | None:
    """Return the largest packet of an interface, in bytes; None where the system does not tell it."""
    request = struct.pack("16si12x", name.encode()[:15], 0)
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
            return int(struct.unpack("16si12x", fcntl.ioctl(any_socket, _GET_MTU, request))[1])
    except OSError:
        return None


def speed(name: str, root: Path = Path("/")) -> int | None:
    """Return the speed of an interface in Mbit/s; None where it has none, as virtual ones do."""
    found = read_number(root / "sys/class/net" / name / "speed")
    return found or None


def _parse(message: bytes) -> Interface | None:
    family, prefix, _, _, index = _INTERFACE.unpack_from(message)
    if family not in (socket.AF_INET, socket.AF_INET6):
        return None
    attributes = dict(_split(message[_INTERFACE.size :], _ATTRIBUTE))
    # On a link between two points, the first is the other end's address.
    raw = attributes.get(_LOCAL, attributes.get(_ADDRESS))
    if raw is None:
        return None
    return Interface(_name(index), socket.inet_ntop(family, raw), prefix)


def _name(index: int) -> str:
    try:
        return socket.if_indextoname(index)
    except OSError:
        return f"interface {index}"


def _split(data: bytes, header: struct.Struct) -> Iterator[tuple[int, bytes]]:
    """Yield (type, content) of messages or attributes, which begin with their length and type, and are aligned to 4."""
    offset = 0
    while offset + header.size <= len(data):
        length, kind = header.unpack_from(data, offset)[:2]
        if length < header.size:
            return
        yield kind, data[offset + header.size : offset + length]
        offset += (length + 3) & ~3
