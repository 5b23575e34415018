"""How the nodes of a job meet.

::

    --rdzv-backend   the agents meet
    static           at --master-addr:--master-port, where node 0 hosts their store
    c10d             at --rdzv-endpoint, where the node that owns the address hosts it
    file             in the file --rdzv-endpoint
    etcd, redis      at the server --rdzv-endpoint, which outlives every host of the job

A server's password is read from PROCGROUP_RDZV_PASSWORD, because every user of a host can read its command lines.
"""

from __future__ import annotations

import argparse
import os
import socket
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from procgroup.cluster.addresses import parse_endpoints, parse_only_endpoint, without_password
from procgroup.launch.deadlines import (
    JOIN_TIMEOUT_SECONDS,
    KEEP_ALIVE_ATTEMPTS,
    KEEP_ALIVE_SECONDS,
    LAST_CALL_SECONDS,
    SERVER_CONNECT_SECONDS,
    STATIC_TIMEOUT_SECONDS,
)
from procgroup.launch.flags import NodeRange, conf_is_host, conf_seconds, refuse
from procgroup.launch.job_plan import JobPlan
from procgroup.launch.nodes.endpoints import FoundStore, connect_each, find_store, share_file, use_server
from procgroup.launch.nodes.job_state import Node, Settings
from procgroup.launch.nodes.leases import Lease
from procgroup.process.environ import PROCGROUP_RDZV_PASSWORD
from procgroup.stores import addresses
from procgroup.stores.store import Store
from procgroup.types import Endpoint


class MeetingPlan(NamedTuple):
    """How this node meets the others of ``job``, and the settings that all must share.

    ``join`` is how many seconds the agent waits for enough nodes, ``last_call`` how many for further ones before the
    first round. ``endpoints`` are those at one of which an agent hosts the store. In a job without any, ``find`` opens
    the store, which is at ``place``.
    """

    job: JobPlan
    agent: str
    settings: Settings
    lease: Lease
    join: float = JOIN_TIMEOUT_SECONDS
    last_call: float = LAST_CALL_SECONDS
    endpoints: tuple[Endpoint, ...] = ()
    find: Callable[[Callable[[], bool]], FoundStore] | None = None
    place: str = ""
    is_host: bool | None = None
    node_rank: int | None = None

    def meeting_place(self) -> str:
        """Describe where the nodes meet, which node hosts the store there, and the job's id."""
        where = ", ".join(map(str, self.endpoints)) or self.place
        host = "node 0" if self.job.kind == "static" else "the node there"
        host = f"hosted by {host}; " if self.endpoints else ""
        return f"{where} ({host}--rdzv-id {self.job.run_id})"

    def find_store(self, stops: Callable[[], bool]) -> FoundStore:
        """Connect to the agents' store, or host it here; wait without a limit, until ``stops()`` returns True."""
        if self.find is not None:
            return self.find(stops)
        answers_torch = self.job.kind == "static"
        return find_store(self.endpoints, stops, is_host=self.is_host, answers_torch=answers_torch)

    def others(self, found: FoundStore) -> Iterator[tuple[int, FoundStore]]:
        """Yield the stores at the other endpoints, each with its distance from this one in the list."""
        places = {endpoint: place for place, endpoint in enumerate(self.endpoints)}
        here = places.get(found.endpoint, 0) if found.endpoint is not None else 0
        for other in connect_each([endpoint for endpoint in self.endpoints if endpoint != found.endpoint]):
            assert other.endpoint is not None
            yield places[other.endpoint] - here, other

    def node(self, node_id: str, found: FoundStore) -> Node:
        """Describe this node for the others; ``found`` is the agents' store."""
        can_host = self.is_host
        if can_host is None:  # it can where it owns one of the endpoints
            can_host = any(addresses.is_local(endpoint.host) for endpoint in self.endpoints)
        return Node(
            id=node_id,
            agent=self.agent,
            host=self.job.host or socket.gethostname(),
            pid=os.getpid(),
            processes=self.job.processes,
            address=self.job.local_addr or found.address_here(),
            role=self.job.role,
            rank=self.node_rank,
            hosts_store=found.server is not None,
            can_host=can_host,
        )


