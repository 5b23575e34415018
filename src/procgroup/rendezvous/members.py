"""Who joined: one line of text for each member, as it lies in the store."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class Member:
    """One rank that joined: its rank, the world size that it was told, its host and process, a nonce of its own."""

    rank: int
    size: int
    host: str
    pid: int
    nonce: str

    def line(self) -> str:
        return json.dumps(asdict(self)) + "\n"

    def process(self) -> str:
        return f"{self.host} pid {self.pid}"


def read_members(text: str) -> list[Member]:
    """Read members' lines. What is no member is left out: the store may hold what others wrote."""
    members = []
    for line in text.splitlines():
        try:
            fields = json.loads(line)
            members.append(
                Member(
                    int(fields["rank"]),
                    int(fields["size"]),
                    str(fields["host"]),
                    int(fields["pid"]),
                    str(fields["nonce"]),
                )
            )
        except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
            continue
    return members
