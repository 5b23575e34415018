"""From the parsed flags to the job: its nodes, and how they meet. Contradictory flags are refused.

::

    nodes  --rdzv-backend   the job is       the agents meet
    1      static           of one node      nowhere: the agent is alone
    N      static           static           at --master-addr:--master-port, where node 0 hosts their store
    any    c10d             elastic          at --rdzv-endpoint, where the node that owns the address hosts it
    any    file             elastic          in the file --rdzv-endpoint
    any    etcd, redis      elastic          at the server --rdzv-endpoint
"""

from __future__ import annotations

import argparse
import os
import socket
from collections.abc import Callable, Iterator
from functools import partial
from signal import Signals
from typing import TYPE_CHECKING, Literal, NamedTuple

from procgroup.cluster.addresses import without_password
from procgroup.environ import PYTHON_EXEC
from procgroup.launch import flags
from procgroup.launch.flags import NodeRange, refuse
from procgroup.launch.nodes.agent import Timeouts
from procgroup.launch.nodes.endpoints import (
    FoundStore,
    connect_each,
    find_store,
    parse_endpoints,
    parse_only_endpoint,
    share_file,
    use_server,
)
from procgroup.launch.nodes.job_state import JobState, Node, Settings
from procgroup.launch.nodes.leases import Lease
from procgroup.launch.nodes.solo import Solo
from procgroup.stores import addresses
from procgroup.types import Endpoint

if TYPE_CHECKING:
    from procgroup.launch.nodes.meeting import Meeting

DEFAULT_MASTER_PORT = 29500
"""Where the nodes of a static job meet when no port is given, as with torchrun."""

STATIC_TIMEOUT_SECONDS = 900.0
JOIN_TIMEOUT_SECONDS = 600.0
LAST_CALL_SECONDS = 30.0
KEEP_ALIVE_SECONDS = 1.0
KEEP_ALIVE_ATTEMPTS = 5

Kind = Literal["solo", "static", "elastic"]


class JobPlan(NamedTuple):
    """How the nodes of a job meet, and the settings that they must share.

    ``host`` is this node's name in messages, by default its host name.
    """

    kind: Kind
    run_id: str
    agent: str
    settings: Settings
    timeouts: Timeouts
    lease: Lease
    endpoints: tuple[Endpoint, ...] = ()
    find: Callable[[Callable[[], bool]], FoundStore] | None = None
    place: str = ""
    is_host: bool | None = None
    master_addr: str = "127.0.0.1"
    master_port: int = 0
    node_rank: int | None = None
    local_addr: str = ""
    host: str = ""
    processes: int = 1
    role: str = "default"
    signals: tuple[Signals, ...] = ()
    replace_gloo: bool = False
    replace_nccl: bool = False
    replacements: int = 0
    keeps_going: bool = False

    def meet(self, wake: Callable[[], None], memory: JobState | None) -> Meeting | Solo:
        """Start the meeting of this node with the others."""
        if self.kind == "solo":
            return Solo(self.node(os.urandom(8).hex(), None), self.settings, wake)
        from procgroup.launch.nodes.meeting import Meeting  # most jobs have one node, and start sooner without it

        return Meeting(self, wake, memory)

    def meeting_place(self) -> str:
        """Describe where the nodes meet, which node hosts the store there, and the job's id."""
        where = ", ".join(map(str, self.endpoints)) or self.place
        host = "hosted by node 0; " if self.kind == "static" else "hosted by the node there; " if self.endpoints else ""
        return f"{where} ({host}--rdzv-id {self.run_id})"

    def _can_host(self) -> bool:
        """Return whether this node owns one of the endpoints, so that it can host the agents' store."""
        if self.is_host is not None:
            return self.is_host
        return any(addresses.is_local(endpoint.host) for endpoint in self.endpoints)

    def find_store(self, stops: Callable[[], bool]) -> FoundStore:
        """Connect to the agents' store, or host it here; wait without a limit, until ``stops()`` returns True."""
        if self.find is not None:
            return self.find(stops)
        answers_torch = self.kind == "static"
        return find_store(self.endpoints, stops, is_host=self.is_host, answers_torch=answers_torch)

    def others(self, found: FoundStore) -> Iterator[tuple[int, FoundStore]]:
        """Yield the stores at the other endpoints, each with its distance from this one in the list."""
        places = {endpoint: place for place, endpoint in enumerate(self.endpoints)}
        here = places.get(found.endpoint, 0) if found.endpoint is not None else 0
        for other in connect_each([endpoint for endpoint in self.endpoints if endpoint != found.endpoint]):
            assert other.endpoint is not None
            yield places[other.endpoint] - here, other

    def node(self, node_id: str, found: FoundStore | None) -> Node:
        """Describe this node for the others; ``found`` is the agents' store, None in a job of one node."""
        hosts_store = found is not None and found.server is not None
        return Node(
            id=node_id,
            agent=self.agent,
            host=self.host or socket.gethostname(),
            pid=os.getpid(),
            processes=self.processes,
            address=self.local_addr or (self.master_addr if found is None else found.address_here()),
            role=self.role,
            rank=self.node_rank,
            hosts_store=hosts_store,
            can_host=self._can_host(),
        )


