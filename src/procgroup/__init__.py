"""Process groups, collectives, stores and launchers for every array library: ``import procgroup as dist``.

Every public name is bound when it is first used, so that importing the package costs nothing.
"""

from __future__ import annotations

from importlib import import_module

TYPE_CHECKING = False  # what type checkers take for true; importing typing would cost a third of this import
if TYPE_CHECKING:
    from procgroup.api.availability import get_backend as get_backend
    from procgroup.api.availability import get_backend_config as get_backend_config
    from procgroup.api.availability import get_default_backend_for_device as get_default_backend_for_device
    from procgroup.api.availability import is_available as is_available
    from procgroup.api.availability import is_backend_available as is_backend_available
    from procgroup.api.availability import is_gloo_available as is_gloo_available
    from procgroup.api.availability import is_mpi_available as is_mpi_available
    from procgroup.api.availability import is_nccl_available as is_nccl_available
    from procgroup.api.availability import is_torchelastic_launched as is_torchelastic_launched
    from procgroup.api.availability import is_ucc_available as is_ucc_available
    from procgroup.api.availability import is_xccl_available as is_xccl_available
    from procgroup.api.collectives import all_gather as all_gather
    from procgroup.api.collectives import all_reduce as all_reduce
    from procgroup.api.collectives import barrier as barrier
    from procgroup.api.collectives import broadcast as broadcast
    from procgroup.api.collectives import reduce as reduce
    from procgroup.api.lifecycle import destroy_process_group as destroy_process_group
    from procgroup.api.lifecycle import init_process_group as init_process_group
    from procgroup.api.lifecycle import is_initialized as is_initialized
    from procgroup.api.membership import GroupMember as GroupMember
    from procgroup.api.membership import group as group
    from procgroup.api.point_to_point import irecv as irecv
    from procgroup.api.point_to_point import isend as isend
    from procgroup.api.point_to_point import recv as recv
    from procgroup.api.point_to_point import send as send
    from procgroup.api.ranks import get_global_rank as get_global_rank
    from procgroup.api.ranks import get_group_rank as get_group_rank
    from procgroup.api.ranks import get_node_local_rank as get_node_local_rank
    from procgroup.api.ranks import get_process_group_ranks as get_process_group_ranks
    from procgroup.api.ranks import get_rank as get_rank
    from procgroup.api.ranks import get_world_size as get_world_size
    from procgroup.errors import CollectiveMismatch as CollectiveMismatch
    from procgroup.errors import CollectiveTimeout as CollectiveTimeout
    from procgroup.errors import DistBackendError as DistBackendError
    from procgroup.errors import DistError as DistError
    from procgroup.errors import DistNetworkError as DistNetworkError
    from procgroup.errors import DistStoreError as DistStoreError
    from procgroup.errors import ForkedProcessError as ForkedProcessError
    from procgroup.errors import GroupBroken as GroupBroken
    from procgroup.errors import GroupDestroyed as GroupDestroyed
    from procgroup.errors import OperationError as OperationError
    from procgroup.errors import PeerFailed as PeerFailed
    from procgroup.errors import PeerLost as PeerLost
    from procgroup.errors import QueueEmptyError as QueueEmptyError
    from procgroup.errors import RendezvousConflict as RendezvousConflict
    from procgroup.errors import RendezvousError as RendezvousError
    from procgroup.errors import RendezvousTimeout as RendezvousTimeout
    from procgroup.errors import StoreLimitError as StoreLimitError
    from procgroup.errors import StoreLost as StoreLost
    from procgroup.errors import StoreTimeout as StoreTimeout
    from procgroup.errors import WaitTimeout as WaitTimeout
    from procgroup.groups.group import ProcessGroup as ProcessGroup
    from procgroup.groups.work import Work as Work
    from procgroup.launch.spawn import ProcessContext as ProcessContext
    from procgroup.launch.spawn import spawn as spawn
    from procgroup.launch.spawn import start_processes as start_processes
    from procgroup.launch.spawn_errors import ProcessExitedException as ProcessExitedException
    from procgroup.launch.spawn_errors import ProcessRaisedException as ProcessRaisedException
    from procgroup.rendezvous.handlers import register_rendezvous_handler as register_rendezvous_handler
    from procgroup.rendezvous.handlers import rendezvous as rendezvous
    from procgroup.stores.file import FileStore as FileStore
    from procgroup.stores.hash import HashStore as HashStore
    from procgroup.stores.prefix import PrefixStore as PrefixStore
    from procgroup.stores.store import Store as Store
    from procgroup.stores.tcp import TCPStore as TCPStore
    from procgroup.types import ReduceOp as ReduceOp

__version__ = "0.1.0"

_NAMES_OF_MODULES = {
    "api.availability": (
        "get_backend get_backend_config get_default_backend_for_device is_available is_backend_available "
        "is_gloo_available is_mpi_available is_nccl_available is_torchelastic_launched is_ucc_available "
        "is_xccl_available"
    ),
    "api.collectives": "all_gather all_reduce barrier broadcast reduce",
    "api.lifecycle": "destroy_process_group init_process_group is_initialized",
    "api.membership": "GroupMember group",
    "api.point_to_point": "irecv isend recv send",
    "api.ranks": "get_global_rank get_group_rank get_node_local_rank get_process_group_ranks get_rank get_world_size",
    "errors": (
        "CollectiveMismatch CollectiveTimeout DistBackendError DistError DistNetworkError DistStoreError "
        "ForkedProcessError GroupBroken GroupDestroyed OperationError PeerFailed PeerLost QueueEmptyError "
        "RendezvousConflict RendezvousError RendezvousTimeout StoreLimitError StoreLost StoreTimeout WaitTimeout"
    ),
    "groups.group": "ProcessGroup",
    "groups.work": "Work",
    "launch.spawn": "ProcessContext spawn start_processes",
    "launch.spawn_errors": "ProcessExitedException ProcessRaisedException",
    "rendezvous.handlers": "register_rendezvous_handler rendezvous",
    "stores.file": "FileStore",
    "stores.hash": "HashStore",
    "stores.prefix": "PrefixStore",
    "stores.store": "Store",
    "stores.tcp": "TCPStore",
    "types": "ReduceOp",
}
_MODULE_OF_NAME = {name: module for module, names in _NAMES_OF_MODULES.items() for name in names.split()}

__all__ = [*_MODULE_OF_NAME]


def __getattr__(name: str) -> object:
    module = _MODULE_OF_NAME.get(name)
    if module is None:
        raise AttributeError(f"module 'procgroup' has no attribute {name!r}")
    value: object = getattr(import_module(f"procgroup.{module}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULE_OF_NAME})
