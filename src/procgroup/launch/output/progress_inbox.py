"""The launcher's side of ``procgroup.report``: a socket that accepts reports of this user's processes only."""

from __future__ import annotations

import json
import os
import socket
import struct

from procgroup.launch.output.progress import MAX_NAME_CHARACTERS, MAX_TEXT_CHARACTERS, MAX_VALUES

Values = dict[str, int | float | str]

_MAX_DATAGRAM_BYTES = 8192
_MAX_DATAGRAMS = 256
_CREDENTIALS = struct.Struct("3i")  # process, user, group


class ProgressInbox:
    """Collects the ranks' reports. ``address`` is the value of PROCGROUP_REPORT_SOCKET for the ranks.

    The kernel adds the sender's user to each datagram; those of other users, and invalid ones, are dropped.
    """

    def __init__(self) -> None:
        self.address: str = f"procgroup-report-{os.urandom(12).hex()}"
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        self._socket.bind("\0" + self.address)

    @property
    def descriptor(self) -> int:
        return self._socket.fileno()

    def take(self) -> dict[int, Values]:
        """Return the latest report of each rank that has reported since the last call."""
        reports: dict[int, Values] = {}
        for _ in range(_MAX_DATAGRAMS):
            try:
                data, ancillary, _, _ = self._socket.recvmsg(_MAX_DATAGRAM_BYTES, socket.CMSG_SPACE(_CREDENTIALS.size))
            except BlockingIOError:
                break
            found = decode(data) if _is_of_this_user(ancillary) else None
            if found is not None:
                reports[found[0]] = found[1]
        return reports

    def close(self) -> None:
        self._socket.close()


def decode(data: bytes) -> tuple[int, Values] | None:
    """Return the rank and the values of a report; None for an invalid one."""
    try:
        content = json.loads(data)
        rank, values = content["rank"], content["values"]
    except (ValueError, RecursionError, TypeError, KeyError):
        return None
    if type(rank) is not int or not 0 <= rank < 1 << 31 or not isinstance(values, dict) or len(values) > MAX_VALUES:
        return None
    return rank, {_shown(name)[:MAX_NAME_CHARACTERS]: _checked(value) for name, value in values.items()}


def _checked(value: object) -> int | float | str:
    if isinstance(value, float) or (type(value) is int and abs(value) < 1 << 63):
        return value
    return _shown(str(value)[:MAX_TEXT_CHARACTERS])


def _shown(text: str) -> str:
    return "".join(character if character.isprintable() else "?" for character in text)


def _is_of_this_user(ancillary: list[tuple[int, int, bytes]]) -> bool:
    for level, kind, data in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_CREDENTIALS) and len(data) >= _CREDENTIALS.size:
            user: int = _CREDENTIALS.unpack(data[: _CREDENTIALS.size])[1]
            return user == os.geteuid()
    return False
