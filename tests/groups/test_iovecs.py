"""Arrays of bytes given as iovecs: broadcast and all_gather, refused arguments, and objects that are sent so."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from groups.sameness import same

import procgroup as dist
from procgroup.api.default_group import SLOT
from procgroup.groups import object_format, receive_pool
from procgroup.groups.calls import GroupCalls, Iovecs
from procgroup.groups.group import ProcessGroup
from procgroup.testing import RanksFailed, connected_groups, run_ranks
from world import placed

transports = pytest.mark.parametrize("transport", ["shm", "tcp", "spanning"])
RANKS = (1, 2, 3, 4, 7)


@pytest.fixture
def small_segments(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Many segments of few bytes: larger than the data beside an announcement, smaller than a slot."""
    monkeypatch.setattr(object_format, "ALLOCATION_BYTES", 100_000)
    return iter(())


def default_group() -> ProcessGroup:
    group = SLOT.get().group
    assert group is not None
    return group


def iovecs_of(rank: int, length: int) -> tuple[Iovecs, Any]:
    """Return an array as five buffers, one of them empty, with gaps, and the same array whole."""
    memory = [bytes([rank + index]) * (length * (index % 3)) for index in range(5)]
    offsets = [index * (2 * length + 64) for index in range(5)]
    whole = np.zeros(offsets[-1] + len(memory[-1]), np.uint8)
    for offset, buffer in zip(offsets, memory, strict=True):
        whole[offset : offset + len(buffer)] = np.frombuffer(buffer, np.uint8)
    return Iovecs([memoryview(buffer) for buffer in memory], offsets, whole.size), whole


def same_bytes(received: Any, iovecs: Iovecs) -> bool:
    pairs = zip(iovecs.offsets, iovecs.buffers, strict=True)
    return all(received[offset : offset + buffer.nbytes].tobytes() == buffer for offset, buffer in pairs)


@pytest.mark.parametrize("length", [0, 1, 1000, 60_000, 1_000_000])
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("transport", ["shm", "tcp", "spanning"])
def test_iovecs_arrive_as_one_array(transport: str, size: int, length: int) -> None:
    def play() -> None:
        group, rank = default_group(), dist.get_rank()
        assert group.takes_iovecs
        for root in range(size):
            iovecs, whole = iovecs_of(root, length)
            received = np.zeros_like(whole)
            if rank == root:
                group.broadcast_iovecs(iovecs, 20.0)
            else:
                group.broadcast(received, root)
                assert same_bytes(received, iovecs)
        outputs = [np.zeros_like(iovecs_of(rank, length + rank)[1]) for rank in range(size)]
        group.all_gather_iovecs(outputs, iovecs_of(rank, length + rank)[0], 20.0)
        assert all(same_bytes(outputs[rank], iovecs_of(rank, length + rank)[0]) for rank in range(size))

    run_ranks(play, size, **placed(transport, size))


@pytest.mark.parametrize(
    ("buffers", "offsets", "nbytes", "error"),
    [
        ([b"ab", b"cd"], [0], 4, ValueError),
        ([b"ab", b"cd"], [0, 1], 4, ValueError),
        ([b"ab", b"cd"], [2, 0], 4, ValueError),
        ([b"ab", b"cd"], [0, 3], 4, ValueError),
        ([b"ab"], [5], 4, ValueError),
        ([b"ab"], [-1], 4, (ValueError, TypeError, RuntimeError)),
        ([np.zeros((4, 4))[:, :2]], [0], 64, (ValueError, BufferError)),
        ([5], [0], 4, TypeError),
    ],
)
def test_iovecs_that_make_no_array_are_refused(buffers: Any, offsets: Any, nbytes: int, error: Any) -> None:
    def play() -> None:
        with pytest.raises(error):
            default_group().broadcast_iovecs(Iovecs(buffers, offsets, nbytes), 5.0)
        dist.barrier()

    run_ranks(play, 2, transport="shm")


def test_outputs_that_do_not_fit_are_refused() -> None:
    def play() -> None:
        iovecs, whole = iovecs_of(0, 1000)
        for outputs in ([whole.copy(), whole[:-1].copy()], [whole.copy().view(np.int8)] * 2, [whole] * 2, [whole]):
            wrong = outputs if dist.get_rank() else outputs[::-1]
            with pytest.raises((ValueError, TypeError)):
                default_group().all_gather_iovecs(wrong, iovecs, 5.0)
        dist.barrier()

    run_ranks(play, 2, transport="shm")


