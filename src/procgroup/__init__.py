"""Process groups, collectives, stores and launchers for every array library: ``import procgroup as dist``.

Every public name is bound when it is first used, so that importing the package costs nothing.
"""

from __future__ import annotations

from procgroup.lazy_names import bound_on_first_use

TYPE_CHECKING = False  # what type checkers take for true; importing typing would cost a third of this import
if TYPE_CHECKING:
    from procgroup.api.allocation import empty as empty
    from procgroup.api.allocation import full as full
    from procgroup.api.allocation import zeros as zeros
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
    from procgroup.api.availability import supports_complex as supports_complex
    from procgroup.api.backend_names import Backend as Backend
    from procgroup.api.backend_names import BackendConfig as BackendConfig
    from procgroup.api.batch import P2POp as P2POp
    from procgroup.api.batch import batch_isend_irecv as batch_isend_irecv
    from procgroup.api.coalescing import _coalescing_manager as _coalescing_manager
    from procgroup.api.coalescing import _CoalescingManager as _CoalescingManager
    from procgroup.api.coalescing import all_gather_coalesced as all_gather_coalesced
    from procgroup.api.coalescing import all_reduce_coalesced as all_reduce_coalesced
    from procgroup.api.collectives import all_reduce as all_reduce
    from procgroup.api.collectives import barrier as barrier
    from procgroup.api.collectives import broadcast as broadcast
    from procgroup.api.collectives import reduce as reduce
    from procgroup.api.debugging import DebugLevel as DebugLevel
    from procgroup.api.debugging import breakpoint as breakpoint
    from procgroup.api.debugging import get_debug_level as get_debug_level
    from procgroup.api.debugging import set_debug_level as set_debug_level
    from procgroup.api.debugging import set_debug_level_from_env as set_debug_level_from_env
    from procgroup.api.exchanging import all_to_all as all_to_all
    from procgroup.api.exchanging import all_to_all_single as all_to_all_single
    from procgroup.api.gathering import all_gather as all_gather
    from procgroup.api.gathering import all_gather_single as all_gather_single
    from procgroup.api.gathering import gather as gather
    from procgroup.api.groups import get_pg_count as get_pg_count
    from procgroup.api.groups import new_group as new_group
    from procgroup.api.groups import new_subgroups as new_subgroups
    from procgroup.api.groups import new_subgroups_by_enumeration as new_subgroups_by_enumeration
    from procgroup.api.groups import split_group as split_group
    from procgroup.api.lifecycle import destroy_process_group as destroy_process_group
    from procgroup.api.lifecycle import init_process_group as init_process_group
    from procgroup.api.lifecycle import is_initialized as is_initialized
    from procgroup.api.membership import GroupMember as GroupMember
    from procgroup.api.membership import group as group
    from procgroup.api.monitoring import monitored_barrier as monitored_barrier
    from procgroup.api.objects import all_gather_object as all_gather_object
    from procgroup.api.objects import broadcast_object_list as broadcast_object_list
    from procgroup.api.objects import gather_object as gather_object
    from procgroup.api.objects import recv_object_list as recv_object_list
    from procgroup.api.objects import scatter_object_list as scatter_object_list
    from procgroup.api.objects import send_object_list as send_object_list
    from procgroup.api.old_names import _all_gather_base as _all_gather_base
    from procgroup.api.old_names import _reduce_scatter_base as _reduce_scatter_base
    from procgroup.api.old_names import all_gather_into_tensor as all_gather_into_tensor
    from procgroup.api.old_names import reduce_op as reduce_op
    from procgroup.api.old_names import reduce_scatter_tensor as reduce_scatter_tensor
    from procgroup.api.options import default_pg_timeout as default_pg_timeout
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
    from procgroup.api.scattering import reduce_scatter as reduce_scatter
    from procgroup.api.scattering import reduce_scatter_single as reduce_scatter_single
    from procgroup.api.scattering import scatter as scatter
    from procgroup.errors import ArgumentError as ArgumentError
    from procgroup.errors import CollectiveMismatch as CollectiveMismatch
    from procgroup.errors import CollectiveTimeout as CollectiveTimeout
    from procgroup.errors import Deadlock as Deadlock
    from procgroup.errors import DistBackendError as DistBackendError
    from procgroup.errors import DistError as DistError
    from procgroup.errors import DistNetworkError as DistNetworkError
    from procgroup.errors import DistStoreError as DistStoreError
    from procgroup.errors import ForkedProcessError as ForkedProcessError
    from procgroup.errors import GroupBroken as GroupBroken
    from procgroup.errors import GroupDestroyed as GroupDestroyed
    from procgroup.errors import ObjectError as ObjectError
    from procgroup.errors import OperationError as OperationError
    from procgroup.errors import PeerFailed as PeerFailed
    from procgroup.errors import PeerLost as PeerLost
    from procgroup.errors import PicklingFailed as PicklingFailed
    from procgroup.errors import QueueEmptyError as QueueEmptyError
    from procgroup.errors import RendezvousConflict as RendezvousConflict
    from procgroup.errors import RendezvousError as RendezvousError
    from procgroup.errors import RendezvousTimeout as RendezvousTimeout
    from procgroup.errors import StoreLimitError as StoreLimitError
    from procgroup.errors import StoreLost as StoreLost
    from procgroup.errors import StoreTimeout as StoreTimeout
    from procgroup.errors import UnpicklingFailed as UnpicklingFailed
    from procgroup.errors import WaitTimeout as WaitTimeout
    from procgroup.groups.group import ProcessGroup as ProcessGroup
    from procgroup.groups.work import Work as Work
    from procgroup.launch.spawn import ProcessContext as ProcessContext
    from procgroup.launch.spawn import spawn as spawn
    from procgroup.launch.spawn import start_processes as start_processes
    from procgroup.launch.spawn_errors import ProcessExitedException as ProcessExitedException
    from procgroup.launch.spawn_errors import ProcessRaisedException as ProcessRaisedException
    from procgroup.parallel.device_mesh import DeviceMesh as DeviceMesh
    from procgroup.parallel.mesh_creation import init_device_mesh as init_device_mesh
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
    "api.allocation": "empty full zeros",
    "api.availability": (
        "get_backend get_backend_config get_default_backend_for_device is_available is_backend_available "
        "is_gloo_available is_mpi_available is_nccl_available is_torchelastic_launched is_ucc_available "
        "is_xccl_available supports_complex"
    ),
    "api.backend_names": "Backend BackendConfig",
    "api.batch": "P2POp batch_isend_irecv",
    "api.coalescing": "_CoalescingManager _coalescing_manager all_gather_coalesced all_reduce_coalesced",
    "api.collectives": "all_reduce barrier broadcast reduce",
    "api.debugging": "DebugLevel breakpoint get_debug_level set_debug_level set_debug_level_from_env",
    "api.exchanging": "all_to_all all_to_all_single",
    "api.gathering": "all_gather all_gather_single gather",
    "api.groups": "get_pg_count new_group new_subgroups new_subgroups_by_enumeration split_group",
    "api.lifecycle": "destroy_process_group init_process_group is_initialized",
    "api.membership": "GroupMember group",
    "api.monitoring": "monitored_barrier",
    "api.objects": (
        "all_gather_object broadcast_object_list gather_object recv_object_list scatter_object_list send_object_list"
    ),
    "api.old_names": "_all_gather_base _reduce_scatter_base all_gather_into_tensor reduce_op reduce_scatter_tensor",
    "api.options": "default_pg_timeout",
    "api.point_to_point": "irecv isend recv send",
    "api.ranks": "get_global_rank get_group_rank get_node_local_rank get_process_group_ranks get_rank get_world_size",
    "api.scattering": "reduce_scatter reduce_scatter_single scatter",
    "errors": (
        "ArgumentError CollectiveMismatch CollectiveTimeout Deadlock DistBackendError DistError DistNetworkError "
        "DistStoreError ForkedProcessError GroupBroken GroupDestroyed ObjectError OperationError PeerFailed PeerLost "
        "PicklingFailed QueueEmptyError RendezvousConflict RendezvousError RendezvousTimeout StoreLimitError "
        "StoreLost StoreTimeout UnpicklingFailed WaitTimeout"
    ),
    "groups.group": "ProcessGroup",
    "groups.work": "Work",
    "launch.spawn": "ProcessContext spawn start_processes",
    "launch.spawn_errors": "ProcessExitedException ProcessRaisedException",
    "parallel.device_mesh": "DeviceMesh",
    "parallel.mesh_creation": "init_device_mesh",
    "rendezvous.handlers": "register_rendezvous_handler rendezvous",
    "stores.file": "FileStore",
    "stores.hash": "HashStore",
    "stores.prefix": "PrefixStore",
    "stores.store": "Store",
    "stores.tcp": "TCPStore",
    "types": "ReduceOp",
}
_MODULE_OF_NAME = {name: module for module, names in _NAMES_OF_MODULES.items() for name in names.split()}

__all__ = [name for name in _MODULE_OF_NAME if name[0] != "_"]

# What PyTorch builds on its own process groups, which a changed import does not bring.
_OF_TORCH = frozenset(
    ["algorithms", "checkpoint", "distributed_c10d", "elastic", "fsdp", "nn", "optim", "pipelining", "rpc", "tensor"]
)

__getattr__, __dir__ = bound_on_first_use(__name__, _MODULE_OF_NAME, _OF_TORCH)
