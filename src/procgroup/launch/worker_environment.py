"""The environment that a launcher gives to each rank: torchrun's contract, and what procgroup adds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from procgroup.environ import PROCGROUP_REPLACE_GLOO, PROCGROUP_REPORT_SOCKET, PROCGROUP_STORE_KEY


@dataclass(frozen=True)
class Job:
    """What all ranks of one start have in common. ``store`` holds the variables that lead to the store."""

    run_id: str
    ranks: int
    store: Mapping[str, str]
    threads_per_rank: int
    role: str = "default"
    signals: str = "SIGTERM,SIGINT,SIGHUP,SIGQUIT"
    replace_gloo: bool = False


def worker_environment(
    job: Job, rank: int, error_file: str, report_socket: str, base: Mapping[str, str]
) -> dict[str, str]:
    """Return the whole environment of one rank on a single host, on top of the launcher's own (``base``).

    OMP_NUM_THREADS, PYTHONFAULTHANDLER and TORCH_NCCL_ASYNC_ERROR_HANDLING are set only where ``base``
    has none, or an empty one.
    """
    ranks = str(job.ranks)
    defaults = {
        "OMP_NUM_THREADS": str(job.threads_per_rank),
        "PYTHONFAULTHANDLER": "1",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
    }
    contract = {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": ranks,
        "LOCAL_WORLD_SIZE": ranks,
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1",
        "ROLE_NAME": job.role,
        "ROLE_RANK": str(rank),
        "ROLE_WORLD_SIZE": ranks,
        "TORCHELASTIC_RUN_ID": job.run_id,
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        # MASTER_PORT is the program's own, and rank 0 of a PyTorch program hosts torch's store there.
        "TORCHELASTIC_USE_AGENT_STORE": "False",
        "TORCHELASTIC_ERROR_FILE": error_file,
        PROCGROUP_REPORT_SOCKET.name: report_socket,
        "TORCHELASTIC_SIGNALS_TO_HANDLE": job.signals,
    }
    if job.replace_gloo:
        contract[PROCGROUP_REPLACE_GLOO.name] = "1"
    given = {name: value for name, value in base.items() if value or name not in defaults}
    given.pop(PROCGROUP_STORE_KEY.name, None)  # of another store, where a process of a ``spawn`` starts the launcher
    return {**defaults, **given, **contract, **job.store}


REPLACED = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""Variables that people set by hand and that a launcher replaces; it says so."""
