"""Read endpoints (a host and a port) from text, and lists of hosts: ``a:4,b:4``, or a file with a host per line."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from procgroup.types import Endpoint

_SLOTS = re.compile(r"(?P<name>.*[^:]|\[.*\]):(?P<slots>[0-9]{1,6})")
_EXPECTED = "HOST, HOST:N or USER@HOST:N with N from 1 to 999999, and an IPv6 address in brackets"


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


def parse_endpoints(text: str, default_port: int) -> list[Endpoint]:
    """Read ``host[:port]`` or a list with commas. Raises ValueError that shows the unusable part."""
    parts = [part.strip() for part in text.split(",")]
    if not all(parts):
        raise ValueError(f"expected host[:port], or several with commas between them, got {text!r}")
    endpoints = []
    for part in parts:
        has_port = part.rpartition("]")[2].count(":") == 1  # an IPv6 address without brackets cannot have one
        host = f"[{part}]" if ":" in part and not part.startswith("[") else part
        endpoints.append(parse_endpoint(part if has_port else f"{host}:{default_port}"))
    return endpoints


def parse_only_endpoint(text: str, default_port: int) -> Endpoint:
    """Read one ``host[:port]``. Raises ValueError for a list."""
    endpoint, *others = parse_endpoints(text, default_port)
    if others:
        raise ValueError(f"expected one host[:port] with this --rdzv-backend, got the list {text!r}")
    return endpoint


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


class Host(NamedTuple):
    """A host and its number of processes (None: not given). ``name`` is the name for ssh, which may be user@name."""

    name: str
    slots: int | None = None

    @property
    def label(self) -> str:
        """The name for messages, without the user."""
        return self.name.rpartition("@")[2]

    @property
    def is_local(self) -> bool:
        """Whether the name is localhost; other names are not compared with this host's own."""
        return self.name == "localhost"


def parse_hosts(text: str) -> list[Host]:
    """Read ``HOST:N,USER@HOST:N,HOST``; the processes of a host that is named again are added up.

    Raises ValueError, which shows the invalid part.
    """
    return _merge(_parse_host(part.strip()) for part in text.split(",")) if text.strip() else []


def read_hostfile(path: str) -> list[Host]:
    """Read a file with lines ``HOST``, ``HOST:N`` and ``HOST slots=N``; ``#`` begins a comment.

    Open MPI's ``max_slots=M`` may follow; it has no effect, because no host gets more processes than its slots.
    An empty path means no file and no hosts. Raises ValueError, which shows the invalid line, or why the file cannot be
    read.
    """
    if not path:
        return []
    try:
        lines = Path(path).read_text().splitlines()
    except (OSError, UnicodeError) as error:
        raise ValueError(f"cannot read the hosts from {path}: {error}") from error
    hosts = []
    for number, line in enumerate(lines, 1):
        words = line.partition("#")[0].split()
        if words:
            try:
                hosts.append(_parse_line(words))
            except ValueError as error:
                raise ValueError(f"{path}, line {number}: {error}") from None
    if not hosts:
        raise ValueError(f"{path} names no host; expected one in a line, such as: node1 slots=4")
    return _merge(hosts)


def _parse_line(words: list[str]) -> Host:
    host = _parse_host(words[0])
    if len(words) == 1:
        return host
    settings = [word.partition("=") for word in words[1:]]
    names = [name.replace("-", "_") for name, _, _ in settings]
    if names not in (["slots"], ["slots", "max_slots"]) or host.slots is not None:
        raise ValueError(f"expected HOST, HOST:N or HOST slots=N, got {' '.join(words)!r}")
    slots, *_ = [_parse_slots(number, word) for (_, _, number), word in zip(settings, words[1:], strict=True)]
    return Host(host.name, slots)


def _parse_host(text: str) -> Host:
    found = _SLOTS.fullmatch(text) if text.count(":") == 1 or "]" in text else None
    name = found["name"] if found else text
    slots = _parse_slots(found["slots"], text) if found else None
    user, at, address = name.rpartition("@")
    bare = address[1:-1] if address.startswith("[") and address.endswith("]") else address
    if not re.fullmatch(r"[\w.:%~-]+", bare) or (":" in bare and bare == address) or text.startswith("-"):
        raise ValueError(f"expected {_EXPECTED}, got {text!r}")
    return Host(user + at + bare, slots)


def _parse_slots(digits: str, shown: str) -> int:
    if not re.fullmatch("[0-9]{1,6}", digits) or int(digits) < 1:
        raise ValueError(f"expected {_EXPECTED}, got {shown!r}")
    return int(digits)


def _merge(hosts: Iterable[Host]) -> list[Host]:
    """Merge the entries of each host: some schedulers write one line for each process."""
    merged: dict[str, Host] = {}
    for host in hosts:
        known = merged.get(host.name)
        merged[host.name] = host if known is None else Host(host.name, (known.slots or 1) + (host.slots or 1))
    return list(merged.values())
