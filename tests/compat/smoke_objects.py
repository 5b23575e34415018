"""Smoke programs of the calls that move Python objects, on two ranks."""

from __future__ import annotations

from typing import Any

from compat.registry import shows

import procgroup as dist


@shows("all_gather_object")
def all_gather_object() -> None:
    found: list[Any] = [None, None]
    dist.all_gather_object(found, {"rank": dist.get_rank()})
    assert found == [{"rank": 0}, {"rank": 1}]


@shows("broadcast_object_list")
def broadcast_object_list() -> None:
    found: list[Any] = [dist.get_rank(), str(dist.get_rank())]
    dist.broadcast_object_list(found, 1)
    assert found == [1, "1"]


@shows("gather_object")
def gather_object() -> None:
    found: list[Any] | None = [None, None] if dist.get_rank() == 0 else None
    dist.gather_object((dist.get_rank(),), found)
    assert found in (None, [(0,), (1,)])


@shows("scatter_object_list")
def scatter_object_list() -> None:
    found: list[Any] = [None]
    dist.scatter_object_list(found, ["first", "second"] if dist.get_rank() == 0 else None)
    assert found == [("first", "second")[dist.get_rank()]]


@shows("send_object_list", "recv_object_list")
def object_messages() -> None:
    found: list[Any] = [None, None]
    if dist.get_rank() == 0:
        dist.send_object_list([{1}, "two"], 1)
    else:
        assert dist.recv_object_list(found) == 0
        assert found == [{1}, "two"]
