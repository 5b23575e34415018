"""DistributedSampler: what each rank visits, and that it can go on after a restart with other ranks."""

from __future__ import annotations

import itertools
import json
import os
import pickle
import warnings
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import procgroup as dist
import world
from procgroup.parallel import DistributedSampler
from procgroup.testing import RanksFailed, run_ranks

# What these seeds give, on every machine and with every version of NumPy.
PERMUTATION = [7, 5, 2, 3, 4, 6, 1, 0]
WEIGHTED = [3, 6, 5, 7, 7, 4, 4, 7]

LENGTHS = st.integers(0, 60)
SIZES = st.integers(1, 9)
MODES = st.sampled_from(["pad", "drop", "exact"])


class Stream:
    """Yields indices, again and again, without a length."""

    def __init__(self, items: Any) -> None:
        self.items = items

    def __iter__(self) -> Iterator[Any]:
        return iter(self.items)


class Turned:
    """A sampler with a length, whose order depends on its epoch alone."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[int]:
        return iter([(index + self.epoch) % self.length for index in range(self.length)])


def data_of(kind: str, length: int) -> Any:
    return {"dataset": range(length), "sampler": Turned(length), "stream": Stream(range(length))}[kind]


def interleaved(parts: list[list[Any]]) -> list[Any]:
    """Return what the ranks visit in the order of the positions."""
    rounds = itertools.zip_longest(*parts, fillvalue=None)
    return [index for round_ in rounds for index in round_ if index is not None]


@given(
    length=LENGTHS,
    size=SIZES,
    mode=MODES,
    epoch=st.integers(0, 3),
    kind=st.sampled_from(["dataset", "sampler", "stream"]),
)
@settings(deadline=None)
def test_all_ranks_together_visit_what_the_mode_says(length: int, size: int, mode: str, epoch: int, kind: str) -> None:
    parts = []
    for rank in range(size):
        sampler = DistributedSampler(data_of(kind, length), size, rank, mode=mode)
        sampler.set_epoch(epoch)
        parts.append(list(sampler))
        if kind != "stream":
            assert len(parts[-1]) == sampler.num_samples
    counts = sorted(map(len, parts))
    visits = Counter(index for part in parts for index in part)
    if mode == "exact":
        assert visits == Counter(range(length)) and counts[-1] - counts[0] <= 1
    else:
        assert counts[0] == counts[-1]
    if mode == "pad":
        order = interleaved(parts)
        assert set(order) == set(range(length)) and len(order) < length + size
        assert order[length:] == (order[:length] * size)[: len(order) - length]
    if mode == "drop":
        assert set(visits.values()) <= {1} and length - len(visits) == length % size


@given(
    length=LENGTHS,
    sizes=st.lists(SIZES, min_size=1, max_size=4),
    mode=MODES,
    kind=st.sampled_from(["dataset", "sampler", "stream", "weights"]),
    data=st.data(),
)
@settings(max_examples=200, deadline=None)
def test_restarts_at_other_world_sizes_visit_the_rest_exactly_once(
    length: int, sizes: list[int], mode: str, kind: str, data: st.DataObject
) -> None:
    def make(size: int, rank: int, mode: str) -> DistributedSampler:
        if kind != "weights":
            return DistributedSampler(data_of(kind, length), size, rank, mode=mode)
        return DistributedSampler(range(length + 1), size, rank, mode=mode, weights=np.arange(1, length + 2))

    whole = make(1, 0, "exact")
    whole.set_epoch(2)
    expected = list(whole)
    visited: list[Any] = []
    state = {**make(1, 0, mode).state_dict(), "epoch": 2}
    for size in sizes:
        ranks = [make(size, rank, mode) for rank in range(size)]
        for sampler in ranks:
            sampler.load_state_dict(json.loads(json.dumps(state)))
            sampler.set_epoch(2)  # as a training loop calls it
        iterators = [iter(sampler) for sampler in ranks]
        for _ in range(data.draw(st.integers(0, (len(expected) - len(visited)) // size), label="steps")):
            visited += [next(iterator) for iterator in iterators]
        states = [sampler.state_dict() for sampler in ranks]
        state = states[0]
        assert states == [state] * size and state["position"] == len(visited)
    finishing = make(1, 0, mode)
    finishing.load_state_dict(state)
    assert kind == "stream" or len(finishing) == len(expected) - len(visited)
    assert visited + list(finishing) == expected
    assert finishing.state_dict()["position"] == len(expected)


@pytest.mark.parametrize("kind", ["dataset", "sampler", "stream"])
def test_the_last_round_of_a_resumed_epoch_is_filled_from_the_beginning_of_the_order(kind: str) -> None:
    parts = []
    for rank in range(4):
        sampler = DistributedSampler(data_of(kind, 10), 4, rank, shuffle=False)
        sampler.load_state_dict({**sampler.state_dict(), "position": 4})
        parts.append(list(sampler))
    assert parts == [[4, 8], [5, 9], [6, 0], [7, 1]]


def test_the_next_epoch_begins_at_its_beginning() -> None:
    sampler = DistributedSampler(range(10), 2, 0)
    sampler.load_state_dict({**sampler.state_dict(), "epoch": 3, "position": 6})
    assert sampler.epoch == 3 and len(sampler) == 2 and sampler.num_samples == 5
    assert len(list(sampler)) == 2
    sampler.set_epoch(4)
    assert len(sampler) == 5 and sampler.state_dict()["position"] == 0
    assert len(list(sampler)) == 5 and sampler.state_dict()["position"] == 10


def test_indices_that_were_repeated_do_not_count_as_visited_beyond_the_end() -> None:
    sampler = DistributedSampler(range(10), 4, 0, mode="pad")
    drawn = iter(sampler)
    for _ in range(3):
        next(drawn)
    assert sampler.state_dict()["position"] == 10


def test_a_look_at_the_data_does_not_move_the_place_where_an_epoch_goes_on() -> None:
    sampler = DistributedSampler(range(10), 2, 1, shuffle=False)
    sampler.load_state_dict({**sampler.state_dict(), "position": 4})
    assert next(iter(sampler)) == 5
    assert list(sampler) == [5, 7, 9]


def test_what_a_loader_draws_ahead_does_not_count_once_use_is_told() -> None:
    sampler = DistributedSampler(range(100), 4, 1)
    ahead = iter(sampler)
    for _ in range(12):
        next(ahead)
    assert sampler.state_dict()["position"] == 48
    sampler.advance(8)
    state = sampler.state_dict()
    assert state["position"] == 32
    resumed = DistributedSampler(range(100), 2, 0)
    resumed.load_state_dict(state)
    drawn = iter(resumed)
    next(drawn)
    assert resumed.state_dict()["position"] == 32  # told before: drawn alone is not used
    resumed.advance(1)
    assert resumed.state_dict()["position"] == 34
    with pytest.raises(ValueError, match=r"advance\(1\): expected 0 to 0 samples"):
        resumed.advance(1)
    with pytest.raises(ValueError, match=r"advance\(-1\)"):
        sampler.advance(-1)
    with pytest.raises(ValueError, match=r"advance\(1\): expected 0 to 0"):
        DistributedSampler(range(3), 1, 0).advance(1)


def test_an_epoch_whose_samples_are_all_used_has_ended_also_where_a_rest_was_dropped() -> None:
    sampler = DistributedSampler(range(11), 4, 0, mode="drop")
    assert len(list(sampler)) == 2
    sampler.advance(1)
    assert sampler.state_dict()["position"] == 4
    sampler.advance(1)
    assert sampler.state_dict()["position"] == 11


@pytest.mark.parametrize("kind", ["dataset", "sampler"])
def test_forgetting_set_epoch_is_told_once(kind: str) -> None:
    sampler = DistributedSampler(data_of(kind, 7), 2, 0)
    first = list(sampler)
    with pytest.warns(UserWarning, match=r"epoch 0 again, in the same order: set_epoch was not called\. Call sampler"):
        assert list(sampler) == first
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert list(sampler) == first


def test_no_warning_where_nothing_is_wrong() -> None:
    told = DistributedSampler(range(7), 2, 0)
    for epoch in range(3):
        told.set_epoch(epoch)
        list(told)
    assigned = DistributedSampler(range(7), 2, 0)
    for epoch in range(3):
        assigned.epoch = epoch
        list(assigned)
    in_order = DistributedSampler(range(7), 2, 0, shuffle=False)
    looked_at = DistributedSampler(range(7), 2, 0)
    assert list(in_order) == list(in_order)
    next(iter(looked_at))
    list(looked_at)


def test_a_sampler_keeps_its_order_unless_it_is_to_be_shuffled() -> None:
    kept = DistributedSampler(Turned(20), 1, 0)
    assert not kept.shuffle and list(kept) == list(range(20))
    mixed = DistributedSampler(Turned(20), 1, 0, shuffle=True)
    assert sorted(mixed) == list(range(20)) != list(DistributedSampler(Turned(20), 1, 0, shuffle=True))


def test_keys_of_any_kind_are_dealt_out_too() -> None:
    keys = Stream(["a", ("b", 1), np.int64(3), None, "e"])
    assert list(DistributedSampler(keys, 2, 1, mode="exact")) == [("b", 1), None]
    endless = DistributedSampler(Stream(itertools.count()), 3, 2)
    assert list(itertools.islice(endless, 4)) == [2, 5, 8, 11]
    with pytest.raises(TypeError, match="a Stream without a length has none"):
        len(endless)


def test_weights_decide_how_often_an_index_is_drawn() -> None:
    weights = [0, 1, 3, 0]
    drawn = Counter(
        index
        for rank in range(3)
        for index in DistributedSampler(range(4), 3, rank, weights=weights, draws=30_000, mode="exact")
    )
    assert set(drawn) == {1, 2} and drawn.total() == 30_000
    assert abs(drawn[2] / 30_000 - 0.75) < 0.01
    once = DistributedSampler(range(4), 1, 0, weights=weights, draws=2, replacement=False)
    assert sorted(once) == [1, 2] and once.num_samples == 2
    first, second = (list(DistributedSampler(range(4), 1, 0, weights=weights, draws=99, seed=seed)) for seed in (0, 1))
    assert first != second


def test_weights_may_be_as_small_as_numbers_can_be() -> None:
    assert set(DistributedSampler(range(2), 1, 0, weights=[5e-324, 0.0], draws=50)) == {0}


def test_weights_without_replacement_prefer_the_heavy() -> None:
    weights = np.r_[np.full(50, 10.0), np.full(50, 1.0)]
    heavy = 0
    for seed in range(40):
        sampler = DistributedSampler(range(100), 1, 0, seed=seed, weights=weights, draws=20, replacement=False)
        drawn = list(sampler)
        assert len(set(drawn)) == 20
        heavy += sum(index < 50 for index in drawn)
    assert 0.8 < heavy / 800 < 0.97


def test_permutations_are_the_same_on_every_machine() -> None:
    for seed in (1234, 1234 + (1 << 32), 1234 - (1 << 32)):
        assert list(DistributedSampler(range(8), 1, 0, seed=seed)) == PERMUTATION
    weighted = DistributedSampler(range(8), 1, 0, seed=1234, weights=range(8))
    assert list(weighted) == WEIGHTED


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"num_replicas": 2, "rank": 2}, r"Invalid rank 2, rank should be in the interval \[0, 1\]"),
        ({"num_replicas": 2, "rank": -1}, "Invalid rank -1"),
        ({"num_replicas": 0, "rank": 0}, "Invalid rank 0"),
        ({"mode": "even"}, "expected `mode` to be one of pad, drop, exact, got 'even'"),
        ({"mode": "exact", "drop_last": True}, "drop_last=True means mode 'drop', and mode='exact'"),
        ({"weights": [1.0]}, "expected one weight per index, 5; got 1"),
        ({"weights": [1, 1, 1, 1, -1]}, "at least 0 per index"),
        ({"weights": [1, 1, 1, 1, np.nan]}, "finite"),
        ({"weights": np.zeros(5)}, "not all of them 0"),
        ({"weights": np.ones((5, 1))}, "per index"),
        ({"weights": np.ones(5), "draws": -1}, "expected `draws` to be at least 0, got -1"),
        (
            {"weights": np.ones(5), "draws": 6, "replacement": False},
            "cannot draw 6 indices without replacement: 5 have",
        ),
        ({"weights": np.ones(5), "shuffle": False}, "leave out shuffle=False"),
        ({"draws": 3}, "`draws` and `replacement` are for `weights`"),
        ({"dataset": Turned(5), "weights": np.ones(5)}, "`weights` are for a dataset; Turned has an order of its own"),
        ({"dataset": Stream([1]), "shuffle": True}, "A Stream without a length cannot be shuffled"),
        ({"num_replicas": None, "rank": None}, "Default process group has not been initialized.*num_replicas"),
        ({"num_replicas": 2, "rank": None}, "Default process group has not been initialized"),
    ],
)
def test_what_does_not_fit_is_refused_in_words(arguments: dict[str, Any], text: str) -> None:
    given_arguments = {"dataset": range(5), "num_replicas": 1, "rank": 0, **arguments}
    with pytest.raises(ValueError, match=text):
        DistributedSampler(**given_arguments)


def test_the_state_of_another_sampler_is_refused_in_words() -> None:
    state = DistributedSampler(range(5), 1, 0, seed=1).state_dict()
    with pytest.raises(ValueError, match=r"of another sampler: length 5, here 6, seed 1, here 2\. Make the sampler"):
        DistributedSampler(range(6), 1, 0, seed=2).load_state_dict(state)
    with pytest.raises(ValueError, match="shuffle True, here False"):
        DistributedSampler(range(5), 1, 0, seed=1, shuffle=False).load_state_dict(state)
    with pytest.raises(ValueError, match="not the state of a DistributedSampler: it lacks epoch, order, position"):
        DistributedSampler(range(5), 1, 0).load_state_dict(
            {"length": 5, "seed": 0, "shuffle": True, "counts_by_hand": 0}
        )
    with pytest.raises(ValueError, match="position 9, expected 0 to 5"):
        DistributedSampler(range(5), 1, 0, seed=1).load_state_dict({**state, "position": 9})


def test_a_sampler_that_yields_another_order_after_a_restart_is_refused() -> None:
    orders = iter([[0, 1, 2], [2, 1, 0]])

    class Whim:
        def __len__(self) -> int:
            return 3

        def __iter__(self) -> Iterator[int]:
            return iter(next(orders))

    sampler = DistributedSampler(Whim(), 1, 0)
    next(iter(sampler))
    state = sampler.state_dict()
    sampler.load_state_dict(state)
    with pytest.raises(ValueError, match="Whim yields another order in epoch 0 than when the state was taken"):
        iter(sampler)


def test_an_iterator_can_be_read_once_only() -> None:
    sampler = DistributedSampler(iter([1, 2, 3]), 1, 0)
    assert list(sampler) == [1, 2, 3]
    with pytest.raises(ValueError, match="can be read once only"):
        iter(sampler)


def test_a_copy_in_another_process_is_no_rank() -> None:
    def look() -> None:
        sampler = DistributedSampler(range(10))
        next(iter(sampler))
        copy = pickle.loads(pickle.dumps(sampler))
        copy.set_epoch(1)
        assert copy.rank == dist.get_rank() and len(list(copy)) == 5

    run_ranks(look, 2)


def test_world_and_rank_are_those_of_the_group() -> None:
    def look() -> tuple[list[int], int]:
        group = dist.new_group([0, 2]) if dist.get_rank() != 1 else None
        half = DistributedSampler(range(10), group=group).num_replicas if group else 0
        return list(DistributedSampler(range(7), shuffle=False, mode="exact")), half

    assert run_ranks(look, 3) == [([0, 3, 6], 2), ([1, 4], 0), ([2, 5], 2)]
    with pytest.raises(RanksFailed, match="Pass `group`, or `num_replicas` and `rank`, not both"):
        run_ranks(lambda: DistributedSampler(range(7), 1, 0, group=dist.group.WORLD), 1)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (lambda rank: {"dataset": range(10 + rank)}, "rank . has 1[01] indices from position 0 on, seed 0, shuffled"),
        (lambda rank: {"dataset": range(10), "seed": rank}, "seed [01]"),
        (lambda rank: {"dataset": range(10), "mode": "exact" if rank else "drop"}, "mode (exact|drop)"),
        (lambda rank: {"dataset": Turned(10 + rank)}, "indices in order"),
        (lambda rank: {"dataset": Stream(range(rank, 10 + rank))}, "indices [0-9a-f]{16} from position 0 on"),
        (lambda rank: {"dataset": Stream(range(9 + 2 * rank))}, "has (9|11) indices in all"),
    ],
)
def test_ranks_that_deal_from_different_orders_are_told(arguments: Any, text: str) -> None:
    def read() -> None:
        list(DistributedSampler(range(4)))
        list(DistributedSampler(**arguments(dist.get_rank())))

    with pytest.raises(
        RanksFailed, match=f"DistributedSampler #2 on group.*the ranks have different data.*{text}"
    ) as failed:
        run_ranks(read, 2)
    assert any(isinstance(error, dist.CollectiveMismatch) for error in failed.value.errors.values())


def test_ranks_that_go_on_at_different_positions_are_told() -> None:
    def read() -> None:
        sampler = DistributedSampler(range(10))
        sampler.load_state_dict({**sampler.state_dict(), "position": 4 + 2 * dist.get_rank()})
        list(sampler)

    with pytest.raises(RanksFailed, match="from position [46] on.*from position [46] on"):
        run_ranks(read, 2)


def test_one_rank_may_look_at_its_data_alone_and_all_may_go_on_without_the_group() -> None:
    def read() -> int:
        sampler = DistributedSampler(range(10))
        if dist.get_rank() == 0:
            next(iter(sampler))
            sampler.set_epoch(5)
            list(sampler)
        sampler.set_epoch(0)
        seen = len(list(sampler))
        dist.barrier()
        dist.destroy_process_group()
        sampler.set_epoch(1)
        return seen + len(list(sampler))

    assert run_ranks(read, 2) == [10, 10]


def read_after_the_store_is_gone(rank: int, size: int) -> int:
    dist.init_process_group(timeout=20)
    sampler = DistributedSampler(range(10))
    list(sampler)
    dist.barrier()
    if rank == 0:
        os._exit(0)  # it hosts the store, and leaves without a message
    with pytest.raises(dist.PeerLost):
        dist.barrier()
    sampler.set_epoch(1)
    return len(list(sampler)) + len(list(DistributedSampler(range(4))))


def test_data_can_be_read_without_the_store() -> None:
    outcomes = world.attempt(read_after_the_store_is_gone, 2, timeout=50)
    assert outcomes[1].value == 7, outcomes[1].traceback
