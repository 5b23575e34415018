"""Objects between ranks: every call, every kind of object, and what happens when one cannot be moved."""

from __future__ import annotations

import datetime
import re
import threading
import time
from collections import OrderedDict
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from groups.sameness import same

import procgroup as dist
from procgroup.groups import objects
from procgroup.testing import RanksFailed, connected_groups, run_ranks
from world import placed

RANKS = (1, 2, 3, 4, 7)
transports = pytest.mark.parametrize("transport", ["shm", "tcp", "spanning"])


class Point:
    """A user's type; the class itself decides whether it can be pickled and unpickled."""

    def __init__(self, x: int) -> None:
        self.x = x

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Point) and other.x == self.x

    __hash__ = None  # type: ignore[assignment]


class Unpicklable(Point):
    def __reduce__(self) -> Any:
        raise TypeError("this cannot be pickled")


def _refuse(*_: Any) -> Any:
    raise KeyError("this cannot be unpickled")


class Unreadable(Point):
    def __reduce__(self) -> Any:
        return _refuse, (self.x,)


def sample(rank: int) -> dict[str, Any]:
    """An object whose size and make-up differ by rank: nothing, small and packed, large and alone."""
    return {
        "rank": rank,
        "point": Point(rank),
        "many": [np.full(13 + index + rank, rank, np.int16) for index in range(40 * rank)],
        "large": np.arange(rank * 300_007, dtype=np.float32),
        "strided": np.arange(20.0).reshape(4, 5)[:, ::2],
        "empty": np.zeros((0, 3)),
    }


def play_all_calls() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    expected = [sample(each) for each in range(size)]
    root = size - 1

    gathered: list[Any] = [None] * size
    dist.all_gather_object(gathered, sample(rank))
    assert same(gathered, expected)
    assert gathered[rank]["point"] is not sample(rank)["point"]

    shared = [sample(root), "text", None] if rank == root else [None] * 3
    dist.broadcast_object_list(shared, src=root)
    assert same(shared, [sample(root), "text", None])

    gathered = [None] * size
    dist.gather_object(sample(rank), gathered if rank == root else None, dst=root)
    assert same(gathered, expected) if rank == root else gathered == [None] * size

    scattered: list[Any] = [None, "kept"]
    dist.scatter_object_list(scattered, expected if rank == root else None, src=root)
    assert same(scattered, [sample(rank), "kept"])

    if size > 1:
        following, preceding = (rank + 1) % size, (rank - 1) % size
        received: list[Any] = [None] * 2
        if rank % 2 == 0:
            dist.send_object_list([sample(rank), rank], dst=following)
        assert dist.recv_object_list(received, src=preceding) == preceding
        if rank % 2:
            dist.send_object_list([sample(rank), rank], dst=following)
        assert same(received, [sample(preceding), preceding])


@transports
@pytest.mark.parametrize("size", RANKS)
def test_every_call_moves_objects(size: int, transport: str) -> None:
    run_ranks(play_all_calls, size, **placed(transport, size))


def test_objects_are_received_from_any_rank() -> None:
    def receive() -> set[int]:
        if dist.get_rank() != 0:
            dist.send_object_list([dist.get_rank()], dst=0)
            return set()
        sources = set()
        for _ in range(2):
            box: list[Any] = [None]
            source = dist.recv_object_list(box)
            assert box == [source]
            sources.add(source)
        return sources

    assert run_ranks(receive, 3)[0] == {1, 2}


VALUES = [
    None, True, -(2**80), 1.5, 2j, "text", b"bytes", bytearray(b"array"), [1, [2]], (1, (2,)), {"a": {1, 2}},
    frozenset("ab"), range(3), slice(1, None), OrderedDict(a=1), datetime.date(2026, 1, 2), datetime.timedelta(1),
    np.float32(1.5), np.datetime64(3, "s"), np.dtype("<i4"), np.arange(6).reshape(2, 3), np.array(7),
    np.asfortranarray(np.ones((3, 4))), np.zeros((0, 2)), np.ones(3, ">f8"), np.array(["a", "bcd"]),
    np.array([1, 2], "M8[ns]"), np.ones(3, bool), np.ones(3, np.complex64), np.array([1.5, 2], ml_dtypes.bfloat16),
    np.ones(3, ml_dtypes.float8_e4m3fn),
]  # fmt: skip


@pytest.mark.parametrize("safe", [False, True])
def test_plain_data_and_arrays_arrive_as_they_were(safe: bool) -> None:
    def gather() -> list[Any]:
        gathered = [None] * 2
        dist.all_gather_object(gathered, VALUES, safe=safe)
        return gathered

    for received in run_ranks(gather, 2)[0]:
        for value, copy in zip(VALUES, received, strict=True):
            assert same(value, copy), (value, copy)
            assert not isinstance(copy, np.ndarray) or copy.flags.writeable


