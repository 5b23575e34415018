"""The public names are frozen; binding them is lazy and costs nothing."""

from __future__ import annotations

import ast
import inspect
import subprocess
import sys
from pathlib import Path

import pytest

import procgroup

_NAMES = """
    CollectiveMismatch CollectiveTimeout DistBackendError DistError DistNetworkError DistStoreError FileStore
    ForkedProcessError GroupBroken GroupDestroyed GroupMember HashStore OperationError PeerFailed PeerLost
    PrefixStore ProcessContext ProcessExitedException
    ProcessRaisedException
    ProcessGroup QueueEmptyError ReduceOp RendezvousConflict RendezvousError RendezvousTimeout Store
    StoreLimitError StoreLost StoreTimeout TCPStore WaitTimeout Work all_gather all_reduce barrier broadcast
    destroy_process_group get_backend get_backend_config get_default_backend_for_device get_global_rank
    get_group_rank get_node_local_rank get_process_group_ranks get_rank get_world_size group init_process_group
    irecv is_available is_backend_available is_gloo_available is_initialized is_mpi_available is_nccl_available
    is_torchelastic_launched is_ucc_available is_xccl_available isend recv reduce register_rendezvous_handler
    rendezvous send spawn start_processes
"""
NAMES = _NAMES.split()

_NAMES_AS_IN_TORCH = """
    all_gather all_reduce barrier broadcast destroy_process_group get_backend get_backend_config
    get_default_backend_for_device get_global_rank get_group_rank get_node_local_rank get_process_group_ranks
    get_rank get_world_size init_process_group irecv is_backend_available is_initialized isend recv reduce send
"""


def test_the_public_names_are_these() -> None:
    assert sorted(procgroup.__all__) == sorted(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_every_public_name_is_there(name: str) -> None:
    assert getattr(procgroup, name) is not None
    assert name in dir(procgroup)


def test_a_type_checker_sees_the_same_names_from_the_same_modules() -> None:
    tree = ast.parse(Path(procgroup.__file__).read_text())
    seen = {
        alias.asname: statement.module
        for block in ast.walk(tree)
        if isinstance(block, ast.If)
        for statement in block.body
        if isinstance(statement, ast.ImportFrom)
        for alias in statement.names
    }
    assert seen == {name: f"procgroup.{module}" for name, module in procgroup._MODULE_OF_NAME.items()}


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'procgroup' has no attribute 'all_reduced'"):
        _ = procgroup.all_reduced


def test_importing_loads_no_array_library_and_no_room() -> None:
    program = (
        "import sys, procgroup; "
        "loaded = [n for n in sys.modules if n.split('.')[0] in ('numpy', 'torch', 'ctypes', 'socket')"
        " or n.startswith('procgroup.')]; "
        "print(loaded)"
    )
    shown = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=30)
    assert shown.stdout.strip() == "[]"


def test_the_package_rendezvous_can_be_called_as_torchs_function() -> None:
    import procgroup.rendezvous

    store, rank, size = next(procgroup.rendezvous("env://", 0, 1))  # type: ignore[operator]
    assert (rank, size) == (0, 1)
    store.set("key", "value")
    assert store.get("key") == b"value"


@pytest.mark.torch
@pytest.mark.parametrize(
    "name",
    _NAMES_AS_IN_TORCH.split(),
)
def test_parameters_are_torchs_in_torchs_order_and_ours_come_last(name: str) -> None:
    torch_distributed = pytest.importorskip("torch.distributed")
    theirs = [p for p in inspect.signature(getattr(torch_distributed, name)).parameters.values() if p.name[0] != "_"]
    ours = list(inspect.signature(getattr(procgroup, name)).parameters.values())
    assert [parameter.name for parameter in ours[: len(theirs)]] == [parameter.name for parameter in theirs]
    assert {parameter.name for parameter in ours[len(theirs) :]} <= {"timeout"}
    for our, their in zip(ours, theirs, strict=False):
        if their.name != "op":
            assert our.default == their.default, our.name
