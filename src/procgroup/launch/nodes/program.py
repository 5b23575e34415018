"""The program that the agents run in each round: a command as N ranks, their environment, and their store."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from procgroup.environ import PROCGROUP_JOB_KEY, PROCGROUP_NOTICE, PROCGROUP_REPORT_SOCKET
from procgroup.launch import open_files
from procgroup.launch.nodes.hosted_store import HostedStore
from procgroup.launch.nodes.job_plan import JobPlan
from procgroup.launch.nodes.job_state import JobState
from procgroup.launch.nodes.reserved_port import ReservedPort
from procgroup.launch.output.job_output import JobOutput, Place
from procgroup.launch.ranks.placement import Placement
from procgroup.launch.ranks.worker_environment import Job, worker_environment
from procgroup.launch.ranks.worker_group import RankPlan


class CommandProgram:
    """A command as the ranks' program; ``${local_rank}`` in it stands for that of each rank."""

    def __init__(self, plan: JobPlan, job: Job, command: Sequence[str], placement: Placement) -> None:
        self.plan: JobPlan = plan
        self.job: Job = job
        self.command: Sequence[str] = command
        self.placement: Placement = placement
        self.output: JobOutput | None = None
        self._chosen_port: ReservedPort | None = None

    def host(self, state: JobState) -> HostedStore:
        key = PROCGROUP_JOB_KEY.get()
        if self.plan.kind == "static":
            return HostedStore(self.plan.master_addr, self.plan.master_port, key, self.job.run_id)
        address = state.members[0].address
        return HostedStore(address, self._reserve(address), key, self.job.run_id)

    def _reserve(self, address: str) -> ReservedPort:
        """Reserve MASTER_PORT for a round: the port that the user chose, or a new free port in each round."""
        try:
            if not self.plan.master_port:
                return ReservedPort(address, 0)
            if self._chosen_port is None:
                self._chosen_port = ReservedPort(address, self.plan.master_port)
            return self._chosen_port.share()
        except OSError as error:
            flag = "--local-addr" if address == self.plan.local_addr else "--master-addr"
            port = f" --master-port {self.plan.master_port}" if self.plan.master_port else ""
            raise OSError(f"cannot use {flag} {address}{port}: {open_files.describe(error)}") from error

    def plans(self, state: JobState, node_rank: int) -> list[RankPlan]:
        first, node = state.first_rank(node_rank), state.members[node_rank]
        assert self.output is not None
        place = Place(state.settings.max_nodes, node_rank, node.host, node.role)
        self.output.begin_attempt(state.round, range(first, first + node.processes), place)
        return [self._plan(state, node_rank, local_rank) for local_rank in range(node.processes)]

    def _plan(self, state: JobState, node_rank: int, local_rank: int) -> RankPlan:
        assert self.output is not None
        rank = state.first_rank(node_rank) + local_rank
        output = self.output.of_rank(rank, local_rank)
        environment = self.environment(state, node_rank, local_rank, output.error_file, os.environ)
        cpus = self.placement.cpus[local_rank] if self.placement.cpus else ()
        return RankPlan(self.command_of(local_rank), environment, output, rank, cpus)

    def command_of(self, local_rank: int) -> list[str]:
        """Return the command of one rank, with ``${local_rank}`` replaced by its local rank."""
        return [part.replace("${local_rank}", str(local_rank)) for part in self.command]

    def environment(
        self, state: JobState, node_rank: int, local_rank: int, error_file: str, base: Mapping[str, str]
    ) -> dict[str, str]:
        """Return the whole environment of one rank, on top of ``base``: torchrun's contract, its threads, its GPUs."""
        progress = self.output.progress if self.output is not None else None
        channels = {
            PROCGROUP_REPORT_SOCKET.name: progress.address if progress is not None else "",
            PROCGROUP_NOTICE.name: "",  # known when the rank is started
        }
        job = self.job._replace(threads_per_rank=self.placement.threads[local_rank])
        contract = worker_environment(job, state, node_rank, local_rank, error_file, {**base, **channels})
        return {**contract, **self.placement.devices.environment(local_rank)}