@pytest.mark.parametrize(
    "value",
    [Point(1), np.array([1, None], object), np.zeros(2, [("a", "f4")]), print, np.ones(2).view(np.matrix)],
    ids=["a class", "objects in an array", "fields", "a function", "a kind of array"],
)
def test_safe_refuses_everything_else(value: Any) -> None:
    def gather() -> None:
        gathered = [None] * 2
        dist.all_gather_object(gathered, value if dist.get_rank() == 1 else "plain")
        with pytest.raises(dist.UnpicklingFailed, match="safe=True refuses it") as caught:
            dist.all_gather_object(gathered, value if dist.get_rank() == 1 else "plain", safe=True)
        assert caught.value.source == 1
        assert str(caught.value).endswith("strings and arrays, or trust the sender with safe=False.")
        dist.all_gather_object(gathered, 5, safe=True)
        assert gathered == [5, 5]

    run_ranks(gather, 2)


def test_a_rank_that_cannot_pickle_is_named_on_all_others_and_raises_its_own_error() -> None:
    calls = {
        "all_gather_object": lambda bad: dist.all_gather_object([None] * 3, bad),
        "broadcast_object_list": lambda bad: dist.broadcast_object_list([bad], src=1),
        "gather_object": lambda bad: dist.gather_object(bad, [None] * 3 if dist.get_rank() == 0 else None),
        "scatter_object_list": lambda bad: dist.scatter_object_list(
            [None], [1, bad, 1] if dist.get_rank() == 1 else None, src=1
        ),
    }

    def fail() -> None:
        mine = Unpicklable(1) if dist.get_rank() == 1 else 1
        for name, call in calls.items():
            if dist.get_rank() == 1:
                with pytest.raises(TypeError, match="this cannot be pickled"):
                    call(mine)
            else:
                text = f"{name} on group 0 .*: rank 1 could not pickle its object: TypeError: this cannot be pickled"
                with pytest.raises(dist.PicklingFailed, match=text) as caught:
                    call(mine)
                assert (caught.value.source, caught.value.rank) == (1, dist.get_rank())
                assert re.search(r"this cannot be pickled \(test_objects\.py:\d+\)\. ", str(caught.value))
        play_all_calls()

    run_ranks(fail, 3)


def test_a_rank_that_cannot_unpickle_names_source_and_type_and_stays_in_step() -> None:
    def fail() -> None:
        gathered: list[Any] = ["old"] * 3
        mine = Unreadable(1) if dist.get_rank() == 2 else 1
        text = rf"rank {dist.get_rank()} of 3\): cannot unpickle the \S*Unreadable of rank 2: KeyError: 'this cannot"
        with pytest.raises(dist.UnpicklingFailed, match=text) as caught:
            dist.all_gather_object(gathered, mine)
        assert (caught.value.source, type(caught.value.__cause__)) == (2, KeyError)
        assert caught.value.kind.endswith("Unreadable")
        assert gathered == ["old"] * 3
        if dist.get_rank() == 2:
            dist.broadcast_object_list([Unreadable(1)], src=2)
        else:
            with pytest.raises(dist.UnpicklingFailed, match="Unreadable of rank 2"):
                dist.broadcast_object_list([None], src=2)
        play_all_calls()

    run_ranks(fail, 3)


def test_a_message_that_cannot_be_pickled_is_refused_on_both_ends() -> None:
    def fail() -> None:
        if dist.get_rank() == 0:
            with pytest.raises(TypeError, match="this cannot be pickled"):
                dist.send_object_list([1, Unpicklable(1)], dst=1)
            dist.send_object_list([1, 2, 3], dst=1)
            dist.send_object_list(["good"], dst=1)
            return
        with pytest.raises(dist.PicklingFailed, match="recv_object_list .*rank 0 could not pickle"):
            dist.recv_object_list([None] * 2, src=0)
        with pytest.raises(dist.CollectiveMismatch, match=r"send_object_list\(3 objects\)"):
            dist.recv_object_list([None] * 2, src=0)
        box: list[Any] = [None]
        dist.recv_object_list(box, src=0)
        assert box == ["good"]

    run_ranks(fail, 2)


@pytest.mark.parametrize(
    "call",
    [
        lambda rank: dist.broadcast_object_list([None] * (1 + rank)),
        lambda rank: dist.broadcast_object_list([None], src=rank),
        lambda rank: dist.gather_object(1, [None] * 2, dst=rank),
        lambda rank: dist.all_gather_object([None] * 2, 1) if rank else dist.broadcast_object_list([None]),
    ],
    ids=["length", "src", "dst", "call"],
)
def test_different_calls_are_a_mismatch_on_every_rank(call: Any) -> None:
    with pytest.raises(RanksFailed) as caught:
        run_ranks(lambda: call(dist.get_rank()), 2)
    assert [type(error) for error in caught.value.errors.values()] == [dist.CollectiveMismatch] * 2


