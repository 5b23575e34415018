"""Everything that a program does alone works alone: a world of 1 needs no network and no native engine."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from datetime import timedelta

import ml_dtypes
import numpy as np
import pytest

import procgroup as dist


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    dist.init_process_group("gloo", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_who_am_i() -> None:
    assert dist.is_initialized()
    assert (dist.get_rank(), dist.get_world_size()) == (0, 1)
    assert dist.get_process_group_ranks(None) == [0]
    assert (dist.get_backend(), dist.get_backend_config()) == ("gloo", "cpu:gloo,cuda:gloo")
    world = dist.group.WORLD
    assert world is dist.GroupMember.WORLD
    assert (world.rank(), world.size(), world.group_name, world.name()) == (0, 1, "0", "gloo")
    assert (world.transport, world.members, world.timeout) == ("loopback", (0,), timedelta(minutes=30))


@pytest.mark.parametrize("op", [op for op in dist.ReduceOp if op.name != "PREMUL_SUM"])
def test_a_reduction_over_one_rank_changes_nothing(op: dist.ReduceOp) -> None:
    dtype = np.int32 if op.name.startswith("B") else np.float32
    values = np.arange(5, dtype=dtype)
    assert dist.all_reduce(values, op) is None
    assert dist.reduce(values, 0, op) is None
    assert (values == np.arange(5)).all()


def test_all_gather_copies_also_bfloat16_zero_dimensional_and_empty_arrays() -> None:
    for source in (np.arange(6.0).reshape(2, 3), np.ones((), ml_dtypes.bfloat16), np.zeros(0, np.int8)):
        target = np.zeros_like(source)
        dist.all_gather([target], source)
        assert (target == source).all()


def test_asynchronous_calls_return_work() -> None:
    values = np.ones(3)
    for work in (
        dist.all_reduce(values, async_op=True),
        dist.broadcast(values, 0, async_op=True),
        dist.reduce(values, 0, async_op=True),
        dist.barrier(async_op=True),
        dist.all_gather([values], values.copy(), async_op=True),
    ):
        assert work.wait() is True
        assert (work.is_completed(), work.is_success(), work.exception()) == (True, True, None)
        assert work.get_future().result(timeout=1) == work.result()
        with pytest.raises(RuntimeError, match="correspond to a recv"):
            work.source_rank()
    assert dist.all_reduce(values, async_op=True).result()[0] is values


def test_a_message_to_oneself_arrives_in_order_and_by_tag() -> None:
    for number in (1, 2, 3):
        dist.isend(np.full(2, number), 0, tag=number % 2).wait()
    target = np.zeros(2, dtype=int)
    received = []
    for tag in (0, 1, 1):
        assert dist.recv(target, 0, tag=tag) == 0
        received.append(int(target[0]))
    assert received == [2, 1, 3]


def test_a_receive_that_is_waiting_is_completed_by_the_send() -> None:
    target = np.zeros(2)
    work = dist.irecv(target)
    future = work.get_future()
    assert not work.is_completed()
    assert not future.done()
    with pytest.raises(RuntimeError, match="recv on group 0 .* is not over yet"):
        work.result()
    with pytest.raises(dist.WaitTimeout, match=r"not complete after waiting 0.05 s. The call goes on"):
        work.wait(0.05)
    dist.isend(np.ones(2), 0)
    assert work.wait(timedelta(seconds=5))
    assert work.source_rank() == 0
    assert (future.result(timeout=1)[0] == 1).all()


def test_a_receive_times_out_names_the_call_and_takes_no_later_message() -> None:
    started = time.monotonic()
    with pytest.raises(dist.CollectiveTimeout, match=r"recv #\d+ on group 0 \(rank 0 of 1\): not complete after 0.1 s"):
        dist.recv(np.zeros(2), timeout=0.1)
    assert time.monotonic() - started < 1
    dist.isend(np.ones(2), 0)
    target = np.zeros(2)
    dist.recv(target)
    assert (target == 1).all()


def test_a_message_of_another_size_fails_the_receive_and_changes_nothing() -> None:
    target = np.zeros(3)
    dist.isend(np.ones(2), 0)
    with pytest.raises(dist.PeerFailed, match="it sent 16 bytes into a receive of 24 bytes"):
        dist.recv(target)
    assert (target == 0).all()


def test_destroying_the_group_ends_a_receive_that_another_thread_waits_in() -> None:
    raised: list[BaseException] = []
    work = dist.irecv(np.zeros(1))

    def wait() -> None:
        try:
            work.wait()
        except dist.DistError as error:
            raised.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    dist.destroy_process_group()
    thread.join(5)
    assert "the group was destroyed" in str(raised[0])


def test_set_timeout_counts_for_later_calls() -> None:
    dist.group.WORLD.set_timeout(0.05)
    assert dist.group.WORLD.timeout == timedelta(seconds=0.05)
    with pytest.raises(dist.CollectiveTimeout, match=r"not complete after 0.05 s"):
        dist.recv(np.zeros(1))


def test_the_groups_store_works() -> None:
    dist.group.WORLD.store.set("key", "value")
    assert dist.group.WORLD.store.get("key") == b"value"


def test_a_world_of_one_opens_no_socket(monkeypatch: pytest.MonkeyPatch) -> None:
    dist.destroy_process_group()

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("the network was used")

    monkeypatch.setattr(socket, "socket", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setenv("MASTER_ADDR", "no.such.host.invalid")
    monkeypatch.setenv("MASTER_PORT", "1")
    dist.init_process_group(rank=0, world_size=1)
    assert dist.group.WORLD.transport == "loopback"


BAD_ARGUMENTS = {
    "no array": (lambda: dist.all_reduce([1.0]), TypeError, "Expected parameter `tensor`"),
    "repeated": (
        lambda: dist.all_reduce(np.lib.stride_tricks.as_strided(np.ones(1), (4,), (0,))),
        ValueError,
        "in one place",
    ),
    "op by name": (lambda: dist.all_reduce(np.ones(1), "sum"), TypeError, "Expected parameter `op`"),
    "op by number": (lambda: dist.all_reduce(np.ones(1), 99), TypeError, "Expected parameter `op`"),
    "average of integers": (
        lambda: dist.all_reduce(np.ones(1, int), dist.ReduceOp.AVG),
        ValueError,
        "AVG is not defined for int64",
    ),
    "bits of floats": (
        lambda: dist.all_reduce(np.ones(1), dist.ReduceOp.BAND),
        ValueError,
        "BAND is not defined for float64",
    ),
    "timeout as text": (lambda: dist.barrier(timeout="x"), TypeError, "expected timeout to be"),
    "timeout as flag": (lambda: dist.barrier(timeout=True), TypeError, "expected timeout to be"),
    "negative timeout": (lambda: dist.barrier(timeout=-1), ValueError, "at least 0 seconds"),
    "no root": (lambda: dist.broadcast(np.ones(1)), ValueError, "Must specify global_rank or group_rank"),
    "no destination": (lambda: dist.reduce(np.ones(1)), ValueError, "Must specify global_rank or group_rank"),
    "two roots": (lambda: dist.broadcast(np.ones(1), 0, group_src=0), ValueError, "Can't specify both"),
    "root outside": (lambda: dist.broadcast(np.ones(1), 5), ValueError, "Global rank 5 is not part of group 0"),
    "group root outside": (lambda: dist.reduce(np.ones(1), group_dst=5), ValueError, "Group rank 5 is not part of"),
    "negative root": (lambda: dist.broadcast(np.ones(1), -1), ValueError, "Global rank -1 is not part of group 0"),
    "root as text": (lambda: dist.broadcast(np.ones(1), "0"), TypeError, "Expected the rank to be an int"),
    "root as float": (lambda: dist.broadcast(np.ones(1), group_src=0.0), TypeError, "group rank to be an int"),
    "send to oneself": (lambda: dist.send(np.ones(1), 0), ValueError, "should not be the same as the rank of"),
    "send outside": (lambda: dist.send(np.ones(1), 7), ValueError, "Global rank 7 is not part of group 0"),
    "receive from outside": (lambda: dist.recv(np.ones(1), 7), ValueError, "Global rank 7 is not part of group 0"),
    "negative tag": (lambda: dist.isend(np.ones(1), 0, tag=-1), ValueError, "`tag` to be between 0 and"),
    "tag as text": (lambda: dist.isend(np.ones(1), 0, tag="a"), TypeError, "`tag` to be an int"),
    "no list": (lambda: dist.all_gather(np.ones(1), np.ones(1)), TypeError, "`tensor_list` to be a list"),
    "list too long": (lambda: dist.all_gather([np.ones(1)] * 2, np.ones(1)), ValueError, "expected length 1.* got 2"),
    "list too short": (lambda: dist.all_gather([], np.ones(1)), ValueError, "expected length 1.* got 0"),
    "another dtype": (lambda: dist.all_gather([np.ones(1, "f4")], np.ones(1)), ValueError, "different dtypes"),
    "another count": (lambda: dist.all_gather([np.ones(2)], np.ones(1)), ValueError, "has 2 elements; expected 1"),
    "devices": (lambda: dist.barrier(device_ids=3), TypeError, r"device_ids type should be List\[int\]"),
    "no group": (lambda: dist.barrier(group=3), ValueError, "Invalid process group specified: 3"),
    "no group to ask": (lambda: dist.get_rank("world"), ValueError, "Invalid process group specified: 'world'"),
    "bad wait": (lambda: dist.barrier(async_op=True).wait("x"), TypeError, "expected timeout to be"),
}


@pytest.mark.parametrize("case", BAD_ARGUMENTS)
def test_a_bad_argument_is_refused_in_words(case: str) -> None:
    call, error, text = BAD_ARGUMENTS[case]
    with pytest.raises(error, match=text):
        call()


def test_a_read_only_target_is_refused() -> None:
    values = np.ones(2)
    values.flags.writeable = False
    for call in (
        lambda: dist.all_reduce(values),
        lambda: dist.all_gather([values], np.ones(2)),
        lambda: dist.recv(values, timeout=0.1),
    ):
        with pytest.raises(ValueError, match="is read-only"):
            call()


def test_the_root_of_a_broadcast_only_reads_its_array() -> None:
    values = np.ones(2)
    values.flags.writeable = False
    dist.broadcast(values, 0)


def test_the_warning_points_at_the_call() -> None:
    with pytest.warns(UserWarning) as warned:
        dist.barrier(dist.GroupMember.NON_GROUP_MEMBER)
        dist.all_reduce(np.ones(1), group=dist.GroupMember.NON_GROUP_MEMBER)
    assert [warning.filename for warning in warned] == [__file__] * 2


def test_a_rank_outside_a_group_is_warned_and_nothing_happens() -> None:
    foreign = dist.GroupMember.NON_GROUP_MEMBER
    values = np.ones(1)
    calls = {
        "all_reduce": lambda: dist.all_reduce(values, group=foreign),
        "reduce": lambda: dist.reduce(values, 0, group=foreign),
        "broadcast": lambda: dist.broadcast(values, 0, group=foreign),
        "all_gather": lambda: dist.all_gather([values], values, group=foreign),
        "barrier": lambda: dist.barrier(foreign),
        "send": lambda: dist.send(values, 0, group=foreign),
        "isend": lambda: dist.isend(values, 0, group=foreign),
        "irecv": lambda: dist.irecv(values, 0, group=foreign),
    }
    for op, call in calls.items():
        with pytest.warns(
            UserWarning, match=f"Running {op} on global rank 0 which does not belong to the given group."
        ):
            assert call() is None
    with pytest.warns(UserWarning, match="Running recv on global rank 0"):
        assert dist.recv(values, 0, group=foreign) == -1
    assert (dist.get_rank(foreign), dist.get_world_size(foreign)) == (-1, -1)
    with pytest.raises(ValueError, match="Invalid process group specified"):
        dist.get_backend(foreign)
    with pytest.raises(ValueError, match="Global rank 0 is not part of group -100"):
        dist.get_group_rank(foreign, 0)
    assert dist.destroy_process_group(foreign) is None
    assert dist.is_initialized()
