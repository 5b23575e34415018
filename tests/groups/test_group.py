"""A process group maps its ranks to the world's, whatever backend moves its bytes."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import numpy as np
import pytest

import procgroup as dist
from procgroup import _native, functional
from procgroup.backends import native
from procgroup.errors import ForkedProcessError, GroupDestroyed
from procgroup.groups.calls import Iovecs
from procgroup.groups.group import ProcessGroup
from procgroup.stores.hash import HashStore
from procgroup.testing import connected_groups


def group_of(*members: int) -> ProcessGroup:
    return ProcessGroup(
        native.alone(name="gloo", group_name="7"),
        HashStore(),
        rank=0,
        members=members,
        group_name="7",
        timeout=timedelta(seconds=1),
        backend_config="cpu:gloo",
    )


def test_global_and_group_ranks_are_mapped_in_group_order() -> None:
    group = group_of(5, 2, 9)
    assert [group.global_rank(rank) for rank in range(3)] == [5, 2, 9]
    assert [group.group_rank(rank) for rank in (5, 2, 9)] == [0, 1, 2]


def test_a_rank_that_is_no_member_is_refused() -> None:
    group = group_of(5, 2)
    with pytest.raises(ValueError, match=r"Global rank 0 is not part of group 7, which has \(5, 2\)"):
        group.group_rank(0)
    with pytest.raises(ValueError, match="Group rank 2 is not part of group 7"):
        group.global_rank(2)


def test_a_receive_says_which_rank_the_message_came_from() -> None:
    with connected_groups(2, transport="shm") as (first, second):
        work = first.irecv(np.zeros(1))
        second.send(np.ones(1), 0)
        assert work.wait()
        assert work.source_rank() == 1
        assert repr(work) == f"<Work recv on group {first.group_name} (rank 0 of 2): complete>"
        assert repr(first) == f"<ProcessGroup {first.group_name}: rank 0 of 2, shared memory>"
    assert repr(group_of(5)) == "<ProcessGroup 7: rank 0 of 1, shared memory>"


def test_shutdown_is_idempotent_and_later_calls_raise() -> None:
    group = group_of(0)
    assert group.is_usable()
    group.shutdown()
    group.shutdown()
    group.abort()
    assert not group.is_usable()
    assert (group.name(), group.transport) == ("gloo", "shared memory")
    with pytest.raises(GroupDestroyed):
        group.barrier()


def test_a_forked_copy_says_what_happened() -> None:
    group = group_of(0)
    group.mark_forked()
    with pytest.raises(ForkedProcessError, match="process group 7 cannot be used in a forked child"):
        group.all_reduce(np.ones(1))
    group.shutdown()
    with pytest.raises(ForkedProcessError):
        group.barrier()


ARRAY = np.ones(1)
CALLS: dict[str, tuple[Any, ...]] = {
    "broadcast": (ARRAY, 0),
    "reduce": (ARRAY, 0),
    "all_reduce": (ARRAY,),
    "scan": (ARRAY,),
    "exscan": (ARRAY,),
    "gather": (ARRAY, [ARRAY, ARRAY], 0),
    "all_gather": ([ARRAY, ARRAY], ARRAY),
    "all_gather_single": (ARRAY, ARRAY),
    "all_gather_integers": (ARRAY, ARRAY, 0),
    "scatter": (ARRAY, [ARRAY, ARRAY], 0),
    "reduce_scatter": (ARRAY, [ARRAY, ARRAY]),
    "reduce_scatter_single": (ARRAY, ARRAY),
    "all_to_all": ([ARRAY, ARRAY], [ARRAY, ARRAY]),
    "all_to_all_single": (ARRAY, ARRAY),
    "neighbor_all_to_all": ([ARRAY, ARRAY], [ARRAY, ARRAY], (2,)),
    "barrier": (),
    "all_reduce_coalesced": ([ARRAY],),
    "broadcast_iovecs": (Iovecs([], [], 0), 1.0),
    "all_gather_iovecs": ([ARRAY], Iovecs([], [], 0), 1.0),
    "send": (ARRAY, 1),
    "recv": (ARRAY, 1),
}
FUNCTIONS: dict[str, Callable[[ProcessGroup], object]] = {
    "broadcast_object_list": lambda group: dist.broadcast_object_list([1], 0, group),
    "all_gather_object": lambda group: dist.all_gather_object([None, None], 1, group),
    "gather_object": lambda group: dist.gather_object(1, [None, None], 0, group),
    "scatter_object_list": lambda group: dist.scatter_object_list([None], [1, 2], 0, group),
    "send_object_list": lambda group: dist.send_object_list([1], 1, group),
    "recv_object_list": lambda group: dist.recv_object_list([None], 1, group),
    "functional.all_reduce": lambda group: functional.all_reduce(1.0, group=group),
    "functional.sendrecv": lambda group: functional.sendrecv(1.0, 1, 1, group=group),
}


@pytest.mark.parametrize("op", CALLS)
def test_every_call_of_a_group_that_has_ended_raises(op: str) -> None:
    group = group_of(0, 1)
    group.shutdown()
    with pytest.raises(GroupDestroyed):
        getattr(group, op)(*CALLS[op])


@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_function_of_objects_and_trees_raises_for_a_group_that_has_ended(name: str) -> None:
    group = group_of(0, 1)
    group.shutdown()
    with pytest.raises(GroupDestroyed):
        FUNCTIONS[name](group)


def test_these_calls_include_every_operation_of_the_engine() -> None:
    assert {row["name"] for row in _native.operations()} <= set(CALLS)


def test_aborting_ends_a_receive() -> None:
    with connected_groups(2) as groups:
        work = groups[0].irecv(np.zeros(1), 1)
        future = work.get_future()
        groups[0].abort()
        assert "aborted" in str(future.exception(timeout=5))
        assert "aborted" in str(work.exception())
        assert (work.is_completed(), work.is_success()) == (True, False)
        with pytest.raises(RuntimeError, match="aborted"):
            work.result()
