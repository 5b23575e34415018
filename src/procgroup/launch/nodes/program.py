"""The program that the agents run in each round: a command as N ranks, their environment, and their store."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from procgroup.environ import (
    PROCGROUP_JOB_KEY,
    PROCGROUP_NOTICE,
    PROCGROUP_REPLACE_GLOO,
    PROCGROUP_REPLACE_NCCL,
    PROCGROUP_REPORT_SOCKET,
    PROCGROUP_STORE_KEY,
)
from procgroup.launch import open_files
from procgroup.launch.nodes.hosted_store import HostedStore
from procgroup.launch.nodes.job_plan import JobPlan
from procgroup.launch.nodes.job_state import JobState
from procgroup.launch.nodes.reserved_port import ReservedPort
from procgroup.launch.output.job_output import JobOutput, Place
from procgroup.launch.ranks.placement import Placement
from procgroup.launch.ranks.rank_process import RankPlan


class CommandProgram:
    """A command as the ranks' program; ``${local_rank}`` in it stands for that of each rank."""

    def __init__(self, plan: JobPlan, command: Sequence[str], placement: Placement) -> None:
        self.plan: JobPlan = plan
        self.command: Sequence[str] = command
        self.placement: Placement = placement
        self.output: JobOutput | None = None
        self._chosen_port: ReservedPort | None = None

    def host(self, state: JobState) -> HostedStore:
        """Host the store of the running round's ranks, on the first node."""
        key = PROCGROUP_JOB_KEY.get()
        if self.plan.kind == "static":
            return HostedStore(self.plan.master_addr, self.plan.master_port, key, self.plan.run_id)
        address = state.members[0].address
        return HostedStore(address, self._reserve(address), key, self.plan.run_id)

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
        """Return the ranks to start on a node; the state holds the address of their store."""
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
        """Return the whole environment of one rank of the running round, on top of the launcher's own (``base``).

        It is torchrun's contract, and what procgroup adds. OMP_NUM_THREADS, PYTHONFAULTHANDLER and
        TORCH_NCCL_ASYNC_ERROR_HANDLING are set only where ``base`` has none, or an empty one.
        """
        assert state.store is not None
        node = state.members[node_rank]
        of_role = [index for index, other in enumerate(state.members) if other.role == node.role]
        before = sum(state.members[index].processes for index in of_role if index < node_rank)
        progress = self.output.progress if self.output is not None else None
        defaults = {
            "OMP_NUM_THREADS": str(self.placement.threads[local_rank]),
            "PYTHONFAULTHANDLER": "1",
            "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
        }
        contract = {
            "RANK": str(state.first_rank(node_rank) + local_rank),
            "LOCAL_RANK": str(local_rank),
            "WORLD_SIZE": str(state.world_size),
            "LOCAL_WORLD_SIZE": str(node.processes),
            "GROUP_RANK": str(node_rank),
            "GROUP_WORLD_SIZE": str(len(state.members)),
            "ROLE_NAME": node.role,
            "ROLE_RANK": str(before + local_rank),
            "ROLE_WORLD_SIZE": str(sum(state.members[index].processes for index in of_role)),
            "TORCHELASTIC_RUN_ID": self.plan.run_id,
            "TORCHELASTIC_RESTART_COUNT": str(state.restarts),
            "TORCHELASTIC_MAX_RESTARTS": str(state.settings.max_restarts),
            # Where False, MASTER_PORT is the program's own, and rank 0 of a PyTorch program hosts torch's store there.
            "TORCHELASTIC_USE_AGENT_STORE": str(self.plan.kind == "static"),
            "TORCHELASTIC_ERROR_FILE": error_file,
            "TORCHELASTIC_SIGNALS_TO_HANDLE": ",".join(number.name for number in self.plan.signals),
            PROCGROUP_REPORT_SOCKET.name: progress.address if progress is not None else "",
            PROCGROUP_NOTICE.name: "",  # known when the rank is started
        }
        if self.plan.replace_gloo:
            contract[PROCGROUP_REPLACE_GLOO.name] = "1"
        if self.plan.replace_nccl:
            contract[PROCGROUP_REPLACE_NCCL.name] = "1"
        given = {name: value for name, value in base.items() if value or name not in defaults}
        given.pop(PROCGROUP_STORE_KEY.name, None)  # of another store, where a child of ``spawn`` starts the launcher
        devices = self.placement.devices.environment(local_rank)
        return {**defaults, **given, **contract, **state.store.environment(), **devices}


REPLACED = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""Variables that people set by hand and that a launcher replaces; it says so."""
