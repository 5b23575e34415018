"""The public names are frozen; binding them is lazy and costs nothing."""

from __future__ import annotations

import ast
import inspect
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

import procgroup

_NAMES = """
    ArgumentError
    Backend
    BackendConfig
    CollectiveMismatch
    CollectiveTimeout
    Deadlock
    DebugLevel
    DeviceMesh
    DistBackendError
    DistError
    DistNetworkError
    DistStoreError
    EtcdStore
    FileStore
    ForkedProcessError
    GroupBroken
    GroupDestroyed
    GroupMember
    HashStore
    IncompleteEnvironment
    MPIStore
    ObjectError
    OperationError
    P2POp
    PeerFailed
    PeerLost
    PicklingFailed
    PrefixStore
    ProcessContext
    ProcessExitedException
    ProcessGroup
    ProcessRaisedException
    QueueEmptyError
    RedisStore
    ReduceOp
    RendezvousConflict
    RendezvousError
    RendezvousTimeout
    SlurmStore
    Store
    StoreLimitError
    StoreLost
    StoreTimeout
    TCPStore
    UnpicklingFailed
    WaitTimeout
    Work
    _CoalescingManager
    _all_gather_base
    _coalescing_manager
    _reduce_scatter_base
    all_gather
    all_gather_coalesced
    all_gather_into_tensor
    all_gather_object
    all_gather_single
    all_reduce
    all_reduce_coalesced
    all_to_all
    all_to_all_single
    barrier
    batch_isend_irecv
    breakpoint
    broadcast
    broadcast_object_list
    default_pg_timeout
    destroy_process_group
    empty
    exscan
    full
    gather
    gather_object
    get_backend
    get_backend_config
    get_debug_level
    get_default_backend_for_device
    get_global_rank
    get_group_rank
    get_new_ranks
    get_node_local_rank
    get_pg_count
    get_process_group_ranks
    get_rank
    get_world_size
    group
    init_device_mesh
    init_process_group
    irecv
    is_available
    is_backend_available
    is_gloo_available
    is_initialized
    is_mpi_available
    is_nccl_available
    is_torchelastic_launched
    is_ucc_available
    is_xccl_available
    isend
    monitored_barrier
    neighbor_all_to_all
    new_group
    new_subgroups
    new_subgroups_by_enumeration
    on_preemption
    preempted
    reconfigure
    rank_first
    record
    recv
    recv_object_list
    reduce
    reduce_op
    reduce_scatter
    reduce_scatter_single
    reduce_scatter_tensor
    register_rendezvous_handler
    rendezvous
    report
    scan
    scatter
    scatter_object_list
    send
    send_object_list
    set_debug_level
    set_debug_level_from_env
    shrink_group
    spawn
    split_group
    start_processes
    supports_complex
    timeout
    zeros
"""
NAMES = _NAMES.split()
LAZY_PACKAGES = ["procgroup", "procgroup.stores", "procgroup.parallel", "procgroup.parallel.communication_hooks"]
PUBLIC_PACKAGES = {
    "procgroup": ["device_mesh", "functional", "parallel", "testing"],
    "procgroup.parallel": ["communication_hooks"],
}

_NAMES_AS_IN_TORCH = """
    P2POp _all_gather_base _coalescing_manager _reduce_scatter_base all_gather all_gather_coalesced
    all_gather_into_tensor all_gather_object all_gather_single all_reduce all_reduce_coalesced all_to_all
    all_to_all_single barrier batch_isend_irecv breakpoint broadcast broadcast_object_list destroy_process_group
    gather gather_object get_backend get_backend_config get_default_backend_for_device get_global_rank
    get_group_rank get_node_local_rank get_pg_count get_process_group_ranks get_rank get_world_size
    init_process_group irecv is_backend_available is_initialized isend monitored_barrier new_group new_subgroups
    new_subgroups_by_enumeration recv recv_object_list reduce reduce_scatter reduce_scatter_single
    reduce_scatter_tensor scatter scatter_object_list send send_object_list split_group supports_complex
"""


def test_the_public_names_are_these() -> None:
    assert sorted(procgroup._MODULE_OF_NAME) == sorted(NAMES)
    assert sorted(procgroup.__all__) == sorted(name for name in NAMES if name[0] != "_")


