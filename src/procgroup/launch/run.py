"""``procgroup run``: start a program as N ranks on each node of a job, and end them together."""

from __future__ import annotations

import argparse
import importlib.machinery
import os
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from procgroup.cluster.cores import usable_cores
from procgroup.environ import OMP_NUM_THREADS, PROCGROUP_JOB_KEY, PYTHON_EXEC
from procgroup.launch import flags
from procgroup.launch.console import say

if TYPE_CHECKING:
    from procgroup.launch.hosted_store import HostedStore
    from procgroup.launch.job_plan import JobPlan
    from procgroup.launch.job_state import JobState
    from procgroup.launch.reserved_port import ReservedPort
    from procgroup.launch.worker_environment import Job
    from procgroup.launch.worker_group import RankPlan


def main(arguments: Sequence[str], program: str = "procgroup run") -> int:
    """Run the command line ``arguments``; return the exit status."""
    options = flags.parse(program, arguments)
    return launch(options, options.script_arguments)


def launch(options: argparse.Namespace, script_arguments: Sequence[str]) -> int:
    """Start the ranks that the parsed ``options`` describe; return the exit status of the job."""
    # Imported only now: the flags and their help need no store, and so no native module.
    if options.hosts or options.hostfile:
        from procgroup.launch.hosts_job import run_on_hosts

        return run_on_hosts(options, script_arguments)
    command = [*program_command(options), *script_arguments]
    from procgroup.launch.job_plan import plan

    return run_agent(options, command, plan(options))


def run_agent(
    options: argparse.Namespace, command: Sequence[str], job_plan: JobPlan, *, reports_own_ranks_only: bool = False
) -> int:
    """Run ``command`` as the ranks of this node of the job; return the job's exit status."""
    from procgroup.launch.agent import Agent
    from procgroup.launch.job_plan import unused_flags
    from procgroup.launch.worker_environment import REPLACED, Job

    threads = max(1, usable_cores() // options.nproc_per_node)
    _tell_about_environment(options.nproc_per_node, threads, REPLACED)
    for line in unused_flags(options, job_plan):
        say(line)
    job = Job(
        run_id=job_plan.run_id,
        threads_per_rank=threads,
        signals=",".join(number.name for number in options.signals_to_handle),
        replace_gloo=options.replace_gloo,
        uses_agent_store=job_plan.kind == "static",
    )
    program = ScriptProgram(job_plan, job, command, options.log_dir)
    agent = Agent(
        job_plan.meet,
        program,
        options.signals_to_handle,
        job_plan.patience,
        reports_own_ranks_only=reports_own_ranks_only,
    )
    return agent.run()


@dataclass
class ScriptProgram:
    """A script or another command, as the agents run it in each round."""

    plan: JobPlan
    job: Job
    command: Sequence[str]
    log_dir: str
    _chosen_port: ReservedPort | None = None

    def host(self, state: JobState) -> HostedStore:
        from procgroup.launch.hosted_store import HostedStore

        key = PROCGROUP_JOB_KEY.get()
        if self.plan.kind == "static":
            return HostedStore(self.plan.master_addr, self.plan.master_port, key, self.job.run_id)
        address = state.members[0].address
        return HostedStore(address, self._reserve(address), key, self.job.run_id)

    def _reserve(self, address: str) -> ReservedPort:
        """Return MASTER_PORT of a round: one that the user chose is kept from round to round, another is new."""
        from procgroup.launch.reserved_port import ReservedPort

        try:
            if not self.plan.master_port:
                return ReservedPort(address, 0)
            if self._chosen_port is None:
                self._chosen_port = ReservedPort(address, self.plan.master_port)
            return self._chosen_port.share()
        except OSError as error:
            raise OSError(
                f"cannot use --master-addr {address} --master-port {self.plan.master_port}: {error}"
            ) from error

    def plans(self, state: JobState, node_rank: int) -> list[RankPlan]:
        from procgroup.launch.worker_environment import worker_environment
        from procgroup.launch.worker_group import RankPlan

        first = state.first_rank(node_rank)
        attempt = self._attempt_folder(state)
        plans = []
        for local_rank in range(state.members[node_rank].processes):
            folder = attempt / str(local_rank) if attempt else None
            if folder:
                folder.mkdir(parents=True, exist_ok=True)
            error_file = str(folder / "error.json") if folder else ""
            plans.append(
                RankPlan(
                    command=[part.replace("${local_rank}", str(local_rank)) for part in self.command],
                    environment=worker_environment(self.job, state, node_rank, local_rank, error_file, os.environ),
                    log_directory=folder,
                    rank=first + local_rank,
                )
            )
        return plans

    def _attempt_folder(self, state: JobState) -> Path | None:
        """Return where the ranks of this round leave their logs; say so once."""
        if not self.log_dir or self.log_dir == os.devnull:
            return None
        folder = Path(self.log_dir, self.job.run_id, f"attempt_{state.round}")
        say(f"logs are kept in {folder}")
        return folder


def program_command(options: argparse.Namespace) -> list[str]:
    """Return the command that runs the program; exit with the reason when there is no such program."""
    if options.no_python:
        if shutil.which(options.script) is None:
            options.parser.error(f"there is no program {options.script!r} to execute: check the name and PATH")
        return [options.script]
    interpreter = PYTHON_EXEC.get() or sys.executable
    if shutil.which(interpreter) is None:
        options.parser.error(f"PYTHON_EXEC={interpreter!r} is no program that can be executed")
    if not options.module:
        if not Path(options.script).exists() and Path(options.script).name in ("python", "python3"):
            options.parser.error("give the script without python: the ranks run it with this interpreter")
        if not Path(options.script).exists():
            options.parser.error(f"there is no script {options.script!r} in {Path.cwd()}")
        return [interpreter, "-u", options.script]
    if not PYTHON_EXEC.is_set() and not _module_exists(options.script.partition(".")[0]):
        options.parser.error(f"there is no module {options.script!r}; the script after -m is a module's name")
    return [interpreter, "-u", "-m", options.script]


def _module_exists(name: str) -> bool:
    """Look for a top-level module as the ranks will, without importing it."""
    path = [str(Path.cwd()), *sys.path]
    return name in sys.builtin_module_names or importlib.machinery.PathFinder.find_spec(name, path) is not None


def _tell_about_environment(ranks: int, threads: int, replaced_names: Sequence[str]) -> None:
    """Say in one line each which thread count was chosen, and which variables of the user are replaced."""
    if not OMP_NUM_THREADS.is_set() and ranks > 1:
        say(f"OMP_NUM_THREADS={threads} per rank ({usable_cores()} usable cores, {ranks} ranks); set it to choose")
    replaced = [name for name in replaced_names if name in os.environ]
    if replaced:
        say(f"{', '.join(replaced)} of the environment {'is' if len(replaced) == 1 else 'are'} replaced for the ranks")
