"""Programs that the ranks of any backend play on arrays of its own: messages, groups, coalesced calls, objects.

The name of each says what must come of it. `for_arrays` gives them to a suite, with the arrays of its backend.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

import numpy as np
from groups.test_objects import play_all_calls

import procgroup as dist
from oracle import Array


@dataclass(frozen=True)
class Arrays:
    """How a backend's arrays are made and read, and how much is moved."""

    of: Callable[[Array], Any]
    """Return an array with these elements."""
    apart: Callable[[Array], Any]
    """The same, on a stream of its own where there are streams."""
    elements: Callable[[Any], Array]
    turns: int
    large: int
    """The elements that a rank has for all others together, of messages that are not sent before they are received."""

    def full(self, count: int, value: float) -> Any:
        return self.of(np.full(count, value, np.float64))


HOST = Arrays(np.asarray, np.asarray, lambda array: array, turns=25, large=2 << 20)

Program = Callable[[Arrays, int, int], None]
MESSAGES: dict[str, Program] = {}
HOST_MESSAGES: dict[str, Program] = {}
"""What is promised of arrays in host memory alone."""
OTHERS: dict[str, Program] = {}


def _in(programs: dict[str, Program]) -> Callable[[Program], Program]:
    def register(function: Program) -> Program:
        programs[function.__name__.replace("_", " ")] = function
        return function

    return register


def for_arrays(arrays: Arrays, *kinds: dict[str, Program]) -> dict[str, Callable[[int, int], None]]:
    return {name: partial(function, arrays) for kind in kinds for name, function in kind.items()}


def _wait_for(works: Sequence[Any]) -> None:
    for work in works:
        assert work.wait()


# --- messages ---


@_in(MESSAGES)
def messages_of_one_tag_arrive_in_order_and_tags_do_not_wait_for_each_other(a: Arrays, rank: int, size: int) -> None:
    tags = list(enumerate([0, 1, 7, 1000, (1 << 31) + 5, (1 << 63) - 1]))
    if rank == 0:
        numbers = product(range(a.turns), tags)
        _wait_for([dist.isend(a.full(2, 100 * place + turn), 1, tag=tag) for turn, (place, tag) in numbers])
    elif rank == 1:
        for (place, tag), turn in product(reversed(tags), range(a.turns)):
            received = a.full(2, -1)
            assert dist.recv(received, 0, tag=tag) == 0
            assert (a.elements(received) == 100 * place + turn).all()


@_in(MESSAGES)
def receives_of_one_tag_are_matched_in_the_order_of_their_issue(a: Arrays, rank: int, size: int) -> None:
    if rank == 0:
        for turn in range(2 * a.turns):
            dist.send(a.full(turn, turn), 1)
    elif rank == 1:
        arrays = [a.full(turn, -1) for turn in range(2 * a.turns)]
        _wait_for([dist.irecv(array, 0) for array in arrays][::-1])
        assert all((a.elements(array) == turn).all() for turn, array in enumerate(arrays))


@_in(MESSAGES)
def a_receive_from_any_rank_takes_each_message_once_and_names_its_sender(a: Arrays, rank: int, size: int) -> None:
    if rank:
        for turn in range(2 * a.turns):
            dist.send(a.full(2, 1000 * rank + turn), 0, tag=3)
        return
    half = a.turns * (size - 1)
    received = [a.full(2, -1) for _ in range(2 * half)]
    sources = [dist.recv(array, tag=3) for array in received[:half]]
    works: list[Any] = [dist.irecv(array, tag=3) for array in received[half:]]
    _wait_for(works)
    sources += [work.source_rank() for work in works]
    got = [divmod(int(a.elements(array)[1]), 1000) for array in received]
    assert sources == [source for source, _ in got]
    for source in range(1, size):
        assert [turn for sender, turn in got if sender == source] == list(range(2 * a.turns))


@_in(MESSAGES)
def large_messages_between_all_ranks_pass_each_other(a: Arrays, rank: int, size: int) -> None:
    peers = [peer for peer in range(size) if peer != rank]
    count = a.large // (size - 1) + 3
    sent = {peer: a.full(count, rank * 100 + peer) for peer in peers}
    received = {peer: a.full(count, -1) for peer in peers}
    works = [dist.isend(array, peer, tag=1) for peer, array in sent.items()]
    _wait_for(works + [dist.irecv(array, peer, tag=1) for peer, array in reversed(received.items())])
    assert all((a.elements(array) == peer * 100 + rank).all() for peer, array in received.items())


@_in(MESSAGES)
def batches_go_round_in_rings_whatever_their_order(a: Arrays, rank: int, size: int) -> None:
    after, before = (rank + 1) % size, (rank - 1) % size
    for count, turn in product((0, 1, 100_003), range(2)):
        received = [a.full(count, -1) for _ in range(3)]
        ops = [dist.P2POp(dist.isend, a.full(count, 10 * rank + number), after) for number in range(3)]
        ops += [dist.P2POp(dist.irecv, array, before) for array in received]
        _wait_for(dist.batch_isend_irecv(ops[turn * 3 :] + ops[: turn * 3]))
        assert all((a.elements(array) == 10 * before + number).all() for number, array in enumerate(received))


@_in(MESSAGES)
def messages_and_collectives_do_not_disturb_each_other(a: Arrays, rank: int, size: int) -> None:
    for turn in range(2 * a.turns):
        total, received = a.full(1, 1), a.full(3, -1)
        works = [dist.all_reduce(total, async_op=True), dist.irecv(received, (rank - 1) % size)]
        dist.send(a.full(3, turn), (rank + 1) % size)
        _wait_for(works)
        assert a.elements(total)[0] == size and (a.elements(received) == turn).all()


