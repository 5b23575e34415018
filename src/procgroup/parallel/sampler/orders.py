"""In which order an epoch visits its indices, the same on every rank: what a DistributedSampler deals out.

An *order* is made anew for each epoch, of the seed and the epoch alone.
"""

from __future__ import annotations

import json
import operator
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import blake2b
from typing import Any, TypeAlias

import numpy as np

from procgroup import _native

Indices: TypeAlias = Any
"""The indices of an epoch: a range, a list or an array of int64."""


class Order(ABC):
    """A source of indices of known length. ``is_shuffled`` says whether each epoch has an order of its own."""

    is_shuffled: bool

    @abstractmethod
    def __len__(self) -> int:
        """Return how many indices an epoch visits on all ranks together."""

    @abstractmethod
    def indices(self, epoch: int) -> Indices:
        """Return the indices of an epoch."""

    def digest(self, indices: Indices) -> str | None:
        """Return a hash of the indices; None where they follow from the length and the seed, or cannot be compared."""
        return digest_of(indices)


class DatasetOrder(Order):
    """All indices of a dataset, shuffled as torch.utils.data.DistributedSampler shuffles them."""

    def __init__(self, dataset: Any, seed: int, shuffle: bool) -> None:
        self._dataset = dataset
        self._seed = seed
        self.is_shuffled = shuffle

    def __len__(self) -> int:
        return len(self._dataset)

    def indices(self, epoch: int) -> Indices:
        return _permutation(len(self), self._seed + epoch) if self.is_shuffled else range(len(self))

    def digest(self, indices: Indices) -> str | None:
        return None


class WeightedOrder(Order):
    """Indices of a dataset drawn at random, index ``i`` with a probability proportional to ``weights[i]``."""

    is_shuffled = True

    def __init__(self, weights: Any, seed: int, draws: int | None, replacement: bool) -> None:
        """``draws`` is how many an epoch has, by default as many as there are weights."""
        self._weights = np.asarray(weights, np.float64)
        self._seed = seed
        self._draws = len(self._weights) if draws is None else draws
        self._replacement = replacement
        self._check_draws()

    def _check_draws(self) -> None:
        weights = self._weights
        if weights.ndim != 1 or not np.isfinite(weights).all() or (weights < 0).any() or not weights.any():
            raise ValueError("expected `weights` to be one finite number of at least 0 per index, not all of them 0")
        if self._draws < 0:
            raise ValueError(f"expected `draws` to be at least 0, got {self._draws}")
        if not self._replacement and self._draws > np.count_nonzero(weights):
            raise ValueError(
                f"cannot draw {self._draws} indices without replacement: {np.count_nonzero(weights)} have a weight "
                f"above 0. Pass fewer `draws`, or replacement=True."
            )

    def check(self, length: int, shuffle: bool) -> None:
        """Raise ValueError unless there is a weight for each of ``length`` indices, and the order may be random."""
        if len(self._weights) != length:
            raise ValueError(f"expected one weight per index, {length}; got {len(self._weights)} `weights`")
        if not shuffle:
            raise ValueError("`weights` make a random order; leave out shuffle=False")

    def __len__(self) -> int:
        return self._draws

    def indices(self, epoch: int) -> Indices:
        # RandomState is the generator whose numbers NumPy promises never to change.
        random = np.random.RandomState(_as_32_bits(self._seed + epoch))
        if self._replacement:
            upto = np.cumsum(self._weights)
            drawn = np.searchsorted(upto, random.random_sample(self._draws) * upto[-1], side="right")
            return np.minimum(drawn, np.flatnonzero(self._weights)[-1])
        # Efraimidis and Spirakis, "Weighted random sampling with a reservoir", 2006: the smallest waiting times.
        waits = -np.log1p(-random.random_sample(len(self._weights)))
        with np.errstate(divide="ignore", invalid="ignore"):
            waits = np.where(self._weights > 0, waits / self._weights, np.inf)
        return np.argsort(waits, kind="stable")[: self._draws]