def plan(options: argparse.Namespace) -> JobPlan:
    """Return the job that the parsed flags describe. Contradictory flags end the program with status 2."""
    _check(options)
    nodes: NodeRange = options.nnodes
    conf: dict[str, str] = options.rdzv_conf
    is_elastic = options.rdzv_backend != "static" and not options.standalone
    kind: Kind = "elastic" if is_elastic else "static" if nodes.most > 1 else "solo"
    endpoints = _endpoints(options, kind)
    lease = _lease(conf)
    run_id = options.rdzv_id or (os.urandom(16).hex() if kind == "solo" else "none")
    return JobPlan(
        kind=kind,
        run_id=run_id,
        agent=os.urandom(8).hex(),
        settings=Settings(nodes.least, nodes.most, options.max_restarts, options.on_partition),
        timeouts=Timeouts(
            join=_join_seconds(conf, kind),
            last_call=flags.conf_seconds(conf, "last_call_timeout", LAST_CALL_SECONDS),
            shutdown=options.shutdown_timeout,
            hang=options.hang_timeout or None,
            cut_off=lease.grace,
            lead=lease.seconds - lease.earliest_loss,
        ),
        lease=lease,
        endpoints=endpoints,
        find=_finder(options, run_id, lease) if kind == "elastic" else None,
        place=f"the {'file' if options.rdzv_backend == 'file' else 'server'} {without_password(options.rdzv_endpoint)}",
        is_host=options.node_rank == 0 if kind == "static" else flags.conf_is_host(conf),
        master_addr=endpoints[0].host if kind == "static" else options.master_addr,
        master_port=endpoints[0].port if kind == "static" else options.master_port or 0,
        node_rank=options.node_rank if kind == "static" else None,
        local_addr=options.local_addr,
        processes=options.nproc_per_node,
        role=options.role,
        signals=tuple(options.signals_to_handle),
        replace_gloo=options.replace_gloo,
        replace_nccl=options.replace_nccl,
        replacements=options.max_restarts if options.replace else 0,
        keeps_going=options.keep_going,
    )


def unused_flags(options: argparse.Namespace, job: JobPlan) -> list[str]:
    """Return a line for each given flag or variable that has no effect in this job."""
    of_static = {"node_rank": "node ranks are assigned", "master_addr": "rank 0's host publishes where the ranks meet"}
    ignored = [
        f"{options.sources[name]} has no effect with --rdzv-backend {options.rdzv_backend}: {why}"
        for name, why in of_static.items()
        if job.kind == "elastic" and options.sources[name] != "default"
    ]
    if job.kind == "solo" and options.rdzv_endpoint:
        ignored.append(f"{options.sources['rdzv_endpoint']} has no effect: this job has one node")
    if options.run_path and PYTHON_EXEC.is_set():
        ignored.append(f"PYTHON_EXEC has no effect with --run-path ({options.sources['run_path']})")
    return ignored


