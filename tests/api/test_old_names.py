"""The names that torch.distributed warns of do what the new ones do, and warn."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

import procgroup as dist


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    dist.init_process_group("gloo", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("name", ["all_gather_into_tensor", "_all_gather_base"])
def test_old_names_of_all_gather_single(name: str) -> None:
    output = np.zeros(3)
    with pytest.warns(FutureWarning, match=f"`procgroup.{name}` is .*Please use `procgroup.all_gather_single` instead"):
        assert getattr(dist, name)(output, np.arange(3.0)) is None
    assert output.tolist() == [0.0, 1.0, 2.0]


@pytest.mark.parametrize("name", ["reduce_scatter_tensor", "_reduce_scatter_base"])
def test_old_names_of_reduce_scatter_single(name: str) -> None:
    output = np.zeros(3)
    with pytest.warns(FutureWarning, match=f"`procgroup.{name}` is .*Please use `procgroup.reduce_scatter_single` in"):
        work = getattr(dist, name)(output, np.arange(3.0), dist.ReduceOp.MAX, async_op=True)
    assert work.wait()
    assert output.tolist() == [0.0, 1.0, 2.0]


def test_reduce_op_has_the_names_of_ReduceOp() -> None:  # noqa: N802
    with pytest.warns(FutureWarning, match="`procgroup.reduce_op` is deprecated"):
        assert dist.reduce_op.SUM is dist.ReduceOp.SUM
    with pytest.warns(FutureWarning):
        assert dist.reduce_op.__members__ == dict(dist.ReduceOp.__members__)
    with pytest.raises(AttributeError, match="no attribute 'SUMS'; it has SUM, "):
        _ = dist.reduce_op.SUMS


def test_complex_arrays_have_no_order_and_no_bits() -> None:
    assert [op.name for op in dist.ReduceOp if dist.supports_complex(op)] == ["SUM", "AVG", "PRODUCT", "PREMUL_SUM"]
    assert dist.supports_complex(dist.ReduceOp.PREMUL_SUM(2.0))


def test_names_of_backends() -> None:
    assert dist.Backend("GLOO") == dist.Backend.GLOO == dist.get_backend() == "gloo"
    with pytest.raises(ValueError, match="must be string-ish"):
        dist.Backend(3)
    config = dist.BackendConfig("cpu:gloo,cuda:nccl")
    assert config.get_device_backend_map() == {"cpu": "gloo", "cuda": "nccl"}
    assert str(config) == "cpu:gloo,cuda:nccl"
    assert dist.default_pg_timeout.total_seconds() == 1800


def test_debug_levels(monkeypatch: pytest.MonkeyPatch) -> None:
    before = dist.get_debug_level()
    try:
        monkeypatch.setenv("TORCH_DISTRIBUTED_DEBUG", "info")
        dist.set_debug_level_from_env()
        assert dist.get_debug_level() is dist.DebugLevel.INFO
        dist.set_debug_level(dist.DebugLevel.DETAIL)
        assert dist.get_debug_level() is dist.DebugLevel.DETAIL
        monkeypatch.setenv("TORCH_DISTRIBUTED_DEBUG", "loud")
        with pytest.raises(ValueError, match="TORCH_DISTRIBUTED_DEBUG='loud'.*expected OFF, INFO or DETAIL"):
            dist.set_debug_level_from_env()
    finally:
        dist.set_debug_level(before)


def test_a_breakpoint_stops_one_rank_and_the_rest_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    import pdb

    stopped = []
    monkeypatch.setattr(pdb.Pdb, "set_trace", lambda self, *arguments: stopped.append(self))
    monkeypatch.setattr(pdb.Pdb, "message", lambda self, text: None)
    for _ in range(3):
        dist.breakpoint(0, skip=1)
    dist.breakpoint(1)
    assert len(stopped) == 2
    assert dist.group.WORLD.timeout.total_seconds() == 3600
