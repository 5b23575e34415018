"""Process groups, collectives, stores and launchers for every array library: ``import procgroup as dist``.

Every public name is bound when it is first used, so that importing the package costs nothing.
"""

from __future__ import annotations

import sys
from importlib import import_module

TYPE_CHECKING = False  # importing typing would cost a third of importing procgroup
if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

__version__ = "0.1.0"

_NAMES_OF_MODULES = {
    "_native": "Work",
    "api.allocation": "empty full zeros",
    "api.availability": (
        "Backend BackendConfig get_backend get_backend_config get_default_backend_for_device is_available "
        "is_backend_available is_gloo_available is_mpi_available is_nccl_available is_torchelastic_launched "
        "is_ucc_available is_xccl_available supports_complex"
    ),
    "api.coalescing": "_CoalescingManager _coalescing_manager all_gather_coalesced all_reduce_coalesced",
    "api.barriers": "monitored_barrier rank_first",
    "api.collectives": (
        "all_gather all_gather_single all_to_all all_to_all_single barrier broadcast gather neighbor_all_to_all scatter"
    ),
    "api.debugging": "DebugLevel breakpoint get_debug_level set_debug_level set_debug_level_from_env",
    "api.default_group": "GroupMember group",
    "api.deprecated": "_all_gather_base _reduce_scatter_base all_gather_into_tensor reduce_op reduce_scatter_tensor",
    "api.groups": "get_pg_count new_group new_subgroups new_subgroups_by_enumeration split_group",
    "api.lifecycle": "destroy_process_group get_new_ranks init_process_group is_initialized reconfigure",
    "api.objects": (
        "all_gather_object broadcast_object_list gather_object recv_object_list scatter_object_list send_object_list"
    ),
    "api.options": "default_pg_timeout",
    "api.point_to_point": "P2POp batch_isend_irecv irecv isend recv send",
    "api.shrinking": "shrink_group",
    "api.ranks": "get_global_rank get_group_rank get_node_local_rank get_process_group_ranks get_rank get_world_size",
    "api.reductions": "all_reduce exscan reduce reduce_scatter reduce_scatter_single scan",
    "errors": (
        "ArgumentError CollectiveMismatch CollectiveTimeout Deadlock DistBackendError DistError DistNetworkError "
        "DistStoreError ForkedProcessError GroupBroken GroupDestroyed IncompleteEnvironment ObjectError "
        "OperationError PeerFailed PeerLost PicklingFailed ProcessExitedException ProcessRaisedException "
        "QueueEmptyError RendezvousConflict RendezvousError RendezvousTimeout StoreLimitError StoreLost StoreTimeout "
        "UnpicklingFailed WaitTimeout"
    ),
    "groups.group": "ProcessGroup",
    "launch.ranks.preemption": "on_preemption preempted",
    "launch.output.progress": "report",
    "process.error_file": "record",
    "launch.spawning.spawn": "ProcessContext spawn start_processes",
    "parallel.mesh": "DeviceMesh init_device_mesh",
    "rendezvous.handlers": "register_rendezvous_handler rendezvous",
    "rendezvous.tasks": "MPIStore SlurmStore",
    "stores.etcd": "EtcdStore",
    "stores.file": "FileStore",
    "stores.hash": "HashStore",
    "stores.prefix": "PrefixStore",
    "stores.redis": "RedisStore",
    "stores.store": "Store",
    "stores.tcp": "TCPStore",
    "process.timeouts": "timeout",
    "types": "ReduceOp",
}
_MODULE_OF_NAME = {name: module for module, names in _NAMES_OF_MODULES.items() for name in names.split()}

__all__ = [name for name in _MODULE_OF_NAME if name[0] != "_"]

_PACKAGES = ("device_mesh", "functional", "parallel", "testing")

# What PyTorch builds on its own process groups, which a changed import does not bring.
_OF_TORCH = frozenset(
    ["algorithms", "checkpoint", "distributed_c10d", "elastic", "fsdp", "nn", "optim", "pipelining", "rpc", "tensor"]
)


def bound_on_first_use(
    package: str, module_of_name: Mapping[str, str], packages: Collection[str] = (), of_torch: Collection[str] = ()
) -> tuple[Callable[[str], object], Callable[[], list[str]]]:
    """Return ``__getattr__`` and ``__dir__`` of a package that binds names of its modules when they are first used.

    Type checkers and editors read the same names in the stub beside the package, ``__init__.pyi``.

    ``packages``: public sub-packages, imported on first use too. ``of_torch``: names that only torch.distributed has;
    the AttributeError for one of them says where it is. ``__dir__`` returns the public names and nothing else.
    """
    module = sys.modules[package]

    def get(name: str) -> object:
        if name in packages:
            return import_module(f"{package}.{name}")
        owner = module_of_name.get(name)
        if owner is None:
            where = f"; torch.distributed.{name} is PyTorch's own, and runs on its backend 'procgroup'"
            advice = where if name in of_torch else ""
            # With name and obj, Python's traceback suggests the closest of dir()'s names.
            raise AttributeError(f"module {package!r} has no attribute {name!r}{advice}", name=name, obj=module)
        value: object = getattr(import_module(f"{package}.{owner}"), name)
        setattr(module, name, value)
        return value

    def names() -> list[str]:
        return sorted([*packages, *(name for name in module_of_name if name[0] != "_")])

    return get, names


__getattr__, __dir__ = bound_on_first_use(__name__, _MODULE_OF_NAME, _PACKAGES, _OF_TORCH)