@pytest.mark.parametrize("name", NAMES)
def test_every_public_name_is_there(name: str) -> None:
    assert getattr(procgroup, name) is not None


def test_dir_is_the_public_names_and_packages_also_after_use() -> None:
    program = (
        "from importlib import import_module\n"
        f"modules = [import_module(name) for name in {LAZY_PACKAGES}]\n"
        "[getattr(module, name) for module in modules for name in dir(module)]\n"
        "for module in modules: print(*dir(module))"
    )
    shown = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=120)
    public = [sorted({*import_module(name).__all__, *PUBLIC_PACKAGES.get(name, ())}) for name in LAZY_PACKAGES]
    assert [line.split() for line in shown.stdout.splitlines()] == public


@pytest.mark.parametrize("package", LAZY_PACKAGES)
def test_a_type_checker_sees_the_same_names_from_the_same_modules(package: str) -> None:
    module: Any = import_module(package)
    stub = ast.parse(Path(module.__file__).with_suffix(".pyi").read_text())
    seen = {
        alias.asname: statement.module
        for statement in stub.body
        if isinstance(statement, ast.ImportFrom)
        for alias in statement.names
    }
    names = {name: f"{package}.{owner}" for name, owner in module._MODULE_OF_NAME.items()}
    assert seen == names | dict.fromkeys(PUBLIC_PACKAGES.get(package, ()), package)


@pytest.mark.parametrize("package", [*LAZY_PACKAGES, "procgroup.functional", "procgroup.testing"])
def test_an_editor_completes_every_public_name(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    jedi = pytest.importorskip("jedi")
    # Jedi cannot follow the import hook of an editable installation: let it find the package by its path alone.
    monkeypatch.setattr(sys, "meta_path", [finder for finder in sys.meta_path if isinstance(finder, type)])
    source = Path(procgroup.__file__).parents[1]
    project = jedi.Project(source, sys_path=[str(source), *sys.path])
    script = jedi.Script(f"import {package}\n{package}.", project=project, environment=jedi.InterpreterEnvironment())
    completed = {completion.name for completion in script.complete()}
    public = {*import_module(package).__all__, *PUBLIC_PACKAGES.get(package, ())}
    assert sorted(public - completed) == []


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'procgroup' has no attribute 'all_reduced'") as caught:
        _ = procgroup.all_reduced
    assert (caught.value.name, caught.value.obj) == ("all_reduced", procgroup), "Python suggests names from these"


@pytest.mark.parametrize("name", ["fsdp", "distributed_c10d"])
def test_a_package_of_torch_alone_is_said_to_be_torch_s(name: str) -> None:
    with pytest.raises(AttributeError, match=rf"torch.distributed.{name} is PyTorch's own.*backend 'procgroup'"):
        getattr(procgroup, name)
    assert name not in dir(procgroup)


def test_importing_loads_no_array_library_and_no_room() -> None:
    program = (
        "import sys, procgroup; "
        "loaded = [n for n in sys.modules if n.split('.')[0] in ('numpy', 'torch', 'ctypes', 'socket')"
        " or n.startswith('procgroup.')]; "
        "print(loaded)"
    )
    shown = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=120)
    assert shown.stdout.strip() == "[]"


def test_the_package_rendezvous_can_be_called_as_torchs_function() -> None:
    import procgroup.rendezvous

    store, rank, size = next(procgroup.rendezvous("env://", 0, 1))  # type: ignore[operator]
    assert (rank, size) == (0, 1)
    store.set("key", "value")
    assert store.get("key") == b"value"


@pytest.mark.torch
@pytest.mark.parametrize("name", _NAMES_AS_IN_TORCH.split())
def test_parameters_are_torchs_in_torchs_order_and_ours_come_last(name: str) -> None:
    torch_distributed = pytest.importorskip("torch.distributed")
    theirs = [p for p in inspect.signature(getattr(torch_distributed, name)).parameters.values() if p.name[0] != "_"]
    ours = list(inspect.signature(getattr(procgroup, name)).parameters.values())
    assert [parameter.name for parameter in ours[: len(theirs)]] == [parameter.name for parameter in theirs]
    assert {parameter.name for parameter in ours[len(theirs) :]} <= {"timeout", "safe", "deterministic", "retain"}
    for our, their in zip(ours, theirs, strict=False):
        if their.name != "op":
            assert our.default == their.default, our.name
