"""Smoke programs of the world: who is there, what works here, how it starts and ends."""

from __future__ import annotations

import itertools
import os
from datetime import timedelta
from unittest import mock

import pytest
from compat.registry import shows

import procgroup as dist


@shows("get_rank", "get_world_size")
def ranks() -> None:
    assert dist.get_world_size() == 2
    assert dist.get_rank() == dist.group.WORLD.rank()


@shows("get_group_rank", "get_global_rank", "get_process_group_ranks")
def ranks_of_groups() -> None:
    world = dist.group.WORLD
    assert dist.get_process_group_ranks(world) == [0, 1]
    assert (dist.get_group_rank(world, 1), dist.get_global_rank(world, 1)) == (1, 1)


@shows("get_node_local_rank", ranks=0)
def local_rank() -> None:
    assert dist.get_node_local_rank(fallback_rank=5) == int(os.environ.get("LOCAL_RANK", "5"))


@shows("group", "GroupMember", "GroupMember.NON_GROUP_MEMBER")
def members() -> None:
    assert dist.group.WORLD is dist.GroupMember.WORLD
    assert isinstance(dist.group.WORLD, dist.ProcessGroup)
    assert dist.GroupMember.NON_GROUP_MEMBER == -100


@shows("ProcessGroup")
def process_group() -> None:
    assert isinstance(dist.group.WORLD, dist.ProcessGroup)


@shows(
    "ProcessGroup.rank",
    "ProcessGroup.size",
    "ProcessGroup.name",
    "ProcessGroup.set_timeout",
    "ProcessGroup.get_group_store",
)
def process_group_methods() -> None:
    world = dist.group.WORLD
    assert world is not None
    assert (world.rank() in (0, 1), world.size(), world.name()) == (True, 2, "gloo")
    assert (world.group_name, world.group_desc) == ("0", "default_pg")
    world.set_timeout(66)
    assert world.timeout.total_seconds() == 66
    world.get_group_store().set(f"smoke{world.rank()}", "value")
    assert world.store.get("smoke0") == b"value"


@shows("ProcessGroup.shutdown", ranks=0)
def shutdown() -> None:
    dist.init_process_group("gloo", rank=0, world_size=1)
    world = dist.group.WORLD
    assert world is not None
    world.shutdown()
    with pytest.raises(ValueError, match="has been destroyed"):
        dist.barrier()


@shows("ProcessGroup.abort", ranks=2)
def abort() -> None:
    import numpy as np

    work = dist.irecv(np.zeros(1))
    assert dist.group.WORLD is not None
    assert work is not None
    aborts = dist.get_rank() == 0
    if aborts:
        dist.group.WORLD.abort()
    with pytest.raises(dist.GroupBroken if aborts else dist.PeerFailed, match="aborted"):
        work.wait(timedelta(seconds=20))


@shows("init_process_group", "destroy_process_group", "is_initialized", ranks=0)
def lifecycle() -> None:
    assert dist.is_initialized() is False
    dist.init_process_group("gloo", rank=0, world_size=1)
    assert dist.is_initialized() is True
    dist.destroy_process_group()
    assert dist.is_initialized() is False


@shows("DistBackendError", ranks=0)
def backend_error() -> None:
    with pytest.raises(dist.DistBackendError):
        dist.init_process_group("nccl", rank=0, world_size=1)


@shows("get_backend", "get_backend_config")
def backend() -> None:
    assert dist.get_backend() == "gloo"
    assert "cpu:gloo" in dist.get_backend_config()


@shows(
    "is_available",
    "is_gloo_available",
    "is_mpi_available",
    "is_nccl_available",
    "is_ucc_available",
    "is_xccl_available",
    "is_backend_available",
    ranks=0,
)
def availability() -> None:
    assert dist.is_available() is True
    assert dist.is_gloo_available() is True
    assert dist.is_backend_available("GLOO") is True
    for name in ("mpi", "nccl", "ucc", "xccl"):
        assert getattr(dist, f"is_{name}_available")() is dist.is_backend_available(name)


@shows("get_default_backend_for_device", ranks=0)
def default_backend() -> None:
    assert dist.get_default_backend_for_device("cpu") == "gloo"


@shows("is_torchelastic_launched", ranks=0)
def launched() -> None:
    with mock.patch.dict(os.environ, {"TORCHELASTIC_RUN_ID": "smoke"}):
        assert dist.is_torchelastic_launched() is True


@shows(
    "Backend",
    "Backend.GLOO",
    "Backend.NCCL",
    "Backend.MPI",
    "Backend.UCC",
    "Backend.XCCL",
    "Backend.UNDEFINED",
    ranks=0,
)
def backend_names() -> None:
    assert dist.Backend("GLOO") == "gloo"
    for name in ("GLOO", "NCCL", "MPI", "UCC", "XCCL", "UNDEFINED"):
        assert getattr(dist.Backend, name) == name.lower()


_numbers = itertools.count(1)


@shows("Backend.register_backend", ranks=0)
def register_backend() -> None:
    name = f"another{next(_numbers)}"  # a name is registered once in a process
    dist.Backend.register_backend(name, lambda store, rank, size, timeout: None)  # type: ignore[arg-type, return-value]
    assert dist.is_backend_available(name)
    assert dist.BackendConfig(name).get_device_backend_map() == {"cpu": name}


@shows("BackendConfig", "BackendConfig.get_device_backend_map", ranks=0)
def backend_config() -> None:
    config = dist.BackendConfig("cpu:gloo,cuda:nccl")
    assert config.get_device_backend_map() == {"cpu": "gloo", "cuda": "nccl"}


@shows("DebugLevel", "get_debug_level", "set_debug_level", "set_debug_level_from_env", ranks=0)
def debug_levels() -> None:
    for level in (dist.DebugLevel.INFO, dist.DebugLevel.OFF):
        dist.set_debug_level(level)
        assert dist.get_debug_level() == level
    with mock.patch.dict(os.environ, {"TORCH_DISTRIBUTED_DEBUG": "DETAIL"}):
        dist.set_debug_level_from_env()
        assert dist.get_debug_level() == 2
    dist.set_debug_level(dist.DebugLevel.OFF)


@shows("default_pg_timeout", ranks=0)
def default_timeout() -> None:
    assert dist.default_pg_timeout.total_seconds() == 1800
