"""``--dry-run``: describe the ranks that would be started on this node, and the source of each value.

Values that depend on other nodes are shown as "assigned at start": the ranks and the world size of an elastic job, and
those of a static job with several nodes, because each node chooses its number of ranks. Secrets are not shown.
"""

from __future__ import annotations

import argparse
import errno
import os
import shlex
import socket
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from procgroup.cluster.addresses import without_password
from procgroup.cluster.topology import format_cpus
from procgroup.launch.deadlines import RESOLVE_SECONDS
from procgroup.launch.hosted_store import ReservedPort, WorkerStore
from procgroup.launch.job_plan import JobPlan
from procgroup.launch.output.sinks import flush, move_bytes, open_sinks
from procgroup.launch.program import CommandProgram, RankRound
from procgroup.process.environ import OMP_NUM_THREADS, PROCGROUP_JOB_KEY
from procgroup.stores import addresses
from procgroup.types import Endpoint

if TYPE_CHECKING:
    from procgroup.launch.nodes.meeting_plan import MeetingPlan

_AT_START = "assigned at start"

_SIZES = ("nnodes", "nproc_per_node")
_PLACES = ("rdzv_endpoint", "local_addr", "master_addr")
_GPUS = ("gpus", "virtual_local_rank")
# The flags that determine the variables of torchrun's contract.
_FLAGS: dict[str, Sequence[str]] = {
    "RANK": (*_SIZES, "node_rank"),
    "LOCAL_RANK": ("nproc_per_node", "virtual_local_rank"),
    "WORLD_SIZE": _SIZES,
    "LOCAL_WORLD_SIZE": ("nproc_per_node",),
    "GROUP_RANK": ("node_rank",),
    "GROUP_WORLD_SIZE": ("nnodes",),
    "ROLE_NAME": ("role",),
    "ROLE_RANK": (*_SIZES, "node_rank"),
    "ROLE_WORLD_SIZE": _SIZES,
    "MASTER_ADDR": _PLACES,
    "MASTER_PORT": ("rdzv_endpoint", "master_port"),
    "PROCGROUP_MASTER": (*_PLACES, "master_port"),
    "PROCGROUP_REPLACE_GLOO": ("replace_gloo",),
    "PROCGROUP_REPLACE_NCCL": ("replace_nccl",),
    "TORCHELASTIC_RUN_ID": ("rdzv_id",),
    "TORCHELASTIC_MAX_RESTARTS": ("max_restarts",),
    "TORCHELASTIC_ERROR_FILE": ("log_dir",),
    "TORCHELASTIC_SIGNALS_TO_HANDLE": ("signals_to_handle",),
    "CUDA_VISIBLE_DEVICES": _GPUS,
    "HIP_VISIBLE_DEVICES": _GPUS,
}


class PlannedLine(NamedTuple):
    """A name, its value, and the source of the value."""

    name: str
    value: str
    source: str = ""


def show(text: str) -> int:
    """Write the text to stdout; return the exit status, 1 if it cannot be written."""
    sinks = open_sinks()
    sinks[0].put_lines(None, f"{text}\n".encode(errors="replace"))
    flush(sinks, lambda seconds: move_bytes((), sinks, (), seconds), lambda: False)
    return int(sinks[0].has_failed)


def describe(
    options: argparse.Namespace, program: CommandProgram, meeting: MeetingPlan | None, notes: Sequence[str]
) -> str:
    """Return the whole text; ``notes`` are the lines that a start would print."""
    node_rank = meeting.node_rank or 0 if meeting is not None else 0
    ranks = [_variables(options, program, node_rank, local_rank) for local_rank in range(program.plan.processes)]
    common = [line for line in ranks[0] if all(line in other for other in ranks)]
    text = [
        "nothing is started (--dry-run)",
        "",
        *_aligned(_head(options, program, meeting)),
        "",
        "each rank",
        *_aligned(common),
    ]
    for local_rank, lines in enumerate(ranks):
        own = [*_own_lines(options, program, local_rank), *(line for line in lines if line not in common)]
        text += ["", _title(lines, local_rank), *_aligned(own)]
    return "\n".join(text + [f"\nnote: {note}" for note in notes])


def _head(options: argparse.Namespace, program: CommandProgram, meeting: MeetingPlan | None) -> Iterator[PlannedLine]:
    plan = program.plan
    node = _AT_START if plan.kind == "elastic" else str(options.node_rank) if meeting is not None else "0"
    yield PlannedLine("host", socket.gethostname())
    sources = ("nnodes",) if meeting is None else ("nnodes", "node_rank")
    yield PlannedLine("node", f"{node}, of {options.nnodes}", _sources(options, sources))
    yield PlannedLine("command", shlex.join(program.command))
    yield from (PlannedLine("store", text) for text in (_own_store(plan) if meeting is None else _meeting(meeting)))
    for name, source in options.sources.items():
        if source != "default" and name != "dry_run":
            yield PlannedLine("--" + name.replace("_", "-"), without_password(options.texts[name]), source)


def _title(lines: Sequence[PlannedLine], local_rank: int) -> str:
    rank = next(line.value for line in lines if line.name == "RANK")
    return f"rank {rank}, local rank {local_rank}, on {socket.gethostname()}"


