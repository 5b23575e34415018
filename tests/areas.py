"""Which tests to run after an edit: a map from the packages of src/procgroup and native to tests.

``make quick`` runs the files of `QUICK`; ``make quick AREA=stores`` those of `AREAS` ["stores"], and the native tests
with that label. ``python tests/areas.py [AREA]`` prints the paths, one per word.
"""

from __future__ import annotations

import sys
from pathlib import Path

TESTS = Path(__file__).resolve().parent

AREAS = {
    # Packages of src/procgroup.
    "api": ["api", "testing"],
    "arrays": ["arrays", "api/test_allocation.py", "collectives/test_factors_and_complex.py"],
    "backends": ["backends", "groups/test_other_backends.py", "groups/test_backend_waits.py"],
    "cluster": ["cluster", "rendezvous/test_launchers.py"],
    "completion": ["project/test_completion.py"],
    "diagnostics": ["diagnostics", "bench"],
    "errors": ["failures/test_misuse.py", "failures/test_global_ranks.py", "rendezvous/test_start_advice.py"],
    "functional": ["functional"],
    "groups": ["groups", "api"],
    "launch": ["launch/failures", "launch/one_node", "launch/output", "launch/options/test_flags.py", "launch/spawn"],
    "parallel": ["parallel", "torch_gpus/test_ddp.py", "torch_gpus/test_ddp_features.py"],
    "process": [
        "api/test_log.py",
        "launch/failures/test_error_file.py",
        "diagnostics/test_flight_records.py",
        "failures/test_exceptions.py",
    ],
    "rendezvous": ["rendezvous"],
    "stores": ["stores"],
    "submit": ["launch/options/test_submit.py"],
    "testing": ["testing"],
    "torch_plugin": ["torch_plugin", "torch_gpus"],
    # Packages of native, of which Python sees something.
    "bindings": ["native_module", "api", "arrays", "groups"],
    "collectives": ["collectives"],
    "dtype": [
        *(f"native_module/test_{name}.py" for name in ("kernels", "reduce_ops")),
        *(f"collectives/test_{name}.py" for name in ("collectives", "means_of_integers")),
    ],
    "group": ["groups", "failures/test_mismatch.py", "failures/test_deadlocks.py"],
    "liveness": ["failures/test_dead_peer.py", "failures/test_deadlocks.py", "failures/test_timeouts.py"],
    "messages": ["collectives/test_messages.py", "collectives/test_strided_messages.py", "random_calls"],
    "mpi": ["mpi"],
    "cuda": ["nccl/test_staging.py"],
    "nccl": ["nccl"],
    "ops": ["native_module/test_operations.py", "collectives/test_collectives.py"],
    "runtime": ["native_module", "failures/test_timeouts.py", "diagnostics/test_flight_records.py"],
    "schedules": ["collectives"],
    "store": ["stores/test_contract.py", "stores/test_hash.py", "stores/test_file.py", "stores/test_tcp.py"],
    "xla": ["functional", "nccl/test_jax_on_gpus.py"],
    "transport": ["collectives/test_collectives.py", "failures/test_surroundings.py"],
}

_TABLE = "test_each_operation_is_right_by_each_of_its_schedules"

# The quickest files of each package, together some 25 s on two cores.
QUICK = [
    "annotations",
    *(f"api/test_{name}.py" for name in ("advice", "allocation", "bad_blocks", "batch", "coalescing", "one_call")),
    *(f"api/test_{name}.py" for name in ("collectives_alone", "monitored_barrier", "old_names", "world_of_one")),
    "arrays",
    *(f"backends/test_{name}.py" for name in ("connecting", "route")),
    "cluster",
    *(f"collectives/test_collectives.py::{_TABLE}[{world}]" for world in ("2-shm", "3-shm", "3-tcp", "4-spanning")),
    *(f"diagnostics/test_{name}.py" for name in ("comparison", "findings", "flight_records", "libraries", "limits")),
    *(f"diagnostics/test_{name}.py" for name in ("metrics_totals", "variables")),
    *(f"failures/test_{name}.py" for name in ("announced_counts", "coalesced_mismatch", "differing_lists")),
    *(f"failures/test_{name}.py" for name in ("global_ranks", "misuse", "refused_lists")),
    "functional/test_functional.py",
    *(f"groups/test_{name}.py" for name in ("checks", "deferring", "future", "group", "many_groups", "new_group")),
    *(f"groups/test_{name}.py" for name in ("object_format", "objects")),
    *(f"launch/failures/test_{name}.py" for name in ("error_file", "failure_in_json", "first_failure")),
    *(f"launch/one_node/test_{name}.py" for name in ("binding", "die_with_parent", "placement", "start_time")),
    "launch/options/test_flags.py",
    *(f"launch/output/test_{name}.py" for name in ("collapse", "job_output", "log_options", "output", "progress")),
    "launch/several_nodes/test_job_changes.py",
    *(f"native_module/test_{name}.py" for name in ("operations", "recorder", "reduce_ops", "source_lines")),
    *(f"parallel/test_{name}.py" for name in ("average_gradients", "bucket_assignment", "distributed_sampler")),
    *(f"parallel/test_distributed_data_parallel_{name}.py" for name in ("buffers", "options", "state")),
    "parallel/test_mesh_layout.py",
    *(f"rendezvous/test_{name}.py" for name in ("arrivals", "contradictions", "join", "start_advice", "urls")),
    *(f"stores/test_{name}.py" for name in ("file", "hash", "start_up")),
    "testing/test_deadlocks_of_threads.py",
    "testing/test_run_ranks.py::test_the_deadline_is_one_for_all_ranks_and_does_not_begin_again_when_one_ends",
    "torch_plugin/test_store.py",
]


def paths(area: str = "") -> list[str]:
    """Return the paths of the tests of an area; of the tier "quick" where none is named. Raises KeyError."""
    return [str((TESTS / path).relative_to(TESTS.parent)) for path in (AREAS[area] if area else QUICK)]


if __name__ == "__main__":
    chosen = sys.argv[1] if len(sys.argv) > 1 else ""
    if chosen and chosen not in AREAS:
        sys.exit(f"{chosen!r} is not an area; the areas are: {', '.join(sorted(AREAS))}")
    print(*paths(chosen))
