"""Everything that a program does alone works alone: a world of 1 needs no network."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial

import ml_dtypes
import numpy as np
import pytest
from operation_table import COLLECTIVES, Part

import procgroup as dist
from oracle import is_defined
from procgroup.testing import run_ranks
from procgroup.testing.backend_cases import LOGICAL


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
    assert (world.transport, world.members, world.timeout) == ("shared memory", (0,), timedelta(minutes=30))


@pytest.mark.parametrize("op", [op for op in dist.ReduceOp if op.name != "PREMUL_SUM"])
def test_a_reduction_over_one_rank_changes_nothing_but_to_truth_values(op: dist.ReduceOp) -> None:
    values = np.arange(5, dtype=np.int32 if is_defined(op.name, "int32") else np.float32)
    expected = values != 0 if op.name in LOGICAL else values.copy()
    for reduce in (dist.all_reduce, dist.scan, lambda values, op: dist.reduce(values, 0, op)):
        values = np.arange(5, dtype=values.dtype)
        assert reduce(values, op) is None
        assert (values == expected).all()
    scattered = np.zeros(5, values.dtype)
    dist.reduce_scatter(scattered, [np.arange(5, dtype=values.dtype)], op)
    assert (scattered == expected).all()


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
    work = dist.all_reduce(values, async_op=True)
    work.wait()
    assert work.result()[0] is values


MESSAGES_TO_ONESELF: dict[str, tuple[Callable[[], object], str]] = {
    "send": (lambda: dist.send(np.ones(2), 0), "destination"),
    "isend": (lambda: dist.isend(np.ones(2), 0), "destination"),
    "recv": (lambda: dist.recv(np.ones(2), 0), "source"),
    "irecv": (lambda: dist.irecv(np.ones(2), 0), "source"),
    "recv by group rank": (lambda: dist.recv(np.ones(2), group_src=0), "source"),
    "batch of isend": (lambda: dist.batch_isend_irecv([dist.P2POp(dist.isend, np.ones(1), 0)]), "destination"),
    "batch of both": (
        lambda: dist.batch_isend_irecv(
            [dist.P2POp(dist.irecv, np.ones(1), 0), dist.P2POp(dist.isend, np.ones(1), group_peer=0)]
        ),
        "source",
    ),
    "send_object_list": (lambda: dist.send_object_list([1], 0), "destination"),
    "recv_object_list": (lambda: dist.recv_object_list([None], 0), "source"),
    "recv in a subgroup": (lambda: dist.recv(np.ones(2), 0, group=dist.new_group([0])), "source"),
    "isend in a subgroup": (lambda: dist.isend(np.ones(2), 0, group=dist.new_group([0])), "destination"),
}
RECEIVES_FROM_ANY: dict[str, Callable[[], object]] = {
    "recv": lambda: dist.recv(np.ones(2)),
    "irecv": lambda: dist.irecv(np.ones(2)),
    "recv_object_list": lambda: dist.recv_object_list([None]),
    "recv in a subgroup": lambda: dist.recv(np.ones(2), group=dist.new_group([0])),
}


@pytest.mark.parametrize("case", MESSAGES_TO_ONESELF)
def test_a_message_to_oneself_is_refused_at_once_as_among_several_ranks(case: str) -> None:
    call, side = MESSAGES_TO_ONESELF[case]
    with pytest.raises(ValueError, match=f"Invalid {side} rank: {side} rank should not be the same as the rank of"):
        call()
    dist.barrier()


@pytest.mark.parametrize("case", RECEIVES_FROM_ANY)
def test_a_receive_from_any_rank_is_refused_when_there_is_no_other(case: str) -> None:
    with pytest.raises(ValueError, match=r"group \S+ has one rank, so no other rank could send"):
        RECEIVES_FROM_ANY[case]()
    dist.barrier()


def test_a_subgroup_of_one_in_a_larger_world_refuses_messages_too() -> None:
    def receive() -> None:
        alone = [dist.new_group([rank]) for rank in range(2)][dist.get_rank()]
        with pytest.raises(ValueError, match="Invalid source rank"):
            dist.recv(np.ones(1), dist.get_rank(), group=alone)
        with pytest.raises(ValueError, match="so no other rank could send"):
            dist.recv(np.ones(1), group=alone)
        with pytest.raises(ValueError, match="Invalid source rank"):
            dist.recv(np.ones(1), dist.get_rank())

    run_ranks(receive, 2)


def test_set_timeout_is_shown_by_the_group() -> None:
    dist.group.WORLD.set_timeout(0.05)
    assert dist.group.WORLD.timeout == timedelta(seconds=0.05)


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
    assert dist.group.WORLD.transport == "shared memory"


BAD_ARGUMENTS = {
    "no array": (lambda: dist.all_reduce([1.0]), TypeError, "Expected parameter `tensor`"),
    "repeated": (
        lambda: dist.all_reduce(np.lib.stride_tricks.as_strided(np.ones(1), (4,), (0,))),
        ValueError,
        "in one place",
    ),
    "op by name": (lambda: dist.all_reduce(np.ones(1), "sum"), TypeError, "Expected parameter `op`"),
    "op by number": (lambda: dist.all_reduce(np.ones(1), 99), TypeError, "Expected parameter `op`"),
    "average of bools": (
        lambda: dist.all_reduce(np.ones(1, bool), dist.ReduceOp.AVG),
        ValueError,
        "AVG is not defined for bool",
    ),
    "product with factors of integers": (
        lambda: dist.all_reduce(np.ones(1, int), dist.ReduceOp.PREMUL_SUM(2.0)),
        ValueError,
        "PREMUL_SUM is not defined for int64",
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
    "another count": (
        lambda: dist.all_gather([np.ones(2)], np.ones(1)),
        ValueError,
        "holds 2 float64, expected 1 float64",
    ),
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
    calls: dict[str, Callable[[], object]] = {
        name: partial(Part(name, 0, 1).start, dist, group=foreign) for name in COLLECTIVES
    } | {
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