def _own_lines(options: argparse.Namespace, program: CommandProgram, local_rank: int) -> Iterator[PlannedLine]:
    command = program.command_of(local_rank)
    if command != list(program.command):
        yield PlannedLine("command", shlex.join(command))
    if program.placement.cpus:
        yield PlannedLine("CPUs", format_cpus(program.placement.cpus[local_rank]), options.sources["numa_binding"])


def _variables(
    options: argparse.Namespace, program: CommandProgram, node_rank: int, local_rank: int
) -> list[PlannedLine]:
    """Return the variables that the launcher sets for a rank, sorted by name."""
    plan = program.plan
    round_ = _likely_round(plan, node_rank)
    names = program.environment(round_, local_rank, {})
    values = program.environment(round_, local_rank, os.environ)
    values.update(dict.fromkeys(_unknown(options, plan, node_rank), _AT_START))
    values[PROCGROUP_JOB_KEY.name] = "(a secret, not shown)"
    if options.log_dir and options.log_dir != os.devnull:
        values["TORCHELASTIC_ERROR_FILE"] = f"below {options.log_dir}"
    return [PlannedLine(name, values[name], _source(options, name, values[name])) for name in sorted(names)]


def _likely_round(plan: JobPlan, node_rank: int) -> RankRound:
    """Return the first round of the job, assuming that all nodes are like this one."""
    nodes = plan.max_nodes
    address = plan.master_addr if plan.kind == "static" else plan.local_addr or plan.master_addr
    store = WorkerStore(address, plan.master_port, 0, PROCGROUP_JOB_KEY.get())
    return RankRound(0, 0, node_rank, socket.gethostname(), (plan.processes,) * nodes, (plan.role,) * nodes, store)


def _unknown(options: argparse.Namespace, plan: JobPlan, node_rank: int) -> Iterator[str]:
    """Yield the variables whose values are unknown before the start."""
    yield from ("PROCGROUP_STORE", "PROCGROUP_NOTICE")
    if not options.rdzv_id:
        yield from ["TORCHELASTIC_RUN_ID"] if plan.kind == "solo" else []
    if plan.kind == "elastic" or not plan.master_port:
        yield from ("MASTER_PORT", "PROCGROUP_MASTER")
    if plan.kind == "elastic":
        yield from ("MASTER_ADDR", "GROUP_RANK", "GROUP_WORLD_SIZE")
    if plan.kind != "solo":
        yield from ("WORLD_SIZE", "ROLE_WORLD_SIZE")
    if plan.kind == "elastic" or node_rank:
        yield from ("RANK", "ROLE_RANK")


def _source(options: argparse.Namespace, name: str, value: str) -> str:
    if value == _AT_START:
        return ""
    if name == PROCGROUP_JOB_KEY.name:
        return "environment" if PROCGROUP_JOB_KEY.is_set() else "random"
    if name in _FLAGS:
        return _sources(options, _FLAGS[name])
    if os.environ.get(name) == value:
        return "environment"
    return "usable cores" if name == OMP_NUM_THREADS.name else "default"


def _sources(options: argparse.Namespace, names: Sequence[str]) -> str:
    """Return the sources of the flags that do not have their defaults."""
    sources = (options.sources[name] for name in names)
    return ", ".join(source for source in sources if source != "default") or "default"


def _own_store(plan: JobPlan) -> Iterator[str]:
    """Yield where the ranks of a job with one node meet, and whether this node can host their store there."""
    address = plan.local_addr or plan.master_addr
    where = f"{address}, port {plan.master_port or 'assigned at start'}"
    yield f"at {where}, hosted by this node: {_probe(Endpoint(address, plan.master_port)).text}"


def _meeting(plan: MeetingPlan) -> Iterator[str]:
    """Yield where the nodes meet, which node hosts their store there, and whether this node can."""
    if plan.find is not None:
        yield plan.place
    for endpoint in plan.endpoints:
        found = _probe(endpoint)
        is_host = found.is_own if plan.is_host is None else plan.is_host
        other = "node 0" if plan.job.kind == "static" else "the node that owns this address"
        yield f"at {endpoint}, hosted by {'this node' if is_host else other}: {found.text}"


class _Probe(NamedTuple):
    is_own: bool
    text: str


def _probe(endpoint: Endpoint) -> _Probe:
    """Try to bind an address, and release it."""
    problem = "its name has no address"
    for address in addresses.resolve(endpoint.host, RESOLVE_SECONDS):
        try:
            ReservedPort(address, endpoint.port).close()
        except OSError as error:
            if error.errno != errno.EADDRNOTAVAIL:
                return _Probe(True, f"cannot be bound here: {error.strerror}")
            problem = "no address of this host"
        else:
            return _Probe(True, "can be bound here")
    return _Probe(False, problem)


def _aligned(lines: Sequence[PlannedLine] | Iterator[PlannedLine]) -> list[str]:
    """Return the lines in columns; a long value does not widen them."""
    lines = list(lines)
    names = max((len(line.name) for line in lines), default=0)
    values = max((len(line.value) for line in lines if len(line.value) <= 40), default=0)
    return [f"  {line.name:<{names}}  {line.value:<{values}}  {line.source}".rstrip() for line in lines]
