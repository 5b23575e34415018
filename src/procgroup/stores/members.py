"""Who joined: one line of text for each member, as it lies in the store."""

from __future__ import annotations

import json
from typing import NamedTuple

_MAX_HOST = 256


class Member(NamedTuple):
    """One rank that joined: its rank, the world size that it was told, its host and process, a nonce of its own.

    ``hosts_store`` says that the store ends with its process.
    """

    rank: int
    size: int
    host: str
    pid: int
    nonce: str
    hosts_store: bool = False

    def line(self) -> str:
        return json.dumps(self._asdict()) + "\n"

    def process(self) -> str:
        return f"{self.host} pid {self.pid}"


def read_members(text: str) -> list[Member]:
    """Read members' lines. What is no member is left out: the store may hold what others wrote."""
    return [member for line in text.splitlines() if (member := read_member(line)) is not None]


def read_member(line: str) -> Member | None:
    """Read one member's line; return None where it is none."""
    try:
        fields = json.loads(line)
        return Member(
            int(fields["rank"]),
            int(fields["size"]),
            str(fields["host"])[:_MAX_HOST],
            int(fields["pid"]),
            str(fields["nonce"]),
            bool(fields.get("hosts_store", False)),
        )
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError, AttributeError):
        return None