class SamplerOrder(Order):
    """What another sampler yields, in its order or, with ``shuffle``, shuffled once more.

    The samplers of PyTorch draw from their ``generator``; for each epoch they are lent one that is seeded for it. One
    with a ``set_epoch`` is told the epoch.
    """

    def __init__(self, sampler: Any, seed: int, shuffle: bool) -> None:
        self._sampler = sampler
        self._seed = seed
        self._shuffle = shuffle
        self.is_shuffled: bool = (
            shuffle or hasattr(sampler, "set_epoch") or _torch_generator_holder(sampler) is not None
        )

    def __len__(self) -> int:
        return len(self._sampler)

    def indices(self, epoch: int) -> Indices:
        tell_epoch(self._sampler, epoch)
        with seeded(self._sampler, self._seed + epoch):
            found = list(self._sampler)
        return [found[place] for place in _permutation(len(found), self._seed + epoch)] if self._shuffle else found


def order_of(dataset: Any, seed: int, shuffle: bool, weighted: WeightedOrder | None) -> Order | None:
    """Return the order of what was given to be dealt out; None for a stream, whose length nobody knows.

    Raises ValueError for weights that are not one per index of a dataset, and for what cannot be shuffled.
    """
    if is_dataset(dataset):
        if weighted is None:
            return DatasetOrder(dataset, seed, shuffle)
        weighted.check(len(dataset), shuffle)
        return weighted
    if weighted is not None:
        raise ValueError(f"`weights` are for a dataset; {type(dataset).__name__} has an order of its own.")
    if hasattr(dataset, "__len__"):
        return SamplerOrder(dataset, seed, shuffle)
    if shuffle:
        raise ValueError(f"A {type(dataset).__name__} without a length cannot be shuffled; pass shuffle=False.")
    return None


def is_dataset(dataset: Any) -> bool:
    """Tell whether indices are to be dealt out, rather than what ``dataset`` yields."""
    return hasattr(dataset, "__getitem__") or not hasattr(dataset, "__iter__")


def tell_epoch(sampler: Any, epoch: int) -> None:
    """Pass the epoch on to a sampler that wants to know it."""
    if hasattr(sampler, "set_epoch"):
        sampler.set_epoch(epoch)


def digest_of(indices: Indices) -> str | None:
    """Return a hash of indices or keys; None when they are more than numbers, strings and lists of such."""
    if isinstance(indices, np.ndarray):
        indices = indices.tolist()
    try:
        text = json.dumps(indices, default=operator.index)
    except (TypeError, ValueError):
        return None
    return blake2b(text.encode(), digest_size=8).hexdigest()


@contextmanager
def seeded(sampler: Any, seed: int) -> Iterator[None]:
    """Lend a sampler of PyTorch, or what it wraps, a generator that is seeded by ``seed``; others are left alone."""
    holder = _torch_generator_holder(sampler)
    if holder is None:
        yield
        return
    own = holder.generator
    holder.generator = sys.modules["torch"].Generator()
    holder.generator.manual_seed(seed)
    try:
        yield
    finally:
        holder.generator = own


def _torch_generator_holder(sampler: Any) -> Any | None:
    """Return the sampler of PyTorch that draws from a generator: this one, or one inside of it."""
    torch = sys.modules.get("torch")
    while torch is not None and isinstance(sampler, torch.utils.data.Sampler):
        if hasattr(sampler, "generator") and isinstance(sampler.generator, (torch.Generator, type(None))):
            return sampler
        sampler = getattr(sampler, "sampler", None)  # that of a BatchSampler
    return None


def _permutation(count: int, seed: int) -> Any:
    indices = np.empty(count, np.int64)
    _native.random_permutation(indices, _as_32_bits(seed))
    return indices


def _as_32_bits(seed: int) -> int:
    """Return what PyTorch's CPU generator takes of a seed."""
    return seed & 0xFFFFFFFF
