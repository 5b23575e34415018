"""``procgroup run``: start a program as N ranks on this host and end them together."""

from __future__ import annotations

import argparse
import importlib.machinery
import os
import shutil
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

from procgroup.cluster.cores import usable_cores
from procgroup.environ import OMP_NUM_THREADS, PYTHON_EXEC
from procgroup.errors import DistError
from procgroup.launch import flags
from procgroup.launch.agent import Agent, RankPlan, say
from procgroup.launch.job_output import JobOutput, Place
from procgroup.launch.worker_environment import REPLACED, Job, worker_environment


def main(arguments: Sequence[str], program: str = "procgroup run") -> int:
    """Run the command line ``arguments``; return the exit status."""
    options = flags.parse(program, arguments)
    return launch(options, options.script_arguments)


def launch(options: argparse.Namespace, script_arguments: Sequence[str]) -> int:
    """Start the ranks that the parsed ``options`` describe; return the exit status of the job."""
    command = _command(options)
    # Imported only now: the flags and their help need no store, and so no native module.
    from procgroup.launch.hosted_store import HostedStore

    threads = max(1, usable_cores() // options.nproc_per_node)
    _tell_about_environment(options.nproc_per_node, threads)
    run_id = options.rdzv_id or os.urandom(16).hex()
    try:
        store = HostedStore(options.master_addr, options.master_port, job=run_id)
    except (DistError, OSError) as error:
        say(f"cannot use --master-addr {options.master_addr} --master-port {options.master_port}: {error}")
        return 1
    with store:
        job = Job(
            run_id=run_id,
            ranks=options.nproc_per_node,
            store=store.environment(),
            threads_per_rank=threads,
            role=options.role,
            replace_gloo=options.replace_gloo,
            signals=",".join(number.name for number in options.signals_to_handle),
        )
        try:
            output = JobOutput(flags.log_options(options), run_id, Place(host=socket.gethostname(), role=options.role))
        except (argparse.ArgumentTypeError, OSError) as error:
            options.parser.error(str(error))
        with output:
            try:
                output.begin_attempt(0, range(options.nproc_per_node))
            except OSError as error:
                say(f"cannot keep logs in --log-dir {options.log_dir}: {error}")
                return 1
            plans = _plans(job, [*command, *script_arguments], output)
            return Agent(plans, output, options.signals_to_handle, options.shutdown_timeout).run()


def _command(options: argparse.Namespace) -> list[str]:
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


def _plans(job: Job, command: Sequence[str], output: JobOutput) -> list[RankPlan]:
    plans = []
    report_socket = output.progress.address if output.progress else ""
    for rank in range(job.ranks):
        of_rank = output.of_rank(rank, rank)
        environment = worker_environment(job, rank, of_rank.error_file, report_socket, os.environ)
        own_command = [part.replace("${local_rank}", str(rank)) for part in command]
        plans.append(RankPlan(own_command, environment, of_rank))
    return plans


def _tell_about_environment(ranks: int, threads: int) -> None:
    """Say in one line each which thread count was chosen, and which variables of the user are replaced."""
    if not OMP_NUM_THREADS.is_set() and ranks > 1:
        say(f"OMP_NUM_THREADS={threads} per rank ({usable_cores()} usable cores, {ranks} ranks); set it to choose")
    replaced = [name for name in REPLACED if name in os.environ]
    if replaced:
        say(f"{', '.join(replaced)} of the environment {'is' if len(replaced) == 1 else 'are'} replaced for the ranks")
