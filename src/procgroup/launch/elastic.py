"""Run a function as the ranks of a job on one or several nodes, with restarts: ``elastic_launch``.

The agent is that of ``procgroup run``. Each rank is a new interpreter, which unpickles the function and its arguments
from a file that only this user can read, calls the function, and writes the pickled result to another file::

    elastic_launch(config, train)(3)      agent ── starts ──> function_worker.py ── train(3) ──> result of its rank
"""

from __future__ import annotations

import pickle
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.reduction import ForkingPickler
from multiprocessing.spawn import get_preparation_data
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from procgroup.errors import RendezvousError
from procgroup.launch import flags
from procgroup.launch.failures.failure import RankFailure
from procgroup.launch.failures.report import first_failure
from procgroup.launch.output.log_options import from_torch_template
from procgroup.launch.program import CommandProgram
from procgroup.launch.ranks.placement import place
from procgroup.launch.run import open_output, plan_job, supervise
from procgroup.launch.spawning.process_context import process_exception

__all__ = ["LaunchConfig", "elastic_launch"]


@dataclass(frozen=True)
class LaunchConfig:
    """The flags of ``procgroup run`` as fields, with the names of torch's LaunchConfig.

    ``rdzv_configs`` are the keys of ``--rdzv-conf``, and ``rank``, the node rank of a job with fixed node ranks.
    ``log_line_prefix_template`` has torch's form, ``[${role_name}${local_rank}]:``. ``flags`` are further flags, as on
    a command line. None means the default, which PET_<FLAG> and PROCGROUP_<FLAG> do not change here. ``elastic_launch``
    checks the values.
    """

    min_nodes: int = 1
    max_nodes: int = 1
    nproc_per_node: int = 1
    run_id: str = ""
    role: str = "default"
    rdzv_backend: str = "static"
    rdzv_endpoint: str = ""
    rdzv_configs: Mapping[str, object] = field(default_factory=dict)
    max_restarts: int = 3
    local_addr: str | None = None
    log_dir: str | None = None
    shutdown_timeout: float | None = None
    flags: Sequence[str] = ()
    rdzv_timeout: int = -1
    monitor_interval: float | None = None
    start_method: str | None = None
    log_line_prefix_template: str | None = None
    event_log_handler: str | None = None
    signals_to_handle: str | None = None
    duplicate_stdout_filters: Sequence[str] | None = None
    duplicate_stderr_filters: Sequence[str] | None = None
    virtual_local_rank: bool = False

    def arguments(self) -> list[str]:
        """Return the equivalent flags of ``procgroup run``. Raises ValueError for an unusable prefix."""
        conf = dict(self.rdzv_configs)
        if self.rdzv_timeout != -1:
            conf["timeout"] = self.rdzv_timeout
        named = {
            "--nnodes": f"{self.min_nodes}:{self.max_nodes}",
            "--nproc-per-node": self.nproc_per_node,
            "--rdzv-id": self.run_id,
            "--role": self.role,
            "--rdzv-backend": self.rdzv_backend,
            "--rdzv-endpoint": self.rdzv_endpoint,
            "--node-rank": conf.pop("rank", None),
            "--rdzv-conf": ",".join(f"{key}={value}" for key, value in conf.items()),
            "--max-restarts": self.max_restarts,
            "--local-addr": self.local_addr,
            "--log-dir": self.log_dir,
            "--shutdown-timeout": self.shutdown_timeout,
            "--monitor-interval": self.monitor_interval,
            "--start-method": self.start_method,
            "--log-prefix": from_torch_template(self.log_line_prefix_template or ""),
            "--event-log-handler": self.event_log_handler,
            "--signals-to-handle": self.signals_to_handle,
            "--duplicate-stdout-filters": _comma_list(self.duplicate_stdout_filters),
            "--duplicate-stderr-filters": _comma_list(self.duplicate_stderr_filters),
        }
        switches = ["--virtual-local-rank"] if self.virtual_local_rank else []
        given = [f"{flag}={value}" for flag, value in named.items() if value not in (None, "")]
        return [*given, *switches, *self.flags]


class elastic_launch:  # noqa: N801  (torch's name, which reads as a function's)
    """Launch a function, or a command, as the ranks of this node: ``elastic_launch(config, function)(*arguments)``.

    ``entrypoint`` is a function that can be pickled, such as one at the top of a module, or the name of a program to
    execute. Raises ValueError for a configuration that is not usable.
    """

    def __init__(self, config: LaunchConfig, entrypoint: Callable[..., object] | str) -> None:
        self._options = flags.parse("elastic_launch", [*config.arguments(), "--no-python", "-"], in_program=True)
        self._plan, self._meeting = plan_job(self._options)
        self._function = entrypoint

    def __call__(self, *arguments: Any) -> dict[int, Any]:
        """Run the ranks to the end of the job; return the function's results on this node, by rank.

        A command has the result None. Raises ProcessRaisedException or ProcessExitedException for the rank, of any
        node, that failed first when no restart is left; RendezvousError when the nodes do not meet in time;
        KeyboardInterrupt after Ctrl-C, SystemExit after another signal that ended the ranks. Call it in the main
        thread.
        """
        with TemporaryDirectory(prefix="procgroup_") as folder, open_output(self._options, self._plan) as output:
            program = CommandProgram(self._plan, self._command(Path(folder), arguments), place(self._options))
            outcome = supervise(self._options, program, self._meeting, output, reports=False)
            if outcome.status:
                raise _error(outcome.status, outcome.failures)
            return {rank: self._result(Path(folder), rank) for rank in outcome.ranks}

    def _command(self, folder: Path, arguments: Sequence[Any]) -> list[str]:
        if isinstance(self._function, str):
            return [self._function, *map(str, arguments)]
        preparation = {name: value for name, value in get_preparation_data("rank").items() if name != "authkey"}
        payload = (preparation, ForkingPickler.dumps((self._function, arguments)).tobytes())
        (folder / "function").write_bytes(pickle.dumps(payload))
        return [sys.executable, "-u", "-m", "procgroup.launch.function_worker", str(folder)]

    def _result(self, folder: Path, rank: int) -> Any:
        if isinstance(self._function, str):
            return None
        path = folder / f"result_{rank}"  # written by this process's own child, unless the function called sys.exit(0)
        return pickle.loads(path.read_bytes()) if path.exists() else None


def _comma_list(words: Sequence[str] | None) -> str:
    """Join words with commas; a comma in a word is doubled."""
    return ",".join(word.replace(",", ",,") for word in words or ())


def _error(status: int, failures: Sequence[RankFailure]) -> BaseException:
    if not failures:
        return _error_without_failures(status)
    first = first_failure(failures)
    where = f"rank {first.rank} ({first.host}, pid {first.pid})"
    return process_exception(first, where, f"{where}: {first.reason}")


def _error_without_failures(status: int) -> BaseException:
    number = status - 128
    if number == signal.SIGINT:
        return KeyboardInterrupt()
    if number in signal.valid_signals():
        return SystemExit(status)
    return RendezvousError(
        f"the job ended with status {status} although no rank failed: the launcher's last line on stderr says why"
    )
