"""The environment that a launcher gives to each rank: torchrun's contract, and what procgroup adds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from procgroup.environ import PROCGROUP_REPLACE_GLOO, PROCGROUP_STORE_KEY
from procgroup.launch.nodes.job_state import JobState


class Job(NamedTuple):
    """The settings that all rounds of a job share."""

    run_id: str
    threads_per_rank: int
    signals: str = "SIGTERM,SIGINT,SIGHUP,SIGQUIT"
    replace_gloo: bool = False
    uses_agent_store: bool = False


def worker_environment(
    job: Job, state: JobState, node_rank: int, local_rank: int, error_file: str, base: Mapping[str, str]
) -> dict[str, str]:
    """Return the whole environment of one rank of the running round, on top of the launcher's own (``base``).

    OMP_NUM_THREADS, PYTHONFAULTHANDLER and TORCH_NCCL_ASYNC_ERROR_HANDLING are set only where ``base``
    has none, or an empty one.
    """
    assert state.store is not None
    node = state.members[node_rank]
    rank = state.first_rank(node_rank) + local_rank
    of_role = [index for index, other in enumerate(state.members) if other.role == node.role]
    before = sum(state.members[index].processes for index in of_role if index < node_rank)
    defaults = {
        "OMP_NUM_THREADS": str(job.threads_per_rank),
        "PYTHONFAULTHANDLER": "1",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
    }
    contract = {
        "RANK": str(rank),
        "LOCAL_RANK": str(local_rank),
        "WORLD_SIZE": str(state.world_size),
        "LOCAL_WORLD_SIZE": str(node.processes),
        "GROUP_RANK": str(node_rank),
        "GROUP_WORLD_SIZE": str(len(state.members)),
        "ROLE_NAME": node.role,
        "ROLE_RANK": str(before + local_rank),
        "ROLE_WORLD_SIZE": str(sum(state.members[index].processes for index in of_role)),
        "TORCHELASTIC_RUN_ID": job.run_id,
        "TORCHELASTIC_RESTART_COUNT": str(state.restarts),
        "TORCHELASTIC_MAX_RESTARTS": str(state.settings.max_restarts),
        # Where False, MASTER_PORT is the program's own, and rank 0 of a PyTorch program hosts torch's store there.
        "TORCHELASTIC_USE_AGENT_STORE": str(job.uses_agent_store),
        "TORCHELASTIC_ERROR_FILE": error_file,
        "TORCHELASTIC_SIGNALS_TO_HANDLE": job.signals,
    }
    if job.replace_gloo:
        contract[PROCGROUP_REPLACE_GLOO.name] = "1"
    given = {name: value for name, value in base.items() if value or name not in defaults}
    given.pop(PROCGROUP_STORE_KEY.name, None)  # of another store, where a process of a ``spawn`` starts the launcher
    return {**defaults, **given, **contract, **state.store.environment()}


REPLACED = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""Variables that people set by hand and that a launcher replaces; it says so."""