def test_an_ended_group_refuses_iovecs() -> None:
    with connected_groups(2, transport="shm") as groups:
        groups[0].shutdown()
        with pytest.raises(dist.GroupDestroyed):
            groups[0].broadcast_iovecs(iovecs_of(0, 10)[0], 5.0)


def mixture(rank: int) -> dict[str, Any]:
    """Arrays of all sizes around the limits of a segment, some of no bytes, some not contiguous."""
    return {
        "empty": [np.zeros((0, 3)), np.zeros(0, np.int8)],
        "small": [np.full(index, rank, np.uint8) for index in range(200)],
        "limits": [np.full(100_000 + step, rank + 1, np.uint8) for step in (-65, -64, -1, 0, 1, 64)],
        "strided": np.arange(90_000.0).reshape(300, 300)[::2, ::3],
        "fortran": np.asfortranarray(np.arange(30_000).reshape(100, 300)),
        "many": [np.full(30_000, index * (rank + 1), np.int32) for index in range(5 * (rank % 3))],
        "text": "x" * 250_000,
    }


@transports
@pytest.mark.parametrize("size", RANKS)
@pytest.mark.usefixtures("small_segments")
def test_objects_of_many_segments_arrive(size: int, transport: str) -> None:
    def play() -> None:
        rank = dist.get_rank()
        for safe in (False, True):
            gathered: list[Any] = [None] * size
            dist.all_gather_object(gathered, mixture(rank), safe=safe)
            assert same(gathered, [mixture(each) for each in range(size)])
            root = size - 1
            shared = [mixture(root), None, mixture(root + 1)] if rank == root else [None] * 3
            dist.broadcast_object_list(shared, src=root, safe=safe)
            assert same(shared, [mixture(root), None, mixture(root + 1)])
        # Small here and large there: in the header, and in segments.
        gathered = [None] * size
        dist.all_gather_object(gathered, mixture(rank) if rank == 1 else rank)
        assert same(gathered, [mixture(each) if each == 1 else each for each in range(size)])

    run_ranks(play, size, **placed(transport, size), timeout=60)


@pytest.mark.usefixtures("small_segments")
@pytest.mark.parametrize("op", ["all_gather_object", "broadcast_object_list"])
def test_an_interrupt_between_two_segments_ends_the_others(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    method = "all_gather_iovecs" if op == "all_gather_object" else "broadcast_iovecs"
    ordinary = getattr(GroupCalls, method)
    calls: list[int] = []

    def interrupted(group: ProcessGroup, *arguments: Any) -> None:
        if group.rank() == 0 and calls.count(0) == 2:
            raise KeyboardInterrupt
        calls.append(group.rank())
        ordinary(group, *arguments)

    monkeypatch.setattr(GroupCalls, method, interrupted)
    arrays = [np.ones(9_000, np.uint8) for _ in range(100)]

    def play() -> None:
        if op == "all_gather_object":
            dist.all_gather_object([None] * 2, arrays)
        else:
            dist.broadcast_object_list([arrays])

    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        run_ranks(play, 2, transport="shm")
    assert time.monotonic() - began < 10
    monkeypatch.undo()
    run_ranks(play, 2, transport="shm")


def test_a_peer_that_fails_between_two_segments_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    ordinary = GroupCalls.all_gather_iovecs

    def failing(group: ProcessGroup, outputs: Any, iovecs: Iovecs, timeout: float) -> None:
        if group.rank() == 1:
            raise OSError("broken")
        ordinary(group, outputs, iovecs, timeout)

    monkeypatch.setattr(GroupCalls, "all_gather_iovecs", failing)
    with pytest.raises(RanksFailed) as caught:
        run_ranks(lambda: dist.all_gather_object([None] * 2, [np.ones(9_000)] * 3), 2, transport="shm")
    assert isinstance(caught.value.errors[1], OSError)
    assert isinstance(caught.value.errors[0], (dist.PeerFailed, dist.PeerLost))


def test_the_pool_is_cleared_when_a_group_ends_and_received_arrays_stay() -> None:
    receive_pool.clear()

    def play() -> Any:
        gathered: list[Any] = [None] * 2
        for _ in range(2):
            dist.all_gather_object(gathered, [np.full(1 << 20, dist.get_rank(), np.uint8)] * 5)
        return gathered

    received = run_ranks(play, 2, transport="shm")
    assert not receive_pool._free
    assert all((array == rank).all() for gathered in received for rank in range(2) for array in gathered[rank])