def test_a_timeout_is_for_all_of_a_call() -> None:
    with connected_groups(2) as groups, pytest.raises(dist.CollectiveTimeout) as caught:
        objects.all_gather(groups[0], 1, 0.1, False)
    assert caught.value.missing == (1,)


def test_ctrl_c_while_pickling_ends_the_others() -> None:
    interrupted = threading.Event()

    class Interrupted:
        def __reduce__(self) -> Any:
            interrupted.set()
            raise KeyboardInterrupt

    def gather() -> str:
        began = time.monotonic()
        try:
            dist.all_gather_object([None] * 2, Interrupted() if dist.get_rank() == 1 else 1)
        except KeyboardInterrupt:
            return "interrupted"
        except (dist.PicklingFailed, dist.PeerFailed, dist.PeerLost) as error:
            assert time.monotonic() - began < 25
            return str(error)
        return "nothing"

    first, second = run_ranks(gather, 2)
    assert second == "interrupted"
    assert "rank 1" in first and interrupted.is_set()


def test_arguments_are_checked_before_anything_moves() -> None:
    def check() -> None:
        rank = dist.get_rank()
        with pytest.raises(ValueError, match="`object_list` to have 2 places, one per rank, got 1"):
            dist.all_gather_object([None], 1)
        with pytest.raises(TypeError, match="`object_list` to be a list, got tuple"):
            dist.broadcast_object_list((1,))  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="must be specified on destination"):
            dist.gather_object(1, None, dst=rank)
        with pytest.raises(ValueError, match="must NOT be specified on non-destination"):
            dist.gather_object(1, [None] * 2, dst=1 - rank)
        with pytest.raises(ValueError, match="list of size at least 1"):
            dist.scatter_object_list([], None)
        with pytest.raises(ValueError, match="source rank must provide non-None"):
            dist.scatter_object_list([None], None, src=rank)
        with pytest.raises(ValueError, match="to have 2 objects, one per rank, got 1"):
            dist.scatter_object_list([None], [1], src=rank)
        with pytest.raises(ValueError, match="destination rank should not be the same as the rank of the current"):
            dist.send_object_list([1], dst=rank)
        with pytest.raises(ValueError, match="source rank should not be the same"):
            dist.recv_object_list([1], src=rank)
        with pytest.raises(ValueError, match="Can't specify both"):
            dist.broadcast_object_list([1], src=0, group_src=0)
        with pytest.raises(ValueError, match="Group rank 5 is not part"):
            dist.broadcast_object_list([1], group_src=5)
        play_all_calls()

    run_ranks(check, 2)


def test_a_rank_outside_the_group_is_warned() -> None:
    outside: Any = dist.GroupMember.NON_GROUP_MEMBER
    with pytest.warns(UserWarning, match="all_gather_object"):
        dist.all_gather_object([], 1, group=outside)
    with pytest.warns(UserWarning, match="recv_object_list"):
        assert dist.recv_object_list([1], group=outside) == -1


@pytest.mark.torch
def test_tensors_travel_as_memory() -> None:
    torch = pytest.importorskip("torch")
    tensors = [
        torch.arange(5),
        torch.ones(2, 3, dtype=torch.bfloat16).t(),
        torch.zeros(0, 2),
        torch.tensor(3.0, requires_grad=True),
        torch.nn.Parameter(torch.ones(2)),
        torch.ones(3, dtype=torch.complex64).conj(),
    ]

    def gather() -> list[Any]:
        gathered = [None] * 2
        dist.all_gather_object(gathered, tensors)
        return gathered

    for received in run_ranks(gather, 2)[1]:
        for tensor, copy in zip(tensors, received, strict=True):
            assert torch.equal(tensor.resolve_conj(), copy.resolve_conj())
            assert (type(tensor), tensor.dtype, tensor.requires_grad) == (type(copy), copy.dtype, copy.requires_grad)


@pytest.mark.slow
@pytest.mark.timeout(300)
@transports
def test_more_than_two_gibibytes_arrive(transport: str) -> None:
    count = (1 << 28) + 12_345_678

    def broadcast() -> None:
        box: list[Any] = [np.arange(count)] if dist.get_rank() == 0 else [None]
        dist.broadcast_object_list(box)
        assert box[0].nbytes > 1 << 31 and box[0][-1] == count - 1 and int(box[0][1 << 28]) == 1 << 28

    run_ranks(broadcast, 2, **placed(transport, 2), timeout=280)
