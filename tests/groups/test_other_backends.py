"""A backend of another author inherits mismatch errors, deadlines, records, coalescing and group life."""

from __future__ import annotations

import functools
import gc
import os
import signal
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import numpy as np
import pytest
from groups.toy_backend import StoreBackend

import procgroup as dist
from procgroup.api import exit_hooks
from procgroup.api.default_group import current
from procgroup.backends import registry
from procgroup.errors import (
    CollectiveMismatch,
    CollectiveTimeout,
    DistBackendError,
    GroupBroken,
    GroupDestroyed,
    PeerFailed,
    PeerLost,
)
from procgroup.groups.backend import Call
from procgroup.groups.group import ProcessGroup
from procgroup.stores.store import Store
from procgroup.testing import RanksFailed, connected_groups, run_ranks
from waiting import MeetingOfThreads
from world import attempt, run, start

HOSTS = pytest.mark.parametrize("hosts", [None, [0, 0, 1]], ids=["one host", "two hosts"])


class FewCalls(StoreBackend):
    """Sums, and finds the largest float."""

    def __init__(self, store: Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(store, rank, size, timeout)
        self.asked: list[tuple[str, str, str]] = []

    def supports(self, op: str, dtype: str, reduce_op: str) -> bool:
        self.asked.append((op, dtype, reduce_op))
        return op == "all_reduce" and (reduce_op == "SUM" or (reduce_op, dtype) == ("MAX", "float64"))


class Faulty(StoreBackend):
    """Goes wrong on rank 1, in the way that the dtype of the call says."""

    def move(self, call: Call) -> Iterator[int | None]:
        yield
        if self.rank == 1 and call.dtype == "float64":
            raise ValueError("no route to the moon")
        if self.rank == 1 and call.dtype == "int8":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.rank == 1 and call.dtype == "int16":
            raise KeyboardInterrupt
        while call.dtype != "int64":
            yield
        yield from super().move(call)


class Slow(StoreBackend):
    """Takes many steps to receive; refuses to be made in groups of two of three ranks; raises when it is closed."""

    def __init__(self, store: Store, rank: int, size: int, timeout: timedelta) -> None:
        if size == 1:
            raise OSError("out of channels")
        super().__init__(store, rank, size, timeout)

    def move(self, call: Call) -> Iterator[int | None]:
        for _ in range(300 if call.op == "recv" else 0):
            yield
        yield from super().move(call)

    def close(self, failed: bool) -> None:
        raise OSError("closed already")


def register() -> None:
    for name, make in (("toy", StoreBackend), ("few", FewCalls), ("faulty", Faulty), ("slow", Slow)):
        if not registry.is_backend_available(name):
            dist.Backend.register_backend(name, make)


register()


def toy() -> StoreBackend:
    backend = current().backends.get("cpu")
    assert isinstance(backend, StoreBackend)
    return backend


def play() -> list[Any]:
    """Make every call once; return all that this rank has then."""
    rank, size = dist.get_rank(), dist.get_world_size()
    array = np.arange(6, dtype=np.float32) + rank
    kept: list[Any] = []

    def blocks(count: int = 6) -> list[Any]:
        return [np.zeros(count, np.float32) for _ in range(size)]

    for op in (dist.ReduceOp.SUM, dist.ReduceOp.MAX, dist.ReduceOp.AVG, dist.ReduceOp.PRODUCT):
        for call in (dist.all_reduce, dist.scan, dist.exscan):
            kept.append(array.copy())
            call(kept[-1], op)
    kept.append(array.copy()[::-1])  # which is not in memory order
    dist.all_reduce(kept[-1])
    kept.append(array.copy())
    dist.reduce(kept[-1], size - 1)
    kept.append(array.copy())
    dist.broadcast(kept[-1], size - 1)
    kept.append(blocks())
    dist.all_gather(kept[-1], array)
    uneven = [np.zeros(one + 1, np.float32) for one in range(size)]
    dist.all_gather(uneven, np.full(rank + 1, rank, np.float32))
    kept.append(uneven)
    kept.append(blocks() if rank == 0 else None)
    dist.gather(array, kept[-1])
    kept.append(np.zeros(6, np.float32))
    dist.scatter(kept[-1], [array + one for one in range(size)] if rank == 0 else None)
    kept.append(np.zeros(6, np.float32))
    dist.reduce_scatter(kept[-1], [array + one for one in range(size)])
    kept.append(blocks())
    dist.all_to_all(kept[-1], [array + one for one in range(size)])
    kept.append(np.zeros(2 * size, np.float32))
    dist.all_to_all_single(kept[-1], np.arange(2 * size, dtype=np.float32) + rank)
    kept.append([array.copy(), array.copy() * 2])
    dist.barrier()
    works = [dist.all_reduce(one, async_op=True) for one in kept[-1]]
    assert all(work.wait() for work in works)
    assert works[0].get_future().done() or works[0].get_future().result()
    return kept


def same(left: Any, right: Any) -> bool:
    if isinstance(left, list):
        return len(left) == len(right) and all(map(same, left, right))
    return (left is None and right is None) or np.array_equal(left, right)


@pytest.mark.parametrize(("size", "hosts"), [(1, None), (2, None), (3, None), (3, [0, 0, 1])])
def test_every_operation_ends_with_what_the_engine_s_own_transport_gives(size: int, hosts: Any) -> None:
    mine = run_ranks(play, size, hosts=hosts, backend="toy")
    assert all(map(same, mine, run_ranks(play, size, hosts=hosts)))


def receive_another_size_or_dtype(dtype: str, count: int, source: int | None) -> str:
    if dist.get_rank() == 0:
        dist.send(np.ones(3), 1)
        return ""
    received = np.zeros(count, dtype)
    with pytest.raises(CollectiveMismatch, match="send of 3 float64 to rank 1") as raised:
        dist.recv(received, source)
    assert not received.any()
    return str(raised.value)


@pytest.mark.parametrize("source", [0, None])
@pytest.mark.parametrize(("dtype", "count"), [("int64", 3), ("float64", 4)])
def test_a_message_of_another_size_or_dtype_is_refused(dtype: str, count: int, source: int | None) -> None:
    run_ranks(receive_another_size_or_dtype, 2, dtype, count, source, backend="toy")


def receive_from_any() -> None:
    if dist.get_rank() == 0:
        received = np.zeros(2)
        sources = [dist.recv(received) for _ in range(2)]
        assert sorted(sources) == [1, 2]
    else:
        dist.send(np.ones(2), 0)


def test_a_receive_from_any_rank_finds_its_sender() -> None:
    run_ranks(receive_from_any, 3, backend="toy")


def receive_in_another_order() -> None:
    if dist.get_rank() == 0:
        for tag in (0, 1, 2, 3):
            dist.send(np.full(2, float(tag)), 1, tag=tag)
        for number in (1.0, 2.0, 3.0):
            (dist.send if number == 2 else dist.isend)(np.full(2, number), 1)
        dist.barrier()
    else:
        received = np.zeros(2)
        for tag in (3, 2, 1, 0):
            dist.recv(received, 0, tag=tag)
            assert received.tolist() == [tag, tag]
        arrays = [np.zeros(2) for _ in range(3)]
        for work in reversed([dist.irecv(array, 0) for array in arrays]):
            work.wait()
        assert [array[0] for array in arrays] == [1.0, 2.0, 3.0]
        dist.barrier()


@pytest.mark.parametrize("hosts", [[0, 0], [0, 1]])
def test_messages_of_one_tag_keep_their_order_and_those_of_others_do_not_meet(hosts: list[int]) -> None:
    for _ in range(5):
        run_ranks(receive_in_another_order, 2, hosts=hosts, backend="toy")


def reduce_beside_a_pending_receive() -> None:
    received, array = np.zeros(2), np.ones(3)
    work = dist.irecv(received, 1 - dist.get_rank())
    dist.all_reduce(array)
    assert array.tolist() == [2.0, 2.0, 2.0]
    dist.send(np.full(2, 5.0), 1 - dist.get_rank())
    assert work.wait() and received.tolist() == [5.0, 5.0]


@pytest.mark.parametrize("hosts", [[0, 0], [0, 1]])
def test_collectives_and_pending_receives_do_not_meet(hosts: list[int]) -> None:
    run_ranks(reduce_beside_a_pending_receive, 2, hosts=hosts, backend="toy")


def fail_to_send(meeting: MeetingOfThreads) -> None:
    is_sender = dist.get_rank() == 1
    with pytest.raises(GroupBroken if is_sender else PeerFailed, match="no route to the moon"):
        dist.send(np.ones(2), 0) if is_sender else dist.recv(np.ones(2), 1)
    with pytest.raises(GroupBroken):
        dist.barrier()
    meeting.meet()  # the other rank learns of it while this one is there


@pytest.mark.parametrize("hosts", [[0, 0], [0, 1]])
def test_a_message_that_fails_in_the_backend_ends_the_group(hosts: list[int]) -> None:
    run_ranks(fail_to_send, 2, MeetingOfThreads(2), hosts=hosts, backend="faulty")


def leave_while_the_other_receives() -> None:
    if dist.get_rank() == 0:
        dist.send(np.full(2, 4.0), 1)
        dist.destroy_process_group()  # whose backend raises when it is closed
    else:
        received = np.zeros(2)
        dist.recv(received, 0)
        assert received.tolist() == [4.0, 4.0]


def test_a_sender_may_leave_before_its_message_is_received() -> None:
    run_ranks(leave_while_the_other_receives, 2, backend="slow")


def make_a_group_without_a_backend() -> None:
    with pytest.raises(OSError, match="out of channels"):
        dist.new_group([dist.get_rank()], use_local_synchronization=True)
    array = np.ones(2)
    dist.all_reduce(array)
    assert array.tolist() == [2.0, 2.0]


def test_a_backend_that_cannot_be_made_refuses_the_group() -> None:
    run_ranks(make_a_group_without_a_backend, 2, backend="slow")


def refer_to(group: ProcessGroup, operation: str, arguments: tuple[Any, ...]) -> None: ...


def test_a_hook_does_not_keep_its_group_alive() -> None:
    with connected_groups(1, backend="toy") as groups:
        group = groups.pop()
        group.add_hook(functools.partial(refer_to, group))
        reference = weakref.ref(group)
        exit_hooks.leave(group)
        del group
    gc.collect()
    assert reference() is None


def differ(kind: str) -> None:
    rank = dist.get_rank()
    array = np.ones(8 + (kind == "count" and rank), np.float64 if kind == "dtype" and rank else np.float32)
    with pytest.raises(CollectiveMismatch) as raised:
        if kind == "operation" and rank:
            dist.broadcast(array, 0)
        else:
            dist.all_reduce(array, dist.ReduceOp.MAX if kind == "op" and rank else dist.ReduceOp.SUM)
    assert raised.value.calls[0] != raised.value.calls[1]
    assert "another backend" not in str(raised.value), "all ranks use the same one"
    assert array.tolist() == [1.0] * len(array)
    assert next(toy().numbers) == 0, "the backend has seen the call"


@HOSTS
@pytest.mark.parametrize("kind", ["count", "dtype", "op", "operation"])
def test_ranks_that_make_different_calls_are_told_before_the_backend_sees_them(kind: str, hosts: Any) -> None:
    run_ranks(differ, 3, kind, hosts=hosts, backend="toy")


def on_two_backends(rank: int, size: int) -> str:
    register()
    dist.init_process_group("toy" if rank else "gloo")
    with pytest.raises(CollectiveMismatch) as raised:
        dist.all_reduce(np.ones(4))
    return str(raised.value)


def test_ranks_on_different_backends_do_not_exchange_data() -> None:
    for text in run(on_two_backends, 2):
        assert "by another backend" in text


def end_at_the_deadline(missing: tuple[int, ...], is_async: bool, meeting: MeetingOfThreads) -> str:
    """Make a call that cannot end; the rank whose deadline comes first tells the others."""
    meeting.meet()
    if dist.get_rank() in missing:
        meeting.meet()
        return ""
    if dist.get_rank() == 0:
        meeting.wait_for_calls_of(*{1, 2}.difference(missing))
    with pytest.raises((CollectiveTimeout, PeerFailed), match="all_reduce #1") as raised:
        work = dist.all_reduce(np.ones(4, np.float32), async_op=is_async, timeout=0.5 if dist.get_rank() == 0 else 20)
        assert work is not None
        work.wait()
    meeting.meet()
    if isinstance(raised.value, CollectiveTimeout):
        assert raised.value.missing == missing
    return type(raised.value).__name__


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("missing", [(1,), ()], ids=["a rank does not come", "the transfer does not end"])
def test_a_call_that_cannot_end_is_ended_at_the_deadline(missing: tuple[int, ...], is_async: bool) -> None:
    names = run_ranks(end_at_the_deadline, 3, missing, is_async, MeetingOfThreads(3), backend="faulty")
    assert names == ["CollectiveTimeout", "" if missing else "PeerFailed", "PeerFailed"]


def go_wrong(is_async: bool) -> None:
    with pytest.raises(GroupBroken if dist.get_rank() == 1 else PeerFailed) as raised:
        work = dist.all_reduce(np.ones(4), async_op=is_async)
        assert work is not None
        work.wait()
    assert "its backend raised ValueError: no route to the moon" in str(raised.value)
    if dist.get_rank() == 1:
        assert isinstance(raised.value.__cause__, ValueError)
    with pytest.raises(GroupBroken):
        dist.barrier()


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_what_a_backend_raises_reaches_every_rank(is_async: bool, transport: str) -> None:
    run_ranks(go_wrong, 2, is_async, transport=transport, backend="faulty")


def be_interrupted(rank: int, size: int) -> None:
    register()
    dist.init_process_group("faulty")
    with pytest.raises(KeyboardInterrupt if rank == 1 else PeerFailed):
        dist.all_reduce(np.ones(4, np.int16))


def test_ctrl_c_in_a_backend_ends_the_call() -> None:
    run(be_interrupted, 2)


def lose_a_rank(rank: int, size: int, is_async: bool) -> tuple[str, float]:
    register()
    dist.init_process_group("faulty", timeout=30)
    started = time.monotonic()
    with pytest.raises(PeerLost) as raised:
        work = dist.all_reduce(np.ones(4, np.int8), async_op=is_async)
        assert work is not None
        work.wait()
    return str(raised.value), time.monotonic() - started


def lose_the_sender(rank: int, size: int) -> tuple[str, float] | None:
    """The other rank dies while the backend receives its message."""
    register()
    dist.init_process_group("faulty", timeout=30)
    if rank == 1:
        dist.isend(np.ones(4, np.float32), 0)
        signal.pause()
    started = time.monotonic()
    with pytest.raises(PeerLost) as raised:
        dist.recv(np.ones(4, np.float32), 1)
    return str(raised.value), time.monotonic() - started


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_a_sender_that_dies_in_the_backend_is_named(transport: str) -> None:
    with start(lose_the_sender, 2, environment={"PROCGROUP_TRANSPORT": transport}) as world:
        world.wait_for_call(0, "recv")
        world.kill(1)
        text, seconds = world.wait()[0].value
    assert "lost rank 1" in text
    assert seconds < 10


@pytest.mark.parametrize("transport", ["shm", "tcp", "spanning"])
@pytest.mark.parametrize("is_async", [False, True])
def test_a_rank_that_dies_in_the_backend_is_named_on_the_others(is_async: bool, transport: str) -> None:
    outcomes = attempt(lose_a_rank, 3, args=(is_async,), environment={"PROCGROUP_TRANSPORT": transport})
    for rank in (0, 2):
        text, seconds = outcomes[rank].value
        assert "rank 1" in text
        assert seconds < 10


def leave_records() -> list[tuple[str, str]]:
    for _ in range(2):
        dist.all_reduce(np.ones(4, np.int64))
    dist.broadcast(np.ones(3), 1)
    return [(record["call"], record["state"]) for record in current().records()]


def test_calls_are_recorded() -> None:
    for records in run_ranks(leave_records, 2, backend="toy"):
        assert records == [
            ("all_reduce(SUM) of 4 int64 by another backend", "completed"),
            ("all_reduce(SUM) of 4 int64 by another backend", "completed"),
            ("broadcast of 3 float64 by another backend from rank 1", "completed"),
        ]


def coalesce() -> None:
    size = dist.get_world_size()
    arrays = [np.full(length, 1.0) for length in (1, 5, 3)]
    with dist._coalescing_manager(async_ops=True) as manager:
        for array in arrays:
            dist.all_reduce(array)
        assert next(toy().numbers) == 0, "nothing is issued before the end"
    manager.wait()
    assert [array.tolist() for array in arrays] == [[size] * len(array) for array in arrays]
    assert next(toy().numbers) == 2, "the three arrays were one call"


def test_coalesced_reductions_are_one_call_of_the_backend() -> None:
    run_ranks(coalesce, 2, backend="toy")


def live(store: Store | None = None) -> None:
    world = toy()
    pair = dist.new_group([0, 2])
    array = np.ones(2)
    if dist.get_rank() != 1:
        assert pair is not None
        dist.all_reduce(array, group=pair)
        assert array.tolist() == [2.0, 2.0]
        of_pair = pair.backends["cpu"]
        assert isinstance(of_pair, StoreBackend)
        assert (of_pair.rank, of_pair.size) == (dist.get_rank() // 2, 2)
        dist.destroy_process_group(pair)
        assert of_pair.is_closed and not world.is_closed
        with pytest.raises(GroupDestroyed):
            dist.all_reduce(array, group=pair)
    theirs = dist.new_group(backend="gloo")
    assert theirs is not None and theirs.backends == {}
    dist.all_reduce(array, group=theirs)
    dist.barrier()
    dist.destroy_process_group()
    assert world.is_closed


def test_subgroups_have_a_backend_of_their_own_which_is_closed_with_them() -> None:
    run_ranks(live, 3, backend="toy")


def all_reduce_of(dtype: str, op: Any, async_op: bool = False) -> Any:
    return dist.all_reduce(np.ones(2, dtype), op, async_op=async_op)


def coalesce_means() -> None:
    with dist._coalescing_manager():
        all_reduce_of("float64", dist.ReduceOp.AVG)
        all_reduce_of("float64", dist.ReduceOp.AVG)


def exchange() -> None:
    (dist.recv if dist.get_rank() else dist.send)(np.ones(2), 1 - dist.get_rank())


REFUSED: dict[str, tuple[Callable[[], object], str, str]] = {
    "an operation": (lambda: dist.broadcast(np.ones(2), 0), "broadcast of float64 on group 0 (rank ", "Use a group "),
    "a message": (exchange, " of float64 on group 0 (rank ", "Use a group "),
    "a reduce op": (
        lambda: all_reduce_of("float64", dist.ReduceOp.AVG),
        "all_reduce(AVG) of float64 on group 0 (rank ",
        "Use the reduce op SUM, MAX, or a group ",
    ),
    "a dtype": (
        lambda: all_reduce_of("float32", dist.ReduceOp.MAX),
        "all_reduce(MAX) of float32 on group 0 (rank ",
        "Use the reduce op SUM, or the dtype float64, or a group ",
    ),
    "an asynchronous call": (
        lambda: all_reduce_of("int8", dist.ReduceOp.BOR, async_op=True),
        "all_reduce(BOR) of int8 on group 0 (rank ",
        "Use the reduce op SUM, or a group ",
    ),
    "coalesced calls": (coalesce_means, "all_reduce(AVG) of float64 on group 0 (rank ", "Use the reduce op SUM, MAX, "),
}


def ask_for_too_much(make_call: Callable[[], object], call: str, advice: str) -> None:
    with pytest.raises(DistBackendError) as raised:
        make_call()
    assert call in str(raised.value)
    assert "its backend 'few' (FewCalls) does not support this call" in str(raised.value)
    assert advice in str(raised.value) and "a group with the built-in transport: new_group(backend='gloo')" in str(
        raised.value
    )
    assert next(toy().numbers) == 0, "the backend has moved something"
    array = np.ones(2)
    dist.all_reduce(array)  # the group goes on
    assert array.tolist() == [2.0, 2.0]
    assert dist.barrier() is None


@pytest.mark.parametrize("what", REFUSED)
def test_what_a_backend_lacks_is_refused_before_anything_is_sent(what: str) -> None:
    run_ranks(ask_for_too_much, 2, *REFUSED[what], backend="few")


def ask_in_turn() -> list[tuple[str, str, str]]:
    backend = current().backends["cpu"]
    assert isinstance(backend, FewCalls)
    all_reduce_of("int8", dist.ReduceOp.SUM)
    array = np.ones(2, np.float32)
    dist.all_reduce(array, dist.ReduceOp.PREMUL_SUM(2.0))
    assert array.tolist() == [4.0, 4.0]
    with pytest.raises(DistBackendError, match="all_gather of uint8 "):
        dist.all_gather_single(np.zeros(2, np.uint8), np.zeros(1, np.uint8))
    with pytest.raises(DistBackendError, match=r"all_reduce\(LOR\) of int8 "):
        all_reduce_of("int8", dist.ReduceOp.LOR)
    return backend.asked


def test_a_backend_is_asked_for_operation_dtype_and_reduce_op() -> None:
    """What the ranks prepare is prepared already: a PREMUL_SUM is a SUM to it, and LOR a BOR."""
    for asked in run_ranks(ask_in_turn, 2, backend="few"):
        assert asked[:3] == [
            ("all_reduce", "int8", "SUM"),
            ("all_reduce", "float32", "SUM"),
            ("all_gather", "uint8", ""),
        ]
        reduced = [ask for ask in asked[3:] if ask[0] == "all_reduce"]
        assert reduced[0] == ("all_reduce", "int8", "BOR")


def watch() -> list[str]:
    seen: list[str] = []
    lock = threading.Lock()

    def hook(operation: str, arguments: tuple[Any, ...]) -> Any:
        with lock:
            seen.append(operation)
        return lambda error: seen.append(f"{operation} {type(error).__name__}")

    remove = current().add_hook(hook)
    dist.all_reduce(np.ones(2))
    with pytest.raises(TypeError):
        dist.all_reduce("x")  # type: ignore[arg-type]
    remove()
    dist.barrier()
    backend = current().backends.get("cpu")
    assert not isinstance(backend, StoreBackend) or next(backend.numbers) == 1, "the backend has moved the call"
    return seen


@pytest.mark.parametrize("backend", [None, "toy"])
def test_hooks_see_every_call(backend: str | None) -> None:
    for seen in run_ranks(watch, 2, backend=backend):
        assert seen == ["all_reduce", "all_reduce NoneType", "all_reduce", "all_reduce TypeError"]


def test_names_and_devices_of_backends_are_checked() -> None:
    with pytest.raises(ValueError, match="Backend 'gloo' exists already"):
        dist.Backend.register_backend("gloo", StoreBackend)
    with pytest.raises(ValueError, match="Backend 'toy' in 'cpu:gloo,cuda:toy' is for cpu, not cuda"):
        registry.parse("cpu:gloo,cuda:toy")
    with pytest.raises(ValueError, match="`extended_api` to be False"):
        dist.Backend.register_backend("new", StoreBackend, extended_api=True)
    assert str(registry.parse("toy")) == "cpu:toy"
    backends = registry.parse("cpu:toy").make_backends(dist.HashStore(), 0, 1, timedelta(seconds=1))
    assert list(backends) == ["cpu"]


def test_a_rank_that_raises_outside_of_calls_is_named() -> None:
    def leave() -> None:
        if dist.get_rank() == 1:
            raise LookupError("gone fishing")
        dist.all_reduce(np.ones(2))

    with pytest.raises((LookupError, RanksFailed), match="gone fishing"):
        run_ranks(leave, 2, backend="toy")
