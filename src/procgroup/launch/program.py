"""The program that a node runs in each round: a command as N ranks, with their environment and their store."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from procgroup.launch.hosted_store import HostedStore, ReservedPort, WorkerStore
from procgroup.launch.job_plan import JobPlan
from procgroup.launch.output.job_output import JobOutput, OutputPlace
from procgroup.launch.ranks.placement import Placement
from procgroup.launch.ranks.rank_process import RankPlan, describe_error
from procgroup.process.environ import (
    PROCGROUP_JOB_KEY,
    PROCGROUP_NOTICE,
    PROCGROUP_REPLACE_GLOO,
    PROCGROUP_REPLACE_NCCL,
    PROCGROUP_REPORT_SOCKET,
    PROCGROUP_STORE_KEY,
)


class RankRound(NamedTuple):
    """One start of the job's ranks, as the node ``node_rank`` sees it; ``host`` is that node's name in messages.

    ``processes`` and ``roles`` have an entry for each node, in the order of the node ranks. ``restarts`` counts the
    restarts so far. ``store`` is where the ranks meet.
    """

    number: int
    restarts: int
    node_rank: int
    host: str
    processes: Sequence[int]
    roles: Sequence[str]
    store: WorkerStore

    @property
    def first_rank(self) -> int:
        """The global rank of the node's first process."""
        return sum(self.processes[: self.node_rank])


class CommandProgram:
    """A command as the ranks' program; ``${local_rank}`` in it stands for that of each rank."""

    def __init__(self, plan: JobPlan, command: Sequence[str], placement: Placement) -> None:
        self.plan: JobPlan = plan
        self.command: Sequence[str] = command
        self.placement: Placement = placement
        self._chosen_port: ReservedPort | None = None

    def host(self, address: str) -> HostedStore:
        """Host the store of a round's ranks at an address of this node, which is the first one."""
        key = PROCGROUP_JOB_KEY.get()
        if self.plan.kind == "static":
            return HostedStore(self.plan.master_addr, self.plan.master_port, key, self.plan.run_id)
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
            raise OSError(f"cannot use {flag} {address}{port}: {describe_error(error)}") from error

    def plans(self, round_: RankRound, output: JobOutput) -> list[RankPlan]:
        """Return the ranks to start on this node, and prepare the places of their output."""
        node_rank, first = round_.node_rank, round_.first_rank
        processes = round_.processes[node_rank]
        place = OutputPlace(self.plan.max_nodes, node_rank, round_.host, round_.roles[node_rank])
        output.begin_attempt(round_.number, range(first, first + processes), place)
        address = output.progress.address if output.progress is not None else ""
        return [self._plan(round_, local_rank, output, address) for local_rank in range(processes)]

    def _plan(self, round_: RankRound, local_rank: int, output: JobOutput, report_address: str) -> RankPlan:
        rank = round_.first_rank + local_rank
        of_rank = output.of_rank(rank, local_rank)
        environment = self.environment(round_, local_rank, os.environ, of_rank.error_file, report_address)
        cpus = self.placement.cpus[local_rank] if self.placement.cpus else ()
        return RankPlan(self.command_of(local_rank), environment, of_rank, rank, cpus)

    def command_of(self, local_rank: int) -> list[str]:
        """Return the command of one rank, with ``${local_rank}`` replaced by its local rank."""
        return [part.replace("${local_rank}", str(local_rank)) for part in self.command]

    def environment(
        self,
        round_: RankRound,
        local_rank: int,
        base: Mapping[str, str],
        error_file: str = "",
        report_address: str = "",
    ) -> dict[str, str]:
        """Return the whole environment of one rank of a round, on top of the launcher's own (``base``).

        It is torchrun's contract, and what procgroup adds. OMP_NUM_THREADS, PYTHONFAULTHANDLER and
        TORCH_NCCL_ASYNC_ERROR_HANDLING are set only where ``base`` has none, or an empty one.
        """
        processes, role = round_.processes[round_.node_rank], round_.roles[round_.node_rank]
        of_role = [index for index, other in enumerate(round_.roles) if other == role]
        before = sum(round_.processes[index] for index in of_role if index < round_.node_rank)
        defaults = {
            "OMP_NUM_THREADS": str(self.placement.threads[local_rank]),
            "PYTHONFAULTHANDLER": "1",
            "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
        }
        contract = {
            "RANK": str(round_.first_rank + local_rank),
            "LOCAL_RANK": str(local_rank),
            "WORLD_SIZE": str(sum(round_.processes)),
            "LOCAL_WORLD_SIZE": str(processes),
            "GROUP_RANK": str(round_.node_rank),
            "GROUP_WORLD_SIZE": str(len(round_.processes)),
            "ROLE_NAME": role,
            "ROLE_RANK": str(before + local_rank),
            "ROLE_WORLD_SIZE": str(sum(round_.processes[index] for index in of_role)),
            "TORCHELASTIC_RUN_ID": self.plan.run_id,
            "TORCHELASTIC_RESTART_COUNT": str(round_.restarts),
            "TORCHELASTIC_MAX_RESTARTS": str(self.plan.max_restarts),
            # Where False, MASTER_PORT is the program's own, and rank 0 of a PyTorch program hosts torch's store there.
            "TORCHELASTIC_USE_AGENT_STORE": str(self.plan.kind == "static"),
            "TORCHELASTIC_ERROR_FILE": error_file,
            "TORCHELASTIC_SIGNALS_TO_HANDLE": ",".join(number.name for number in self.plan.signals),
            PROCGROUP_REPORT_SOCKET.name: report_address,
            PROCGROUP_NOTICE.name: "",  # known when the rank is started
        }
        if self.plan.replace_gloo:
            contract[PROCGROUP_REPLACE_GLOO.name] = "1"
        if self.plan.replace_nccl:
            contract[PROCGROUP_REPLACE_NCCL.name] = "1"
        given = {name: value for name, value in base.items() if value or name not in defaults}
        given.pop(PROCGROUP_STORE_KEY.name, None)  # of another store, where a child of ``spawn`` starts the launcher
        devices = self.placement.devices.environment(local_rank)
        return {**defaults, **given, **contract, **round_.store.environment(), **devices}


REPLACED = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""Variables that people set by hand and that a launcher replaces; it says so."""
