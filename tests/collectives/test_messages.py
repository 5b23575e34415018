"""Point to point: order per sender and tag, many tags, any source, large messages head to head."""

from __future__ import annotations

from datetime import timedelta
from itertools import permutations, product
from typing import Any

import numpy as np
import pytest
from collectives.backend_programs import HOST, HOST_MESSAGES, MESSAGES, for_arrays
from collectives.contract_cases import DTYPES, SIZES, TRANSPORTS, counts
from collectives.playing import nothing_went_wrong, once, play_programs

import procgroup as dist
from oracle import numpy_dtype
from procgroup.testing import run_ranks
from world import run

transports = pytest.mark.parametrize("transport", TRANSPORTS)


def on(transport: str) -> dict[str, str]:
    return {"PROCGROUP_TRANSPORT": transport}


PROGRAMS = for_arrays(HOST, MESSAGES, HOST_MESSAGES)


def play_all(rank: int, size: int) -> dict[str, str]:
    dist.init_process_group(timeout=20)
    return play_programs(PROGRAMS, rank, size)


@once
def played(transport: str, size: int) -> list[dict[str, str]]:
    return run(play_all, size, timeout=60, environment=on(transport))


@transports
@pytest.mark.parametrize("size", [size for size in SIZES if size > 1])
@pytest.mark.parametrize("name", PROGRAMS)
def test_on_several_ranks(transport: str, size: int, name: str) -> None:
    nothing_went_wrong(name, played(transport, size))


def a_send_has_no_source(rank: int, size: int) -> None:
    dist.init_process_group(timeout=20)
    if rank:
        dist.recv(np.zeros(1), 0)
        return
    work: Any = dist.isend(np.zeros(1), 1)
    with pytest.raises(RuntimeError, match="source"):
        work.source_rank()


@transports
def test_the_work_of_a_send_names_no_source(transport: str) -> None:
    run(a_send_has_no_source, 2, environment=on(transport))


def messages_of_every_length(rank: int, size: int, dtype: str) -> None:
    dist.init_process_group(timeout=20)
    for number, count in enumerate(counts(dtype, size)):
        bits = np.random.default_rng(number).integers(0, 2, count * numpy_dtype(dtype).itemsize, dtype=np.uint8)
        array = bits.view(numpy_dtype(dtype))
        if rank == 0:
            dist.send(array, 1, tag=number)
        else:
            got = np.zeros_like(array)
            assert dist.recv(got, 0, tag=number) == 0
            assert got.tobytes() == array.tobytes(), f"{count} elements"


@transports
@pytest.mark.parametrize("dtype", ["bool", "bfloat16", "float64"])
def test_messages_of_every_length_arrive(transport: str, dtype: str) -> None:
    assert dtype in DTYPES
    run(messages_of_every_length, 2, args=(dtype,), environment=on(transport))


def messages_that_are_lent(rank: int, size: int) -> None:
    dist.init_process_group(timeout=20)
    for count in (1 << 20, (1 << 20) + 3, 3 << 20):  # from 8 MiB on, on one host, they are read in place
        array = np.arange(count) + rank
        got = np.zeros_like(array)
        works = [dist.isend(array, 1 - rank), dist.irecv(got, 1 - rank)] if count % 2 else []
        if not works and rank == 0:
            dist.send(array, 1)
            dist.recv(got, 1)
        elif not works:
            dist.recv(got, 0)
            dist.send(array, 0)
        for work in works:
            assert work is not None
            work.wait()
        assert np.array_equal(got, np.arange(count) + 1 - rank), f"{count} elements"


@transports
def test_messages_that_are_lent_arrive_head_to_head_too(transport: str) -> None:
    run(messages_that_are_lent, 2, environment=on(transport))


ACTIONS = ["isend", "irecv", "isend", "irecv"]