def _check(options: argparse.Namespace) -> None:
    nodes: NodeRange = options.nnodes
    source = options.sources
    if options.replace and options.max_restarts == 0:
        options.parser.error(
            f"--replace ({source['replace']}) needs --max-restarts N: how often a node may start a rank again"
        )
    if options.keep_going and nodes.most > 1:
        _refuse(options, f"--keep-going ({source['keep_going']}) is for one node", "nnodes", nodes)
    if options.standalone and nodes.most > 1:
        _refuse(options, f"--standalone ({source['standalone']}) is one node", "nnodes", nodes)
    if options.rdzv_backend == "static" and nodes.least != nodes.most:
        _refuse(
            options, f"--rdzv-backend static ({source['rdzv_backend']}) has a fixed number of nodes", "nnodes", nodes
        )
    if options.rdzv_backend == "static" and options.node_rank >= nodes.most:
        text = f"--nnodes {nodes} ({source['nnodes']}) numbers the nodes from 0 to {nodes.most - 1}"
        _refuse(options, text, "node_rank", options.node_rank)
    if options.standalone and options.rdzv_endpoint:
        _refuse(
            options,
            f"--standalone ({source['standalone']}) is one node, which meets no others",
            "rdzv_endpoint",
            options.rdzv_endpoint,
        )
    needed = {"file": "PATH: a file that all nodes reach", "redis": "HOST[:PORT] or a redis:// URL"}
    needed |= dict.fromkeys(("etcd", "etcd-v2"), "HOST[:PORT] of the servers")
    if options.rdzv_backend in needed and not options.rdzv_endpoint and not options.standalone:
        what = needed[options.rdzv_backend]
        options.parser.error(f"--rdzv-backend {options.rdzv_backend} needs --rdzv-endpoint {what}")
    if options.rdzv_backend == "c10d" and not options.rdzv_endpoint and nodes.most > 1:
        options.parser.error("--rdzv-backend c10d needs --rdzv-endpoint HOST[:PORT]: the address of one of the nodes")
    if options.rdzv_backend == "static" and options.rdzv_endpoint and nodes.most > 1:
        _check_static_endpoint(options)


def _check_static_endpoint(options: argparse.Namespace) -> None:
    """Refuse an endpoint that differs from MASTER_ADDR or MASTER_PORT: nodes with fixed ranks meet at one address."""
    endpoint = _static_endpoint(options)
    given = {"master_addr": endpoint.host, "master_port": endpoint.port}
    for name, meant in given.items():
        if options.sources[name] != "default" and getattr(options, name) not in (meant, None):
            said = f"--rdzv-endpoint {options.rdzv_endpoint} ({options.sources['rdzv_endpoint']}) is where nodes meet"
            _refuse(options, said, name, getattr(options, name))


def _refuse(options: argparse.Namespace, first: str, name: str, value: object) -> None:
    flag = "--" + name.replace("_", "-")
    options.parser.error(f"{first}, but {flag} is {value} ({options.sources[name]}): change one of them")


def _endpoints(options: argparse.Namespace, kind: Kind) -> tuple[Endpoint, ...]:
    """Return the endpoints, at one of which an agent hosts the store; none where no agent does."""
    if kind == "solo" or (kind == "elastic" and options.rdzv_backend != "c10d"):
        return ()
    if kind == "static":
        return (_static_endpoint(options),)
    try:
        return tuple(parse_endpoints(options.rdzv_endpoint or "localhost:0"))
    except ValueError as error:
        refuse(options, f"--rdzv-endpoint ({options.sources['rdzv_endpoint']}): {error}")


def _static_endpoint(options: argparse.Namespace) -> Endpoint:
    """Return where nodes with fixed ranks meet: at the endpoint, which is node 0's, or at MASTER_ADDR:MASTER_PORT."""
    if not options.rdzv_endpoint:
        return Endpoint(options.master_addr, options.master_port or DEFAULT_MASTER_PORT)
    try:
        return parse_only_endpoint(options.rdzv_endpoint, options.master_port or DEFAULT_MASTER_PORT)
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
    from procgroup.launch.nodes import server_rendezvous  # its clients are optional

    try:
        open_store, servers = server_rendezvous.opener(
            options.rdzv_backend, options.rdzv_endpoint, options.rdzv_conf, run_id, lease.server_request_seconds
        )
    except ValueError as error:
        options.parser.error(f"--rdzv-endpoint ({options.sources['rdzv_endpoint']}): {error}")
    return partial(use_server, open_store, servers)


def _join_seconds(conf: dict[str, str], kind: Kind) -> float:
    default = JOIN_TIMEOUT_SECONDS
    if kind == "static":
        default = flags.conf_seconds(conf, "timeout", STATIC_TIMEOUT_SECONDS)
    return flags.conf_seconds(conf, "join_timeout", default)


def _lease(conf: dict[str, str]) -> Lease:
    interval = max(0.05, flags.conf_seconds(conf, "keep_alive_interval", KEEP_ALIVE_SECONDS))
    return Lease(interval, interval * int(conf.get("keep_alive_max_attempt", KEEP_ALIVE_ATTEMPTS)))