@_in(HOST_MESSAGES)
def an_array_may_be_changed_as_soon_as_send_returns(a: Arrays, rank: int, size: int) -> None:
    for count, turn in product((10, 5000, 100_000), range(4 * a.turns)):
        array = a.full(count, turn)
        if rank == 0:
            dist.send(array, 1)
            array[:] = -1
        elif rank == 1:
            array[:] = -1
            dist.recv(array, 0)
            assert (array == turn).all(), (count, turn)


@_in(HOST_MESSAGES)
def small_sends_need_no_receive_to_be_waiting(a: Arrays, rank: int, size: int) -> None:
    if rank == 0:
        for turn in range(a.turns):
            dist.send(a.full(16, turn), 1)
    dist.barrier()
    if rank == 1:
        for turn in range(a.turns):
            received = a.full(16, -1)
            dist.recv(received, 0)
            assert (received == turn).all()


# --- groups, coalesced calls, objects ---


@_in(OTHERS)
def overlapping_groups_keep_their_data_apart(a: Arrays, rank: int, size: int) -> None:
    for members in ([0, 1], [1, size - 1, 0], list(range(size))[::-1]):
        members = list(dict.fromkeys(members))
        group: Any = dist.new_group(members, sort_ranks=False)
        if rank not in members:
            assert group == dist.GroupMember.NON_GROUP_MEMBER
            continue
        assert dist.get_rank(group) == members.index(rank)
        for count in (1, 700, 100_000):
            array = a.full(count, rank + 1)
            dist.all_reduce(array, group=group)
            assert (a.elements(array) == sum(members) + len(members)).all()
        outputs = [a.full(1, -1) for _ in members]
        dist.all_gather(outputs, a.full(1, rank), group=group)
        assert [int(a.elements(output)[0]) for output in outputs] == members
        array = a.full(1, rank)
        dist.broadcast(array, src=members[-1], group=group)
        assert a.elements(array)[0] == members[-1]
        if rank == members[0]:
            dist.send(a.full(1, 7), members[-1], group=group)
        elif rank == members[-1]:
            received = a.full(1, 0)
            assert dist.recv(received, group=group) == members[0] and a.elements(received)[0] == 7


@_in(OTHERS)
def async_works_of_several_groups_can_be_waited_for_in_any_order(a: Arrays, rank: int, size: int) -> None:
    groups: list[Any] = [dist.new_group(list(range(size))) for _ in range(3)]
    issued = []
    for number in np.random.default_rng(rank).permutation(3):  # groups come in another order on each rank
        for turn in range(10):
            array = a.apart(np.full(10 ** (turn % 6), rank + number, np.float64))
            issued.append((array, number, dist.all_reduce(array, group=groups[number], async_op=True)))
    for place in np.random.default_rng(rank + 9).permutation(len(issued)):
        array, number, work = issued[place]
        assert work is not None and work.wait()
        assert (a.elements(array) == sum(range(size)) + size * number).all()
    for group in groups:
        dist.destroy_process_group(group)


@_in(OTHERS)
def coalesced_calls_do_what_single_ones_do(a: Arrays, rank: int, size: int) -> None:
    sums = [a.apart(np.full(4 + place, rank + place, np.float64)) for place in range(3)]
    with dist._coalescing_manager():
        for array in sums:
            dist.all_reduce(array)
    assert all((a.elements(array) == sum(range(size)) + size * place).all() for place, array in enumerate(sums))
    gathered = [a.full(2 * size, -1) for _ in range(3)]
    with dist._coalescing_manager(async_ops=True) as manager:
        for output in gathered:
            dist.all_gather_single(output, a.full(2, rank))
    manager.wait()
    assert all((a.elements(output) == np.repeat(np.arange(size), 2)).all() for output in gathered)
    scattered = a.full(2, -1)
    with dist._coalescing_manager():
        dist.reduce_scatter_single(scattered, a.of(np.arange(2.0 * size)))
    assert a.elements(scattered).tolist() == [2.0 * rank * size, (2.0 * rank + 1) * size]


@_in(OTHERS)
def neighbours_on_both_sides_and_a_rank_itself_get_what_is_for_each_side(a: Arrays, rank: int, size: int) -> None:
    """In a pair of ranks one is the neighbour of the other on both sides, and along the second dimension its own."""
    pair: Any = [dist.new_group([first, first + 1]) for first in range(0, size - 1, 2)]
    if rank // 2 == len(pair):
        return
    group, other = pair[rank // 2], rank ^ 1
    for count, async_op in product((1, 700, 100_000), (False, True)):
        inputs = [a.full(count + side, 10 * rank + side) for side in range(4)]
        outputs = [a.full(count + (side ^ 1), -1) for side in range(4)]
        work = dist.neighbor_all_to_all(outputs, inputs, (2, 1), True, group=group, async_op=async_op)
        assert work is None or work.wait()
        for side, (output, source) in enumerate(zip(outputs, (other, other, rank, rank), strict=True)):
            assert a.elements(output).tolist() == [10 * source + (side ^ 1)] * (count + (side ^ 1))


@_in(OTHERS)
def objects_arrive_as_they_were(a: Arrays, rank: int, size: int) -> None:
    play_all_calls()
