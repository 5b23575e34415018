"""env:// under torchrun, whose agent has a store of torch's at MASTER_PORT: the ranks read there where to meet.

Rank 0 hosts procgroup's store on a free port, and writes the store's address and secret into the agent's store, where
the other ranks read them. torch's store gives the secret to every client that connects, so the secret keeps out only
processes that find the port by chance. A secret that the user gave (PROCGROUP_JOB_KEY) is not written.

Each attempt of torchrun has a record of its own. Within one, rank 0's store outlives the groups that are made there,
and the store counts their rounds. If each process counted its own rounds, the counts would differ for ever after an
initialisation that failed on some ranks only.
"""

from __future__ import annotations

import ipaddress
import json
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

from procgroup import types
from procgroup.errors import DistError, DistNetworkError, RendezvousError, RendezvousTimeout
from procgroup.process import environ
from procgroup.rendezvous import hosting
from procgroup.stores.store import Store
from procgroup.stores.tcp import TCPStore
from procgroup.types import Endpoint, Timeout

STALE_SECONDS = 2.0
"""How long a rank tries the address that it read before it reads again."""

_LONGEST_WAIT_SECONDS = 10 * 365 * 86400.0
_PAUSE_SECONDS = 0.01


def open_store(host: str, port: int, *, rank: int, world_size: int, timeout: Timeout) -> Store:
    """Return procgroup's store of this attempt, connected; the agent's store is at ``host`` and ``port``.

    Raises RendezvousError where PyTorch cannot be imported, DistNetworkError when a store is not reached in
    ``timeout``, RendezvousTimeout when rank 0 has not come by then.
    """
    return _AgentStoreMeeting(Endpoint(host, port), rank, world_size, types.seconds(timeout)).store()


def host_recorded_store(host: str, limit: float) -> tuple[TCPStore, str]:
    """Host procgroup's store at a free port of this host, on rank 0; return it, and the record for the other ranks."""
    store, job_key = hosting.host_announced_store(host, limit)
    return store, json.dumps({"host": host, "port": store.port, "job_key": job_key})


def join_recorded_store(
    read: Callable[[], dict[str, Any]], rank: str, where: str, limit: float, deadline: float
) -> Store | None:
    """Return the store of rank 0's record, which ``read`` waits for and returns; None where that is empty.

    The record may be that of a rank 0 that is no more: torchrun does not count an attempt that it makes because nodes
    came or went. So it is read again when nothing answers. Raises DistNetworkError at the deadline; ``rank`` and
    ``where`` say in it who has read where.
    """
    while record := read():
        if job_key := str(record["job_key"]):
            hosting.use_job_key(job_key)
        found = Endpoint(str(record["host"]), int(record["port"]))
        until = min(time.monotonic() + STALE_SECONDS, deadline)
        seconds = max(until - time.monotonic(), _PAUSE_SECONDS)
        try:
            store = TCPStore(found.host, found.port, is_master=False, timeout=seconds, wait_for_workers=False)
        except DistNetworkError as error:
            if until < deadline and time.monotonic() >= until:
                continue
            raise DistNetworkError(
                f"{rank} did not get to rank 0's store at {found}, which it read in {where}: {error}"
            ) from error
        store.set_timeout(limit)
        hosting.note_rank_0_hosts(store)
        return store
    return None


class _AgentStoreMeeting:
    def __init__(self, agent: Endpoint, rank: int, world_size: int, limit: float) -> None:
        self.agent = agent
        self.rank = rank
        self.world_size = world_size
        self.limit = limit
        self.deadline = time.monotonic() + limit
        self.key = f"procgroup/attempt_{environ.TORCHELASTIC_RESTART_COUNT.get()}/store"

    def store(self) -> Store:
        torchs_store = _torchs_store_class(self.rank)
        with self._in_words():
            agents = torchs_store(
                self.agent.host,
                self.agent.port,
                is_master=False,
                wait_for_workers=False,
                timeout=timedelta(seconds=min(self.limit, _LONGEST_WAIT_SECONDS)),
            )
        return self._host(agents) if self.rank == 0 else self._join(agents)

    def _host(self, agents: Any) -> Store:
        store, record = host_recorded_store(host_of_this_process(self.agent), self.limit)
        with self._in_words():
            agents.set(self.key, record)
        return store

    def _join(self, agents: Any) -> Store:
        where = f"the store of torchrun's agent at {self.agent}"
        store = join_recorded_store(
            lambda: self._read(agents), f"rank {self.rank} of {self.world_size}", where, self.limit, self.deadline
        )
        assert store is not None, "the record is never empty"
        return store

    def _read(self, agents: Any) -> dict[str, Any]:
        """Wait for rank 0's record, and return it."""
        with self._in_words():
            while not agents.check([self.key]):
                if time.monotonic() >= self.deadline:
                    missing = RendezvousTimeout(
                        missing=[0], joined={self.rank: socket.gethostname()}, size=self.world_size, seconds=self.limit
                    )
                    missing.add_note(f"Rank {self.rank} waited for it at the store of torchrun's agent, {self.agent}.")
                    raise missing
                time.sleep(_PAUSE_SECONDS)  # torch's own wait is not ended by Ctrl-C
            record: dict[str, Any] = json.loads(agents.get(self.key))
        return record

    @contextmanager
    def _in_words(self) -> Iterator[None]:
        """Turn what torch's store raises into an error that says which store it was."""
        try:
            yield
        except DistError:
            raise
        except RuntimeError as error:
            raise DistNetworkError(
                f"rank {self.rank} of {self.world_size} did not get to the store of torchrun's agent at MASTER_ADDR "
                f"and MASTER_PORT, {self.agent}, within {self.limit:g} s: {str(error).partition(chr(10))[0]}. A "
                "program that sets MASTER_ADDR or MASTER_PORT itself meets with init_method='tcp://host:port', rank= "
                "and world_size=, or sets TORCHELASTIC_USE_AGENT_STORE=False too."
            ) from error


def _torchs_store_class(rank: int) -> Any:
    try:
        from torch.distributed import TCPStore as TorchsStore
    except (ImportError, OSError) as error:
        raise RendezvousError(
            f"rank {rank} was started by torchrun, which keeps MASTER_PORT for a store of PyTorch's "
            f"(TORCHELASTIC_USE_AGENT_STORE=True), and PyTorch cannot be imported here: {error}. Start the ranks with "
            "`procgroup run`, which needs no PyTorch, or install PyTorch for this interpreter, or pass "
            "init_method='tcp://host:port' with a free port of rank 0's host, rank= and world_size=."
        ) from error
    return TorchsStore


def host_of_this_process(agent: Endpoint) -> str:
    """Return where rank 0 listens: MASTER_ADDR, or, on another host than that, the address that faces it.

    torchrun keeps MASTER_ADDR when nodes come and go, also when rank 0 is then elsewhere.
    """
    with suppress(OSError):
        family, kind, _, _, address = socket.getaddrinfo(agent.host, agent.port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)  # of a datagram socket: nothing is sent
            mine, theirs = str(probe.getsockname()[0]), str(probe.getpeername()[0])
        if mine != theirs and not ipaddress.ip_address(theirs.partition("%")[0]).is_loopback:
            return mine
    return agent.host
