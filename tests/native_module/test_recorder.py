"""The recorder remembers the last calls of a rank, whatever way they ended."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import procgroup as dist
from world import run


def record_some_calls(rank: int, size: int) -> list[dict[str, Any]]:
    dist.init_process_group(timeout=10)
    array = np.ones(3)
    dist.all_reduce(array)
    work = dist.all_reduce(array, async_op=True)
    assert work is not None
    work.wait()
    if rank == 0:
        dist.send(array, 1)
    else:
        dist.recv(array, 0)
    with pytest.raises(dist.CollectiveMismatch):
        dist.all_gather_single(np.ones(6), np.ones(3)) if rank else dist.all_reduce(array)
    return dist.group.WORLD.records()  # type: ignore[union-attr]


def test_blocking_queued_and_failed_calls_and_messages_are_recorded_with_their_times() -> None:
    for rank, records in enumerate(run(record_some_calls, 2)):
        assert [(record["op"], record["state"]) for record in records] == [
            ("all_reduce", "completed"),
            ("all_reduce", "completed"),
            (("send", "recv")[rank], "completed"),
            (("all_reduce", "all_gather")[rank], "failed"),
        ]
        assert records[0]["call"] == "all_reduce(SUM) of 3 float64"
        assert [record["sequence"] for record in records] == [1, 2, 1, 3]
        assert all(0 < record["started_ns"] <= record["ended_ns"] for record in records)