def orders_of_issue(rank: int, size: int) -> None:
    """Every order in which each of two ranks can issue two sends and two receives."""
    dist.init_process_group(timeout=20)
    peer = 1 - rank
    orders = sorted(set(permutations(ACTIONS)))
    for number, pair in enumerate(product(orders, orders)):
        sent = received = 0
        works: list[Any] = []
        arrays = []
        for action in pair[rank]:
            if action == "isend":
                works.append(dist.isend(np.array([number, sent]), peer))
                sent += 1
            else:
                arrays.append(np.zeros(2, np.int64))
                works.append(dist.irecv(arrays[-1], peer))
                received += 1
        for work in works:
            work.wait()
        assert [array.tolist() for array in arrays] == [[number, 0], [number, 1]], pair


@transports
def test_sends_and_receives_complete_in_every_order_of_issue(transport: str) -> None:
    run(orders_of_issue, 2, environment=on(transport))


def send_and_leave(rank: int, size: int, count: int) -> None:
    dist.init_process_group(timeout=20)
    if rank == 0:
        for number in range(3):
            dist.send(np.full(5, number), 1, tag=1)
        dist.isend(np.arange(count), 1)
        if count == 10:
            dist.destroy_process_group()  # else the end of the process leaves in order
        return
    got = np.zeros(count, np.int64)
    dist.recv(got, 0)
    assert (got == np.arange(count)).all()
    for number in range(3):
        dist.recv(got[:5], 0, tag=1)
        assert (got[:5] == number).all()


@transports
@pytest.mark.parametrize("count", [10, 1_000_000, 1_200_000])
def test_a_rank_that_exits_first_delivers_what_it_sent(transport: str, count: int) -> None:
    run(send_and_leave, 2, args=(count,), environment=on(transport))


def ten_thousand(rank: int, size: int) -> None:
    dist.init_process_group(timeout=30)
    count = 10_000
    if rank == 0:
        works: list[Any] = [dist.isend(np.array([number]), 1, tag=number % 7) for number in range(count)]
        arrays = []
    else:
        arrays = [np.zeros(1, np.int64) for _ in range(count)]
        works = [dist.irecv(array, 0, tag=number % 7) for number, array in enumerate(arrays)]
    for work in works:
        work.wait()
    assert all(array[0] == number for number, array in enumerate(arrays))


@transports
def test_ten_thousand_messages_can_be_under_way(transport: str) -> None:
    run(ten_thousand, 2, timeout=50, environment=on(transport))


def receive_behind_a_flood(rank: int, size: int) -> None:
    dist.init_process_group(timeout=40)
    flood = [np.full(2000, number) for number in range(5000)]  # 80 MB, more than is kept for a rank that asks for none
    last = np.zeros(2000, np.int64)
    if rank == 0:
        works: list[Any] = [dist.isend(array, 1, tag=1) for array in flood]
        works.append(dist.isend(flood[7], 1, tag=2))
        for work in works:
            work.wait()
        return
    dist.recv(last, 0, tag=2)
    assert (last == 7).all()
    for array in flood:
        dist.recv(last, 0, tag=1)
        assert (last == array).all()


@transports
def test_a_message_is_received_from_behind_any_number_of_others(transport: str) -> None:
    run(receive_behind_a_flood, 2, timeout=50, environment=on(transport))


def a_receive_that_is_waiting() -> None:
    target = np.zeros(2)
    if dist.get_rank() == 0:
        work = dist.irecv(target)
        assert work is not None
        future = work.get_future()
        assert not work.is_completed()
        assert not future.done()
        with pytest.raises(RuntimeError, match="recv on group 0 .* has not completed"):
            work.result()
        with pytest.raises(dist.WaitTimeout, match=r"not complete after waiting 0.05 s. The call goes on"):
            work.wait(0.05)
    dist.barrier()
    if dist.get_rank() == 1:
        dist.send(np.ones(2), 0)
        return
    assert work.wait(timedelta(seconds=20))
    assert work.source_rank() == 1
    assert (future.result(timeout=20)[0] == 1).all()


def test_the_work_of_a_receive_that_is_waiting_says_so() -> None:
    run_ranks(a_receive_that_is_waiting, 2)
