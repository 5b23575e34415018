"""Groups of some of the ranks: who is in them, what they are called, and that calls stay inside."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import numpy as np
import pytest

import procgroup as dist
from procgroup import functional
from procgroup.testing import run_ranks
from world import placed, run

transports = pytest.mark.parametrize("transport", ["shm", "tcp", "spanning"])
SIZES = (1, 5, 700, 100_000)
"""Elements: in a line, in a small area, and in slots."""


def expect_sum(group: Any, members: Sequence[int]) -> None:
    for size in SIZES:
        array = np.full(size, dist.get_rank() + 1)
        dist.all_reduce(array, group=group)
        assert (array == sum(rank + 1 for rank in members)).all()


def use_overlapping_groups() -> None:
    rank = dist.get_rank()
    lists = [[0, 1], [1, 2, 3], [3, 0], [2], [0, 1, 2, 3]]
    groups = [dist.new_group(ranks) for ranks in lists]
    for ranks, group in zip(lists, groups, strict=True):
        if rank not in ranks:
            assert group == dist.GroupMember.NON_GROUP_MEMBER
            assert (dist.get_rank(group), dist.get_world_size(group)) == (-1, -1)
            continue
        members = sorted(ranks)
        assert dist.get_process_group_ranks(group) == members
        assert dist.get_rank(group) == members.index(rank) == dist.get_group_rank(group, rank)
        assert dist.get_global_rank(group, members.index(rank)) == rank
        expect_sum(group, ranks)
    expect_sum(None, range(4))
    assert [group.group_name for group in groups if not isinstance(group, int)] == [
        str(number) for number, ranks in enumerate(lists, 1) if rank in ranks
    ]


@transports
def test_each_group_has_its_members_its_numbers_and_its_own_data(transport: str) -> None:
    run_ranks(use_overlapping_groups, 4, **placed(transport, 4))


def make_groups_as_members_only() -> None:
    """No rank calls for groups that it is not in, and each makes its groups in another number."""
    rank = dist.get_rank()
    if rank < 2:
        mine = dist.new_group([0, 1])
        expect_sum(mine, [0, 1])
    if rank > 0:
        theirs = dist.new_group([1, 2])
        expect_sum(theirs, [1, 2])


@transports
def test_a_group_takes_its_members_only(transport: str) -> None:
    run_ranks(make_groups_as_members_only, 3, **placed(transport, 3))


def keep_the_order_of_the_ranks() -> None:
    rank = dist.get_rank()
    group = dist.new_group([2, 0, 1], sort_ranks=False)
    assert not isinstance(group, int)
    assert dist.get_process_group_ranks(group) == [2, 0, 1]
    assert group.rank() == [1, 2, 0][rank]
    outputs = [np.zeros(1, np.int64) for _ in range(3)]
    dist.all_gather(outputs, np.array([rank]), group=group)
    assert [int(output[0]) for output in outputs] == [2, 0, 1]
    array = np.array([rank])
    dist.broadcast(array, src=2, group=group)
    assert array[0] == 2
    dist.broadcast(array, group_src=1, group=group)
    if rank == 2:
        dist.send(np.array([7.0]), 0, group=group)
    if rank == 0:
        received = np.zeros(1)
        assert dist.recv(received, group=group) == 2
        assert received[0] == 7


@transports
def test_unsorted_ranks_are_the_group_order(transport: str) -> None:
    run_ranks(keep_the_order_of_the_ranks, 3, **placed(transport, 3))


def receive_in_a_group() -> None:
    rank = dist.get_rank()
    group = dist.new_group([1, 2])
    if rank == 2:
        for tag in range(4):
            dist.send(np.ones(1), 1, group=group, tag=tag)
    if rank == 1:
        from_one, from_any = dist.irecv(np.zeros(1), 2, group, tag=0), dist.irecv(np.zeros(1), group=group, tag=1)
        for work in (from_one, from_any):
            work.wait()
        assert (from_one.source_rank(), from_any.source_rank()) == (2, 2)
        assert dist.recv(np.zeros(1), 2, group, tag=2) == dist.recv(np.zeros(1), group=group, tag=3) == 2


@transports
def test_a_receive_in_a_group_names_its_sender_by_the_global_rank(transport: str) -> None:
    run_ranks(receive_in_a_group, 3, **placed(transport, 3))


CALLS_WITHOUT_ROOT: dict[str, Callable[[Any], object]] = {
    "broadcast_object_list": lambda group: dist.broadcast_object_list(["object"], group=group),
    "gather": lambda group: dist.gather(np.ones(1), group=group),
    "scatter": lambda group: dist.scatter(np.ones(1), group=group),
    "gather_object": lambda group: dist.gather_object("object", group=group),
    "scatter_object_list": lambda group: dist.scatter_object_list([None], group=group),
    "functional.broadcast": lambda group: functional.broadcast(np.ones(1), group=group),
}


@pytest.mark.parametrize("call", CALLS_WITHOUT_ROOT)
def test_a_group_without_global_rank_0_has_no_default_root(call: str) -> None:
    def make_the_call() -> None:
        group = dist.new_group([1, 2])
        if dist.get_rank() > 0:
            with pytest.raises(ValueError, match="Global rank 0 is not part of group"):
                CALLS_WITHOUT_ROOT[call](group)

    run_ranks(make_the_call, 3)


def test_the_default_root_is_global_rank_0_wherever_it_is_in_the_group() -> None:
    def gather() -> list[str] | None:
        group = dist.new_group([2, 0, 1], sort_ranks=False)
        rank = dist.get_rank()
        gathered = [""] * 3 if rank == 0 else None
        dist.gather_object(f"of rank {rank}", gathered, group=group)
        return gathered

    assert run_ranks(gather, 3) == [["of rank 2", "of rank 0", "of rank 1"], None, None]


def make_the_same_group_again() -> None:
    groups = [dist.new_group([0, 1]) for _ in range(3)]
    rank = dist.get_rank()
    arrays = [np.full(3, rank + number) for number in range(3)]
    # The same members in the same order, but calls of one group never meet those of another.
    order = (0, 1, 2) if rank == 0 else (2, 1, 0)
    issued: list[Any] = [dist.all_reduce(arrays[one], group=groups[one], async_op=True) for one in order]  # type: ignore[arg-type]
    for work in issued:
        work.wait()
    assert [int(array[0]) for array in arrays] == [1, 3, 5]


@transports
def test_groups_of_the_same_ranks_are_different_groups(transport: str) -> None:
    run_ranks(make_the_same_group_again, 2, **placed(transport, 2))


def describe_groups() -> None:
    world = dist.group.WORLD
    group = dist.new_group(None, timeout=7, group_desc="all of us", backend="procgroup")
    assert not isinstance(group, int)
    assert (group.timeout, group.group_desc, dist.get_backend(group)) == (
        timedelta(seconds=7),
        "all of us",
        "procgroup",
    )
    assert dist.get_backend() == "gloo"
    plain = dist.new_group()
    assert not isinstance(plain, int)
    assert (plain.timeout, plain.name(), plain.backend_config) == (world.timeout, "gloo", world.backend_config)
    assert plain.transport == world.transport
    hashed = dist.new_group([0, 1], use_local_synchronization=True)
    assert not isinstance(hashed, int) and len(hashed.group_name) == 40
    alone = dist.new_group([1], use_local_synchronization=True)
    assert (alone == dist.GroupMember.NON_GROUP_MEMBER) == (dist.get_rank() == 0)
    assert not isinstance(plain.store, int)
    plain.store.set(f"from {dist.get_rank()}", "x")
    assert plain.store.get(f"from {1 - dist.get_rank()}", timeout=20) == b"x"


@transports
def test_a_group_takes_what_it_is_not_told_from_the_default_group(transport: str) -> None:
    run_ranks(describe_groups, 2, **placed(transport, 2))


def refuse_wrong_lists() -> None:
    for ranks, match in (
        ([0, 0], "must not contain duplicate entries"),
        ([0, 5], r"Rank 5 is out of range. Valid ranks are 0 to 1 \(world_size=2\)"),
        ([-1], "out of range"),
        ([0, 1, 2], r"should be at most 2, got 3 ranks: \[0, 1, 2\]"),
        ([], "at least one rank"),
    ):
        with pytest.raises(ValueError, match=match):
            dist.new_group(ranks)
    with pytest.raises(TypeError):
        dist.new_group([0.5])  # type: ignore[list-item]
    with pytest.raises(ValueError, match="Unknown backend"):
        dist.new_group([0], backend="pigeons")
    with pytest.raises(TypeError):
        dist.new_group([0], timeout="long")  # type: ignore[arg-type]
    for size, match in (
        (0, "must be positive"),
        (3, r"must not exceed the size of the group \(2\)"),
        (None, "pass in 'group_size'"),
    ):
        with pytest.raises(ValueError, match=match):
            dist.new_subgroups(size)
    with pytest.raises(ValueError, match="this rank is not in `group`"):
        dist.new_subgroups(1, dist.GroupMember.NON_GROUP_MEMBER)
    with pytest.raises(ValueError, match="cannot be empty"):
        dist.new_subgroups_by_enumeration([])
    with pytest.raises(ValueError, match=r"Rank 0 has appeared in both subgroup \[0\] and \[0\]"):
        dist.new_subgroups_by_enumeration([[0], [0]])
    for lists, match in (
        (None, "cannot be None or empty"),
        ([[]], "cannot be empty"),
        ([[0, 0]], "duplicate"),
        ([[0, 1, 2]], "at most 2 ranks"),
        ([[2]], "out of range"),
        ([[0], [0, 1]], "both split"),
    ):
        with pytest.raises(ValueError, match=match):
            dist.split_group(split_ranks=lists)
    with pytest.raises(ValueError, match="is not registered: expected a ProcessGroup"):
        dist.split_group(dist.GroupMember.NON_GROUP_MEMBER, [[0]])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="Backend mismatch"):
        dist.split_group(split_ranks=[[0]], backend="procgroup")
    expect_sum(dist.new_group([0, 1]), [0, 1])  # nothing was left half done


def test_wrong_lists_are_refused_before_anybody_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr("procgroup.api.groups.visible_gpus", lambda: 0)
    run_ranks(refuse_wrong_lists, 2)


def cut_into_subgroups() -> None:
    rank = dist.get_rank()
    mine, every = dist.new_subgroups(2)
    assert [isinstance(group, int) for group in every] == [rank > 1, rank < 2]
    expect_sum(mine, [0, 1] if rank < 2 else [2, 3])
    mine, every = dist.new_subgroups_by_enumeration([[0, 2], [3]])
    assert (mine is None) == (rank == 1)
    assert len(every) == 2
    if mine is not None:
        expect_sum(mine, [0, 2] if rank != 3 else [3])
    turned = dist.new_group([3, 2, 1, 0], sort_ranks=False)
    half = dist.split_group(turned, [[3, 0], [2]])  # type: ignore[arg-type]
    if rank in (0, 3):
        assert dist.get_process_group_ranks(half) == [3, 0]
        assert half is not None and len(half.group_name) == 40 and ":split:" in half.group_desc
        expect_sum(half, [0, 3])
        assert dist.split_group(half, [[1]]) is None or rank == 0
    else:
        assert half is None or dist.get_process_group_ranks(half) == [1]


@transports
def test_groups_are_cut_into_groups(transport: str) -> None:
    run_ranks(cut_into_subgroups, 4, **placed(transport, 4))


def make_groups_alone() -> None:
    group = dist.new_group([0])
    assert dist.get_process_group_ranks(group) == [0]  # type: ignore[arg-type]
    expect_sum(group, [0])
    mine, every = dist.new_subgroups(1)
    assert every == [mine]
    split = dist.split_group(mine, [[0]])  # type: ignore[arg-type]
    assert split is not None and split.transport == "shared memory"
    dist.destroy_process_group(split)
    expect_sum(mine, [0])


def make_a_group_behind_many_messages(rank: int, size: int) -> None:
    dist.init_process_group(timeout=20)
    part, into = np.ones(2048), np.empty(2048)
    works: list[Any] = [dist.isend(part, 1) for _ in range(6000)] if rank == 0 else []
    dist.new_group([0, 1])
    for work in works:
        work.wait()
    for _ in range(6000 * rank):
        dist.recv(into, 0)


@transports
def test_a_group_is_made_when_more_messages_than_are_kept_come_before(transport: str) -> None:
    run(make_a_group_behind_many_messages, 2, environment={"PROCGROUP_TRANSPORT": transport})


def test_a_world_of_one_has_groups_too() -> None:
    run_ranks(make_groups_alone, 1)


def test_groups_need_a_default_group() -> None:
    for make in (dist.new_group, lambda: dist.split_group(split_ranks=[[0]])):
        with pytest.raises(ValueError, match="Default process group has not been initialized"):
            make()
