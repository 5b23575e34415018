"""From the parsed flags to the job. Contradictory flags are refused.

::

    nodes  --rdzv-backend   the job is
    1      static           of one node
    N      static           static: the nodes and their ranks are given by hand
    any    any other        elastic

nodes/meeting_plan.py has how the nodes of the last two meet.
"""

from __future__ import annotations

import argparse
import os
from signal import Signals
from typing import Literal, NamedTuple

from procgroup.launch.flags import NodeRange, refuse
from procgroup.process.environ import PYTHON_EXEC

DEFAULT_MASTER_PORT = 29500
"""Where the nodes of a static job meet when no port is given, as with torchrun."""

Kind = Literal["solo", "static", "elastic"]


class JobPlan(NamedTuple):
    """The job, and this node's part of it.

    ``host`` is this node's name in messages, "" for its host name. ``shutdown`` is how many seconds ranks have from
    SIGTERM to SIGKILL (None: the defaults of ``shutdown_seconds``). A rank that hangs for ``hang`` seconds is killed
    (None: never).
    """

    kind: Kind
    run_id: str
    max_nodes: int = 1
    max_restarts: int = 0
    master_addr: str = "127.0.0.1"
    master_port: int = 0
    local_addr: str = ""
    host: str = ""
    processes: int = 1
    role: str = "default"
    signals: tuple[Signals, ...] = ()
    shutdown: float | None = None
    hang: float | None = None
    replace_gloo: bool = False
    replace_nccl: bool = False
    replacements: int = 0
    keeps_going: bool = False


def plan(options: argparse.Namespace) -> JobPlan:
    """Return the job that the parsed flags describe. Contradictory flags end the program with status 2."""
    _check(options)
    nodes: NodeRange = options.nnodes
    is_elastic = options.rdzv_backend != "static" and not options.standalone
    kind: Kind = "elastic" if is_elastic else "static" if nodes.most > 1 else "solo"
    master = (options.master_addr, options.master_port or 0)
    if kind == "static":
        master = _static_endpoint(options)
    return JobPlan(
        kind=kind,
        run_id=options.rdzv_id or (os.urandom(16).hex() if kind == "solo" else "none"),
        max_nodes=nodes.most,
        # Replacements use up --max-restarts. Of several nodes it also counts the restarts after the loss of a node.
        max_restarts=0 if options.replace and kind == "solo" else options.max_restarts,
        master_addr=master[0],
        master_port=master[1],
        local_addr=options.local_addr,
        processes=options.nproc_per_node,
        role=options.role,
        signals=tuple(options.signals_to_handle),
        shutdown=options.shutdown_timeout,
        hang=options.hang_timeout or None,
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
    address, port = _static_endpoint(options)
    given = {"master_addr": address, "master_port": port}
    for name, meant in given.items():
        if options.sources[name] != "default" and getattr(options, name) not in (meant, None):
            said = f"--rdzv-endpoint {options.rdzv_endpoint} ({options.sources['rdzv_endpoint']}) is where nodes meet"
            _refuse(options, said, name, getattr(options, name))


def _refuse(options: argparse.Namespace, first: str, name: str, value: object) -> None:
    flag = "--" + name.replace("_", "-")
    options.parser.error(f"{first}, but {flag} is {value} ({options.sources[name]}): change one of them")


def _static_endpoint(options: argparse.Namespace) -> tuple[str, int]:
    """Return where nodes with fixed ranks meet: at the endpoint, which is node 0's, or at MASTER_ADDR:MASTER_PORT."""
    if not options.rdzv_endpoint:
        return options.master_addr, options.master_port or DEFAULT_MASTER_PORT
    from procgroup.cluster.addresses import parse_only_endpoint  # not for jobs of one node

    try:
        return parse_only_endpoint(options.rdzv_endpoint, options.master_port or DEFAULT_MASTER_PORT)
    except ValueError as error:
        refuse(options, f"--rdzv-endpoint ({options.sources['rdzv_endpoint']}): {error}")
