"""Ranks that end or stop at a chosen instant of the start of their group: before a certain request to the store."""

from __future__ import annotations

import functools
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import procgroup as dist
from procgroup.stores.file import FileStore
from procgroup.stores.store import Store
from procgroup.stores.tcp import TCPStore

_REQUESTS = ("set", "add", "compare_set", "append", "get_unless")

# All ranks have joined before these, or the victim lets them: the instants in the order in which they come.
JOINING = (("append", "members"), ("add", "count"))
CONNECTING = (
    ("set", "links/"),
    ("get_unless", "links/"),
    ("set", "links/verdict"),
    ("get_unless", "links/verdict"),
    ("set", "shared/"),
    ("get_unless", "shared/"),
    ("set", "attached/verdict"),
)


How = str | Callable[[], None]


def end_at(request: str, key: str, how: How, starts_before: int = 0) -> None:
    """Let this process end ("kill", "raise", "exit"), stop ("stop") or make a call before its first such request.

    ``starts_before`` is how often the job has made its default group before.
    """
    for name in _REQUESTS:
        _watch(name, request, f"rendezvous/{starts_before}/{key}", how)


def _watch(name: str, request: str, key: str, how: How) -> None:
    inner = getattr(Store, name)

    @functools.wraps(inner)
    def call(self: Any, keys: str | Sequence[str], *arguments: Any, **named: Any) -> Any:
        first = keys if isinstance(keys, str) else keys[0]
        if name == request and first.startswith(key):
            if (request, key.rpartition("/")[2]) in JOINING:
                _wait_for_the_others(self)
            _end(how)
        return inner(self, keys, *arguments, **named)

    setattr(Store, name, call)


def _wait_for_the_others(store: Any) -> None:
    others = int(os.environ["WORLD_SIZE"]) - 1
    while store.get("rendezvous/0/count") != str(others).encode():
        time.sleep(0.002)
    time.sleep(0.05)  # the last of them may be about to wait for the verdict


def _end(how: How) -> None:
    if callable(how):
        how()
        return
    print("moment", time.monotonic(), flush=True)
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif how == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif how == "exit":
        sys.exit(3)
    else:
        raise ValueError("made by the test")


def moment(output: str) -> float:
    """Return when, as time.monotonic(), the rank with this output ended or stopped."""
    return float(output.partition("moment ")[2].split()[0])


def start_a_group(
    rank: int, size: int, victim: int, instant: tuple[str, str], how: str, timeout: float, store: str = ""
) -> None:
    """Make the default group while ``victim`` ends at the instant; an error says, as ``when``, when it was raised."""
    if rank == victim:
        end_at(*instant, how)
    try:
        if store == "tcp":
            address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
            own = TCPStore(address, port, size, rank == 0)
            dist.init_process_group(store=own, rank=rank, world_size=size, timeout=timeout)
        elif store:
            file = FileStore(store, size)
            dist.init_process_group(store=file, rank=rank, world_size=size, timeout=timeout)
        else:
            dist.init_process_group(timeout=timeout)
    except Exception as error:
        error.when = time.monotonic()  # type: ignore[attr-defined]
        raise
