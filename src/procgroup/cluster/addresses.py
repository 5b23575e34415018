"""Read endpoints from text: a host and a port."""

from __future__ import annotations

import re

from procgroup.types import Endpoint


def parse_endpoint(text: str) -> Endpoint:
    """Read "host:port" or "[ipv6]:port". Raises ValueError for anything else. Resolves no name."""
    host, colon, port = text.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        raise ValueError(f"expected host:port, with an IPv6 address in brackets, got {text!r}")
    if not colon or not host:
        raise ValueError(f"expected host:port, got {text!r}")
    return Endpoint(host, parse_port(port, text))


def parse_port(port: str | int, text: str | None = None) -> int:
    """Read a TCP port. Raises ValueError, showing ``text`` if given, unless it is a number from 0 to 65535."""
    shown = port if text is None else text
    if isinstance(port, str) and not re.fullmatch("[0-9]{1,10}", port):
        raise ValueError(f"expected a port number, got {port!r} in {shown!r}")
    number = int(port)
    if not 0 <= number <= 65535:
        raise ValueError(f"expected a port between 0 and 65535, got {number} in {shown!r}")
    return number


def without_password(text: str) -> str:
    """Replace the password of a URL in the text by "***"."""
    return re.sub(r"(://[^/@:]*:)[^/@]*@", r"\1***@", text)
