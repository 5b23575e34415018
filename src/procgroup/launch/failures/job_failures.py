"""The failures of all nodes: read from the job's state, and printed as the report at the job's end."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from procgroup.environ import TORCHELASTIC_ERROR_FILE
from procgroup.launch.failures.error_file import pass_on
from procgroup.launch.failures.failure import Failure
from procgroup.launch.failures.report import describe, first_failure

if TYPE_CHECKING:
    from procgroup.launch.output.job_output import JobOutput
    from procgroup.launch.ranks.worker_group import WorkerGroup


def summary(failures: Sequence[Failure]) -> str:
    """Return in one line why the ranks of a node failed."""
    first = first_failure(failures)
    return f"rank {first.rank} ({first.host}, pid {first.pid}) failed: {first.reason}"


def report(failures: Sequence[Failure], group: WorkerGroup | None, host: str, output: JobOutput) -> None:
    """Print the job's failures after the ranks' output; ``group`` are this node's ranks.

    The first failure is also written to the launcher's own error file, for the program that started the launcher.
    """
    ranks = group.ranks if group is not None else []
    ended = [rank.rank for rank in ranks if rank.ended_by_launcher]
    left = [rank.rank for rank in ranks if not rank.ended_by_launcher and rank.ending and not rank.ending.exit_code]
    output.finish()
    output.put(describe(failures, ended, left, host))
    _pass_on(first_failure(failures), output)


def exit_status(failures: Sequence[Failure], otherwise: int) -> int:
    """Return the exit status of the job: the first failure's."""
    return first_failure(failures).exit_status if failures else otherwise


def read(records: Sequence[str], own: Sequence[Failure]) -> list[Failure]:
    """Read the records of all nodes, in the order in which the nodes posted them.

    A record of one of this node's ``own`` failures is replaced by that failure, which holds more. Unreadable records
    are left out.
    """
    of_own = {(failure.node_rank, failure.rank, failure.pid): failure for failure in own}
    failures: list[Failure] = []
    for record in records:
        try:
            failure = Failure.from_json(record)
        except ValueError:
            continue
        failures.append(of_own.get((failure.node_rank, failure.rank, failure.pid), failure))
    return failures


def _pass_on(first: Failure, output: JobOutput) -> None:
    path = TORCHELASTIC_ERROR_FILE.get()
    if not path:
        return
    try:
        pass_on(Path(path), first.record, message=first.reason, traceback=first.evidence, exit_code=first.exit_code)
    except OSError as error:
        output.say(f"cannot write TORCHELASTIC_ERROR_FILE={path}: {error.strerror}")
