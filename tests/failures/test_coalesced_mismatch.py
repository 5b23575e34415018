"""An asynchronous list of arrays that goes out in several calls: a mismatch in the first is what each rank raises."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from failures.waiting_calls import TRANSPORTS, on

import procgroup as dist
from procgroup.groups.calls import GroupCalls
from world import run

transports = pytest.mark.parametrize("transport", TRANSPORTS)


def issue_several(rank: int, size: int, kind: str) -> tuple[str, str]:
    dist.init_process_group(timeout=20)
    group: Any = dist.group.WORLD
    dist.barrier()
    try:
        if kind == "all_reduce":
            # Arrays of different dtypes go out in calls of their own.
            arrays = [np.ones(3 + rank, np.float32), *(np.ones(300_000 + rank, np.float64) for _ in range(40))]
            work = group.all_reduce_coalesced(arrays, async_op=True)
        else:
            lists = [np.ones(2 * (3 + rank)) for _ in range(200)], [np.ones(3 + rank) for _ in range(200)]
            work = group.all_gather_single_coalesced(*lists, async_op=True)
        time.sleep(0.01)  # most often the calls fail before they are awaited
        work.wait()
    except dist.DistError as error:
        return type(error).__name__, str(error)
    return "none", ""


@transports
@pytest.mark.parametrize("kind", ["all_reduce", "all_gather"])
def test_a_mismatch_of_the_first_call_is_raised_on_every_rank(transport: str, kind: str) -> None:
    for _ in range(3):
        results = run(issue_several, 2, args=(kind,), environment=on(transport))
        assert [name for name, _ in results] == ["CollectiveMismatch"] * 2, results


class GroupWhoseSecondCallIsTooLate(GroupCalls):
    """The group ends before its first call has completed, and the second call finds it ended."""

    def __init__(self) -> None:
        self.works: list[Any] = []
        self.calls: Any = SimpleNamespace(barrier=self._start)

    def _start(self, async_op: bool, seconds: float) -> Any:
        if self.works:
            raise dist.GroupBroken(reason="the ranks made different calls", **WHERE)
        self.works.append(SimpleNamespace(wait=self._wait, exception=lambda: None))
        return self.works[-1]

    def _wait(self) -> None:
        raise dist.CollectiveMismatch(calls={0: "barrier", 1: "all_reduce"}, **WHERE)

    def _check(self, op: str, *arguments: Any) -> None:
        pass


WHERE: dict[str, Any] = {"op": "barrier", "sequence": 1, "group": "0", "rank": 0, "size": 2}


def test_a_call_that_finds_the_group_ended_waits_for_the_failure_of_the_first_call() -> None:
    calls = [("barrier", (), 1.0)] * 2
    with pytest.raises(dist.CollectiveMismatch):
        GroupWhoseSecondCallIsTooLate()._issue_all(calls, [], True)
