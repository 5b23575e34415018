"""``procgroup run``: start a program as N ranks on each node of a job, and end them together."""

from __future__ import annotations

import argparse
import importlib.machinery
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from procgroup.cluster.control_group import usable_cores
from procgroup.launch import flags
from procgroup.launch.output.sinks import say
from procgroup.process.environ import OMP_NUM_THREADS, PYTHON_EXEC

if TYPE_CHECKING:
    from procgroup.launch.job_plan import JobPlan
    from procgroup.launch.nodes.meeting_plan import MeetingPlan
    from procgroup.launch.output.job_output import JobOutput
    from procgroup.launch.program import CommandProgram
    from procgroup.launch.ranks.placement import Placement
    from procgroup.launch.supervisor import JobOutcome


def main(arguments: Sequence[str], program: str = "procgroup run") -> int:
    """Run the command line ``arguments``; return the exit status."""
    options = flags.parse(program, arguments)
    return launch(options, options.script_arguments)


def launch(options: argparse.Namespace, script_arguments: Sequence[str]) -> int:
    """Start the ranks that the parsed ``options`` describe; return the exit status of the job."""
    # Imported only now: the flags and their help need no store, and so no native module.
    if options.hosts or options.hostfile:
        from procgroup.launch.hosts.hosts_job import run_on_hosts

        return run_on_hosts(options, script_arguments)
    command = [*program_command(options), *script_arguments]
    return run_node(options, command, *plan_job(options))


def plan_job(options: argparse.Namespace) -> tuple[JobPlan, MeetingPlan | None]:
    """Return the job that the parsed flags describe, and how its nodes meet (None: it has one node)."""
    from procgroup.launch import job_plan

    job = job_plan.plan(options)
    if job.kind == "solo":
        return job, None
    from procgroup.launch.nodes.meeting_plan import plan_meeting  # a job of one node starts sooner without it

    return job, plan_meeting(options, job)


def run_node(
    options: argparse.Namespace,
    command: Sequence[str],
    job: JobPlan,
    meeting: MeetingPlan | None,
    *,
    shares_console: bool = False,
) -> int:
    """Run ``command`` as the ranks of this node of the job; return the job's exit status.

    ``shares_console``: the agents of the other nodes write to the same place.
    """
    from procgroup.launch.job_plan import unused_flags
    from procgroup.launch.program import REPLACED, CommandProgram
    from procgroup.launch.ranks.placement import place

    placement = place(options)
    program = CommandProgram(job, command, placement)
    notes = [*_environment_notes(placement, REPLACED), *placement.notes, *unused_flags(options, job)]
    notes += _task_notes(options)
    if options.dry_run:
        from procgroup.launch import dry_run

        return dry_run.show(dry_run.describe(options, program, meeting, notes))
    for note in notes:
        say(note)
    with open_output(options, job) as output:
        outcome = supervise(options, program, meeting, output, shares_console=shares_console)
        return outcome.status or int(output.has_failed)


def open_output(options: argparse.Namespace, job: JobPlan) -> JobOutput:
    """Open the destinations of the ranks' output; an error ends the program as an unusable flag does."""
    from procgroup.launch.output.job_output import JobOutput

    try:
        return JobOutput(flags.log_options(options), job.run_id, needs_progress=bool(options.hang_timeout))
    except (OSError, ValueError) as error:
        flags.refuse(options, f"cannot keep or show the ranks' output: {error}")


def supervise(
    options: argparse.Namespace,
    program: CommandProgram,
    meeting: MeetingPlan | None,
    output: JobOutput,
    *,
    reports: bool = True,
    shares_console: bool = False,
) -> JobOutcome:
    """Run the program's ranks to the end of the job. With ``reports`` the failures that ended it are printed."""
    from procgroup.launch.supervisor import Supervisor

    events = None
    if options.event_log_handler == "console":
        from procgroup.launch.events import Events

        events = Events(output, program.plan.run_id, program.plan.role, options.rdzv_backend, options.script)
    with Supervisor(program, output) as ranks:
        if meeting is None:
            from procgroup.launch.one_node import run_one_node

            return run_one_node(ranks, events, reports=reports)
        from procgroup.launch.nodes.agent import Agent

        return Agent(ranks, meeting, events, reports=reports, shares_console=shares_console).run()


def _is_program(name: str) -> bool:
    import shutil  # which loads libraries for archives, in three milliseconds

    return shutil.which(name) is not None


def program_command(options: argparse.Namespace) -> list[str]:
    """Return the command that runs the program. A program that does not exist ends this one with status 2."""
    if options.no_python and not options.run_path:
        if not _is_program(options.script):
            options.parser.error(f"there is no program {options.script!r} to execute: check the name and PATH")
        return [options.script]
    # With --run-path torchrun stays in its own interpreter.
    interpreter = (not options.run_path and PYTHON_EXEC.get()) or sys.executable
    if interpreter != sys.executable and not _is_program(interpreter):
        options.parser.error(f"PYTHON_EXEC={interpreter!r} is not an executable")
    if options.run_path or not options.module:
        if not Path(options.script).exists() and Path(options.script).name in ("python", "python3"):
            options.parser.error("give the script without python: the ranks run it with this interpreter")
        if not (options.script and Path(options.script).exists()):
            options.parser.error(f"there is no script {options.script!r} in {Path.cwd()}")
        return [interpreter, "-u", options.script]
    if not PYTHON_EXEC.is_set():
        # Look for the top-level module as the ranks will, without importing it.
        name = options.script.partition(".")[0]
        path = [str(Path.cwd()), *sys.path]
        if name not in sys.builtin_module_names and importlib.machinery.PathFinder.find_spec(name, path) is None:
            options.parser.error(f"there is no module {options.script!r}; the script after -m is a module's name")
    return [interpreter, "-u", "-m", options.script]


def _task_notes(options: argparse.Namespace) -> Iterator[str]:
    """Yield a line where srun or mpiexec started several launchers, each of which runs a job of its own."""
    if any(options.sources[name] != "default" for name in ("standalone", "nnodes", "rdzv_endpoint")):
        return
    from procgroup.cluster import task_launcher

    task = task_launcher.detect()
    with suppress(ValueError):  # the launcher's size is not a number; the ranks do not use it
        if task is not None and (task.world_size or 1) > 1:
            yield (
                f"{task.launcher.name} started {task.world_size} of these launchers, and each runs a job of its own "
                "(--standalone, if that is meant): for one job give --nnodes and --rdzv-endpoint, or start the "
                "program without procgroup run, so that the tasks are the ranks"
            )


def _environment_notes(placement: Placement, replaced_names: Sequence[str]) -> Iterator[str]:
    """Yield one line for the chosen thread count, and one for the replaced variables of the user."""
    ranks = len(placement.threads)
    if not OMP_NUM_THREADS.is_set() and ranks > 1:
        cores = f"{usable_cores()} usable cores, {ranks} ranks"
        yield f"OMP_NUM_THREADS={placement.threads_text} per rank ({cores}); set it to choose"
    replaced = [name for name in replaced_names if name in os.environ]
    if replaced:
        yield f"{', '.join(replaced)} of the environment {'is' if len(replaced) == 1 else 'are'} replaced for the ranks"
