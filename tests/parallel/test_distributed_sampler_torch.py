"""DistributedSampler beside PyTorch: its order, its DataLoader and its samplers."""

from __future__ import annotations

import sys
from collections import Counter
from typing import Any

import numpy as np
import pytest

import procgroup as dist
import world
from procgroup import _native
from procgroup.parallel import DistributedSampler
from procgroup.testing import RanksFailed, run_ranks

# torch's DataLoader warns where it has more workers than there are cores.
pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")]
torch = pytest.importorskip("torch")

SEEDS = (0, 1, 2**31, 2**32 + 5, -1, 2**63, 2**64 - 1)


@pytest.mark.parametrize("length", [*range(12), 100, 623, 624, 625, 1797, 99_991])
def test_permutations_are_torchs(length: int) -> None:
    for seed in SEEDS:
        generator = torch.Generator()
        generator.manual_seed(seed)
        ours = list(DistributedSampler(range(length), 1, 0, seed=seed))
        assert ours == torch.randperm(length, generator=generator).tolist(), seed


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("length", [2**32 // 20 - 1, 2**32 // 20])  # torch draws 64 bits from the second on
def test_permutations_are_torchs_also_where_it_draws_more_bits(length: int) -> None:
    generator = torch.Generator()
    generator.manual_seed(5)
    ours = np.empty(length, np.int64)
    _native.random_permutation(ours, 5)
    assert np.array_equal(ours, torch.randperm(length, generator=generator).numpy())


@pytest.mark.parametrize("size", [1, 2, 3, 8])
def test_every_rank_visits_what_torchs_sampler_gives_it(size: int) -> None:
    for length in (1, 2, 3, 7, 8, 100):
        for rank in range(size):
            for shuffle in (True, False):
                for drop_last in (True, False):
                    arguments = (range(length), size, rank, shuffle, 3, drop_last)
                    ours = DistributedSampler(*arguments)
                    theirs: Any = torch.utils.data.DistributedSampler(*arguments)
                    for epoch in (0, 4):
                        ours.set_epoch(epoch)
                        theirs.set_epoch(epoch)
                        assert list(ours) == list(theirs)
                    for name in ("num_replicas", "rank", "epoch", "drop_last", "num_samples", "total_size", "seed"):
                        assert getattr(ours, name) == getattr(theirs, name), name
                    assert len(ours) == len(theirs) and ours.shuffle == theirs.shuffle


class Squares(torch.utils.data.Dataset):  # type: ignore[misc]
    def __len__(self) -> int:
        return 23

    def __getitem__(self, index: int) -> int:
        return index * index


@pytest.mark.parametrize("workers", [0, 2])
def test_a_data_loader_takes_it_as_its_sampler(workers: int) -> None:
    arguments = {"batch_size": 2, "num_workers": workers, "persistent_workers": workers > 0}
    found: list[list[int]] = [[], []]
    samplers = [DistributedSampler(Squares(), 2, rank) for rank in range(2)]
    loaders = [torch.utils.data.DataLoader(Squares(), sampler=sampler, **arguments) for sampler in samplers]
    for epoch in range(2):
        for sampler in samplers:
            sampler.set_epoch(epoch)
        parts = [[value for batch in loader for value in batch.tolist()] for loader in loaders]
        assert [len(loader) for loader in loaders] == [6, 6]
        assert set(parts[0] + parts[1]) == {index * index for index in range(23)}
        found[epoch] = parts[0]
    assert found[0] != found[1]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_loader_that_reads_ahead_goes_on_where_training_was(workers: int) -> None:
    seen: list[int] = []
    sampler = DistributedSampler(Squares(), 1, 0)
    for batch in torch.utils.data.DataLoader(Squares(), batch_size=3, sampler=sampler, num_workers=workers):
        seen += batch.tolist()
        sampler.advance(len(batch))
        if len(seen) == 9:
            break
    state = sampler.state_dict()
    assert state["position"] == 9
    for rank in range(2):
        rest = DistributedSampler(Squares(), 2, rank, mode="exact")
        rest.load_state_dict(state)
        for batch in torch.utils.data.DataLoader(Squares(), batch_size=4, sampler=rest, num_workers=workers):
            seen += batch.tolist()
    assert sorted(seen) == [index * index for index in range(23)]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_state_that_counts_what_workers_have_drawn_ahead_is_told_once(workers: int) -> None:
    sampler = DistributedSampler(Squares(), 1, 0)
    loader = torch.utils.data.DataLoader(Squares(), batch_size=2, sampler=sampler, num_workers=workers)
    batches = iter(loader)
    next(batches)
    if workers:
        with pytest.warns(UserWarning, match=r"have drawn ahead, and a restart would leave that out\."):
            assert sampler.state_dict()["position"] > 2
    assert workers or sampler.state_dict()["position"] == 2
    sampler.state_dict()
    list(batches)
    assert sampler.state_dict()["position"] == 23
    sampler.set_epoch(1)
    again = iter(loader)
    next(again)
    sampler.advance(2)
    assert sampler.state_dict()["position"] == 2


def samplers_of_torch() -> list[Any]:
    data = torch.utils.data
    return [
        data.RandomSampler(range(20)),
        data.RandomSampler(range(20), replacement=True, num_samples=31),
        data.SubsetRandomSampler([3, 5, 8, 13, 21]),
        data.WeightedRandomSampler([1.0, 0.0, 5.0, 2.0], 40),
        data.BatchSampler(data.RandomSampler(range(20)), 3, drop_last=False),
    ]


@pytest.mark.parametrize("index", range(5))
def test_ranks_agree_on_the_order_of_torchs_random_samplers(index: int) -> None:
    def deal(wrapped: list[Any]) -> list[list[Any]]:
        """Ranks are processes with random numbers of their own: here, what the next thread happens to draw."""
        torch.rand(dist.get_rank() + 1)
        sampler = DistributedSampler(wrapped[dist.get_rank()], mode="exact")
        epochs = []
        for epoch in (0, 1, 0):
            sampler.set_epoch(epoch)
            epochs.append(list(sampler))
        return epochs

    wrapped = [samplers_of_torch()[index] for _ in range(3)]
    first, second, third = (list(parts) for parts in zip(*run_ranks(deal, 3, wrapped), strict=True))
    assert first == third != second
    assert sum(map(len, first)) == len(wrapped[0])
    visited = Counter(str(item) for part in first for item in part)
    if index in (0, 2):
        assert set(visited.values()) == {1}
    assert getattr(wrapped[0], "generator", None) is None  # it was lent one only


def test_a_generator_of_its_own_is_left_as_it_was() -> None:
    generator = torch.Generator()
    inner = torch.utils.data.RandomSampler(range(20), generator=generator)
    before = generator.get_state()
    drawn = list(DistributedSampler(inner, 1, 0))
    assert sorted(drawn) == list(range(20))
    assert inner.generator is generator and torch.equal(before, generator.get_state())


def test_random_orders_that_nobody_can_seed_are_told() -> None:
    class OwnRandom(torch.utils.data.Sampler):  # type: ignore[misc]
        def __init__(self) -> None:
            self.order = np.random.default_rng(dist.get_rank()).permutation(50).tolist()

        def __len__(self) -> int:
            return 50

        def __iter__(self) -> Any:
            return iter(self.order)

    with pytest.raises(RanksFailed, match="the ranks have different data.*50 indices in order"):
        run_ranks(lambda: list(DistributedSampler(OwnRandom())), 2)


WITH_TORCHS_GROUP = """
import torch.distributed as dist
from procgroup.parallel import DistributedSampler
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
sampler = DistributedSampler(range(3))
print(sampler.rank, sampler.num_replicas, sorted(sampler))
dist.destroy_process_group()
"""


def test_without_a_group_of_ours_it_asks_torchs() -> None:
    done = world.run_command([sys.executable, "-W", "ignore", "-c", WITH_TORCHS_GROUP])
    assert done.stdout == "0 1 [0, 1, 2]\n", done.stderr
