"""torchrun's events of a job's end (``--event-log-handler console``): a line of JSON for each rank and the agent.

Names and fields are those of torch.distributed.elastic.events. Fields without a value are null, and ``timestamp`` is 0,
as with torchrun.
"""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from procgroup.launch.output.job_output import JobOutput
from procgroup.launch.ranks.rank_process import RankProcess
from procgroup.launch.ranks.worker_group import WorkerGroup


@dataclass
class Events:
    """Writes the events to stderr. ``backend`` is the rendezvous backend, ``entry_point`` the ranks' program."""

    output: JobOutput
    run_id: str
    role: str
    backend: str
    entry_point: str
    began: float = field(default_factory=time.monotonic)

    def show(self, group: WorkerGroup, exit_status: int, *, node_rank: int | None, nodes: int, restarts: int) -> None:
        """Write a line for each rank of this node, and one for its agent; ``nodes`` ran the last round."""
        shared = {
            "run_id": self.run_id,
            "group_rank": node_rank,
            "role": self.role,
            "hostname": socket.gethostname(),
            "total_run_time": int(time.monotonic() - self.began),
            "rdzv_backend": self.backend,
            "raw_error": None,
            "agent_restarts": restarts,
            "duration_ms": None,
        }
        of_group = {"group_world_size": nodes, "entry_point": self.entry_point}
        lines = [_of_rank(shared, of_group, local_rank, rank) for local_rank, rank in enumerate(group.ranks)]
        name = "FAILED" if exit_status else "SUCCEEDED"
        lines.append(_line("AGENT", name, {**shared, "global_rank": None, "worker_id": None}, of_group))
        self.output.put("".join(f"{line}\n" for line in lines))


def _of_rank(shared: Mapping[str, Any], of_group: Mapping[str, Any], local_rank: int, rank: RankProcess) -> str:
    code = None if rank.ending is None or rank.ended_by_launcher else rank.ending.exit_code
    name = "TERMINATED" if code is None else "FAILED" if code else "SUCCEEDED"
    metadata = {**shared, "global_rank": rank.rank, "worker_id": str(rank.pid)}
    return _line("WORKER", name, metadata, {**of_group, "local_rank": local_rank, "exit_code": code})


def _line(source: str, name: str, metadata: Mapping[str, Any], details: Mapping[str, Any]) -> str:
    metadata = {**metadata, "state": name, "metadata": json.dumps(details)}
    event = {"name": f"torchelastic.worker.status.{name}", "source": source, "timestamp": 0, "metadata": metadata}
    return json.dumps(event)
