"""What torch does before it calls the plug-in, with errors that name ranks: its env:// and tcp:// meet at a TCPStore.

Rank 0 hosts that store, and waits in it until all ranks are connected; at the deadline torch says how many have come,
and not which. So this rank keeps a store of its own on the same server, where the plug-in has written on the other
ranks that they are there (meeting.py). The other ranks of torch wait for the server for twice their timeout, say
nothing meanwhile, and are not ended by Ctrl-C. So they wait here until something listens at the address.

torch's own function makes the store in both cases. Its errors remain what they are where no rank can be named.
"""

from __future__ import annotations

import json
import re
import socket
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as distributed
from torch.distributed.rendezvous import _torchelastic_use_agent_store

from procgroup import errors
from procgroup.process import environ
from procgroup.rendezvous import hosting

PREFIX = "procgroup/start/"
HERE = f"{PREFIX}here/"
"""Where each rank writes its host when it has come to the plug-in."""
FAILED = f"{PREFIX}failed"
"""Where rank 0 writes that the start has failed before it came there itself."""

_SIGN = re.compile(rf"(.*){re.escape(HERE)}(\d+)$")
_CLIENTS = re.compile(r"(\d+)/(\d+) clients joined")
# torch compares whole seconds with the timeout, and so waits for up to a second more.
_ROUNDING = timedelta(seconds=0.5)
_SIGN_SECONDS = 0.3
_PAUSE_SECONDS = 0.02
_CONNECT_SECONDS = 2.0

_kept: list[Any] = []
"""The store of a start that has failed, in which the other ranks read that, until this process ends."""


class RendezvousTimeout(errors.RendezvousTimeout, distributed.DistStoreError):  # type: ignore[misc]
    """Some ranks never came; also the error that torch raises then."""


class HostMissing(errors.RendezvousTimeout, distributed.DistNetworkError):  # type: ignore[misc]
    """Rank 0, which hosts torch's store, never came; also the error that torch raises then."""


def create_store(
    make: Callable[..., Any],
    hostname: str,
    port: int,
    rank: int,
    world_size: int,
    timeout: timedelta,
    *more: Any,
    **named: Any,
) -> Any:
    """Return the store that torch's function ``make`` makes of these arguments, which are its own."""
    if _torchelastic_use_agent_store():
        return make(hostname, port, rank, world_size, timeout, *more, **named)
    start = _WaitingStart(hostname, port, rank, world_size, timeout)
    if rank != 0:
        start.await_host()
        return make(hostname, port, rank, world_size, timeout, *more, **named)
    return start.host(lambda limit: make(hostname, port, rank, world_size, limit, *more, **named))


def write_failure(error: errors.RendezvousTimeout) -> str:
    """Return the text from which ``read_failure`` makes the same error on another rank."""
    fields = {"missing": error.missing, "joined": error.joined, "size": error.size, "seconds": error.seconds}
    return json.dumps(fields)


def read_failure(text: str) -> errors.RendezvousTimeout:
    """Return the error that ``write_failure`` has written."""
    fields = json.loads(text)
    joined = {int(rank): host for rank, host in fields["joined"].items()}
    return errors.RendezvousTimeout(**{**fields, "joined": joined})


class _WaitingStart:
    def __init__(self, host: str, port: int, rank: int, size: int, timeout: timedelta) -> None:
        self.address = host, port
        self.rank = rank
        self.size = size
        self.timeout = timeout

    def await_host(self) -> None:
        """Wait until something listens at the address. Raises HostMissing at the deadline."""
        limit = self.timeout.total_seconds()
        deadline = time.monotonic() + limit
        host, port = self.address
        line = f"rank {self.rank} has not reached torch's store at {host}:{port}, which rank 0 hosts"
        with hosting.reporting(f"{line}; it tries for {limit:g} s", environ.PROCGROUP_WAIT_REPORT_SECONDS.get()):
            while (problem := self._problem(deadline)) is not None:
                if time.monotonic() >= deadline:
                    joined = {self.rank: socket.gethostname()}
                    error = HostMissing(missing=[0], joined=joined, size=self.size, seconds=limit)
                    error.args = (f"{error} {line} and which may have ended: {problem}. {hosting.LOOK_AT_RANK_0}",)
                    raise error
                time.sleep(_PAUSE_SECONDS)

    def _problem(self, deadline: float) -> OSError | None:
        """Return why nothing can be connected to at the address now."""
        left = max(deadline - time.monotonic(), _PAUSE_SECONDS)
        try:
            socket.create_connection(self.address, min(left, _CONNECT_SECONDS)).close()
        except OSError as error:
            return error
        return None

    def host(self, make: Callable[[timedelta], Any]) -> Any:
        """Host the store with torch's function; raise what names the missing ranks where torch's error does not."""
        try:
            kept = distributed.TCPStore(
                *self.address, self.size, True, timeout=self.timeout, wait_for_workers=False, multi_tenant=True
            )
        except (RuntimeError, ValueError):
            return make(self.timeout)  # torch says what is wrong
        try:
            store = make(max(self.timeout - _ROUNDING, self.timeout / 2))
        except distributed.DistStoreError as error:
            named = self._with_names(error, kept)
            if named is None:
                raise
            raise named from error
        store.set_timeout(self.timeout)
        return store

    def _with_names(self, error: Exception, kept: Any) -> RendezvousTimeout | None:
        """Return the error that names the ranks which are not among the clients; None where that is not known."""
        counts = _CLIENTS.search(str(error))
        if counts is None:
            return None
        missing_count = self.size - int(counts[1])
        signs = self._signs(kept, self.size - 1 - missing_count)
        joined = {0: socket.gethostname(), **{rank: host for rank, (_, host) in signs.items()}}
        missing = [rank for rank in range(self.size) if rank not in joined]
        if len(missing) != missing_count:
            return None
        seconds = self.timeout.total_seconds()
        named = RendezvousTimeout(missing=missing, joined=joined, size=self.size, seconds=seconds)
        for prefix in {prefix for prefix, _ in signs.values()}:
            kept.set(f"{prefix}{FAILED}", write_failure(named))
        _kept.append(kept)
        return named

    @staticmethod
    def _signs(kept: Any, count: int) -> dict[int, tuple[str, str]]:
        """Return the prefix of the keys and the host of each rank that has come; wait a little for so many."""
        deadline = time.monotonic() + _SIGN_SECONDS
        while True:
            matches = [(match, kept.get(key)) for key in kept.list_keys() if (match := _SIGN.match(key))]
            found = {int(match[2]): (match[1], host.decode(errors="replace")) for match, host in matches if host}
            if len(found) >= count or time.monotonic() >= deadline:
                return found
            time.sleep(_PAUSE_SECONDS)