def plan_meeting(options: argparse.Namespace, job: JobPlan) -> MeetingPlan:
    """Return how the nodes meet by the parsed flags. Contradictory flags end the program with status 2."""
    nodes: NodeRange = options.nnodes
    conf: dict[str, str] = options.rdzv_conf
    is_static = job.kind == "static"
    join = conf_seconds(conf, "timeout", STATIC_TIMEOUT_SECONDS) if is_static else JOIN_TIMEOUT_SECONDS
    interval = max(0.05, conf_seconds(conf, "keep_alive_interval", KEEP_ALIVE_SECONDS))
    lease = Lease(interval, interval * int(conf.get("keep_alive_max_attempt", KEEP_ALIVE_ATTEMPTS)))
    return MeetingPlan(
        job,
        agent=os.urandom(8).hex(),
        settings=Settings(nodes.least, nodes.most, options.max_restarts, options.on_partition),
        lease=lease,
        join=conf_seconds(conf, "join_timeout", join),
        last_call=conf_seconds(conf, "last_call_timeout", LAST_CALL_SECONDS),
        endpoints=_endpoints(options, job),
        find=None if is_static else _finder(options, job.run_id, lease),
        place=f"the {'file' if options.rdzv_backend == 'file' else 'server'} {without_password(options.rdzv_endpoint)}",
        is_host=options.node_rank == 0 if is_static else conf_is_host(conf),
        node_rank=options.node_rank if is_static else None,
    )


def _endpoints(options: argparse.Namespace, job: JobPlan) -> tuple[Endpoint, ...]:
    """Return the endpoints, at one of which an agent hosts the store; none where no agent does."""
    if job.kind == "static":
        return (Endpoint(job.master_addr, job.master_port),)
    if options.rdzv_backend != "c10d":
        return ()
    try:
        return tuple(parse_endpoints(options.rdzv_endpoint or "localhost:0", _C10D_PORT))
    except ValueError as error:
        refuse(options, f"--rdzv-endpoint ({options.sources['rdzv_endpoint']}): {error}")


def _finder(
    options: argparse.Namespace, run_id: str, lease: Lease
) -> Callable[[Callable[[], bool]], FoundStore] | None:
    """Return the function that opens a store which no agent hosts; None where an agent hosts it."""
    if options.rdzv_backend == "file":
        return partial(share_file, options.rdzv_endpoint)
    if options.rdzv_backend == "c10d":
        return None
    try:
        open_store, servers = server_opener(
            options.rdzv_backend, options.rdzv_endpoint, options.rdzv_conf, run_id, lease.server_request_seconds
        )
    except ValueError as error:
        options.parser.error(f"--rdzv-endpoint ({options.sources['rdzv_endpoint']}): {error}")
    return partial(use_server, open_store, servers)


_C10D_PORT = 29400  # torchrun's
_ETCD_PORT = 2379
_REDIS_PORT = 6379


def server_opener(
    backend: str, endpoint: str, conf: Mapping[str, str], run_id: str, answer_seconds: float
) -> tuple[Callable[[], Store], list[Endpoint]]:
    """Return the function that opens the store, and the servers' addresses. Raises ValueError for an invalid endpoint.

    ``answer_seconds`` is how long one request may take; ``conf`` may hold user, cacert (or ssl_cert), and for etcd
    protocol and ssl_cert_key, as with torchrun.
    """
    security = {
        "user": conf.get("user", ""),
        "password": PROCGROUP_RDZV_PASSWORD.get(),
        "ca_file": conf.get("cacert", ""),
        "cert_file": conf.get("ssl_cert", ""),
        "key_file": conf.get("ssl_cert_key", ""),
    }
    given: dict[str, Any] = {name: value for name, value in security.items() if value}
    given["answer_timeout"] = answer_seconds
    if backend == "redis":
        url = endpoint if "://" in endpoint else f"redis://{parse_only_endpoint(endpoint, _REDIS_PORT)}"
        parts = urlsplit(url)
        return partial(_open_redis, url, run_id, given), [Endpoint(parts.hostname or "", parts.port or _REDIS_PORT)]
    servers = parse_endpoints(endpoint, _ETCD_PORT)
    scheme = f"{conf['protocol']}://" if "protocol" in conf else ""
    return partial(_open_etcd, [f"{scheme}{server}" for server in servers], run_id, given), servers


def _open_redis(url: str, prefix: str, options: Mapping[str, Any]) -> Store:
    from procgroup.stores.redis import RedisStore

    return RedisStore(url, prefix, SERVER_CONNECT_SECONDS, **options)


def _open_etcd(servers: list[str], prefix: str, options: Mapping[str, Any]) -> Store:
    from procgroup.stores.etcd import EtcdStore

    return EtcdStore(servers, prefix, SERVER_CONNECT_SECONDS, **options)
