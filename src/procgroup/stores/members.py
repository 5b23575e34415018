"""The members of a group that joined: one line of JSON for each, as stored under a key."""

from __future__ import annotations

import json
from typing import NamedTuple

_MAX_HOST = 256


class Member(NamedTuple):
    """One rank that joined: its rank, the world size that it was given, its host and process, and a random nonce.

    ``hosts_store`` is whether the store ends with its process, ``goes_on`` whether its process was in the job's group
    before, and has what was computed there.
    """

    rank: int
    size: int
    host: str
    pid: int
    nonce: str
    hosts_store: bool = False
    goes_on: bool = False

    def line(self) -> str:
        return json.dumps(self._asdict()) + "\n"

    def process(self) -> str:
        return f"{self.host} pid {self.pid}"


def read_members(text: str) -> list[Member]:
    """Parse members' lines. Other lines are left out: other programs may have written to the key."""
    return [member for line in text.splitlines() if (member := read_member(line)) is not None]


def read_member(line: str) -> Member | None:
    """Parse one member's line; return None for another line."""
    try:
        fields = json.loads(line)
        return Member(
            int(fields["rank"]),
            int(fields["size"]),
            str(fields["host"])[:_MAX_HOST],
            int(fields["pid"]),
            str(fields["nonce"]),
            bool(fields.get("hosts_store", False)),
            bool(fields.get("goes_on", False)),
        )
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError, AttributeError):
        return None
