"""The order of the indices in an epoch of a DistributedSampler: sequential, shuffled, weighted or of another sampler.

The order depends on the seed and the epoch only, so it is the same on every rank.
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
    """A source of indices of known length. ``is_shuffled``: whether the order differs between epochs."""

    is_shuffled: bool

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of indices of an epoch on all ranks together."""

    @abstractmethod
    def indices(self, epoch: int) -> Indices:
        """Return the indices of an epoch."""

    def digest(self, indices: Indices) -> str | None:
        """Return a hash of the indices; None if length and seed determine them, or if they cannot be hashed."""
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
        """``draws`` is the number of indices in an epoch, by default the number of weights."""
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
        """Raise ValueError unless there are ``length`` weights and ``shuffle`` is true."""
        if len(self._weights) != length:
            raise ValueError(f"expected one weight per index, {length}; got {len(self._weights)} `weights`")
        if not shuffle:
            raise ValueError("`weights` make a random order; leave out shuffle=False")

    def __len__(self) -> int:
        return self._draws

    def indices(self, epoch: int) -> Indices:
        # RandomState is the generator whose results NumPy guarantees to be the same in all versions.
        random = np.random.RandomState(_as_32_bits(self._seed + epoch))
        if self._replacement:
            sums = np.cumsum(self._weights)
            drawn = np.searchsorted(sums, random.random_sample(self._draws) * sums[-1], side="right")
            return np.minimum(drawn, np.flatnonzero(self._weights)[-1])
        # Efraimidis and Spirakis, "Weighted random sampling with a reservoir", 2006: sort by exponential waiting times.
        waits = -np.log1p(-random.random_sample(len(self._weights)))
        with np.errstate(divide="ignore", invalid="ignore"):
            waits = np.where(self._weights > 0, waits / self._weights, np.inf)
        return np.argsort(waits, kind="stable")[: self._draws]


class SamplerOrder(Order):
    """The indices of another sampler, in its order or, with ``shuffle``, shuffled once more.

    For each epoch PyTorch's samplers get a ``generator`` with the epoch's seed, and ``set_epoch`` is called if the
    sampler has it.
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
        set_epoch(self._sampler, epoch)
        with seeded(self._sampler, self._seed + epoch):
            found = list(self._sampler)
        return [found[index] for index in _permutation(len(found), self._seed + epoch)] if self._shuffle else found


def order_of(dataset: Any, seed: int, shuffle: bool, weighted: WeightedOrder | None) -> Order | None:
    """Return the order of a dataset or of another sampler; None for a stream without a length.

    Raises ValueError unless ``weighted`` has one weight per index of a dataset, and for a stream with ``shuffle``.
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
    """Return whether to sample indices of ``dataset``, and not the values that it yields."""
    return hasattr(dataset, "__getitem__") or not hasattr(dataset, "__iter__")


def set_epoch(sampler: Any, epoch: int) -> None:
    """Call the sampler's ``set_epoch`` if it has one."""
    if hasattr(sampler, "set_epoch"):
        sampler.set_epoch(epoch)


def digest_of(indices: Indices) -> str | None:
    """Return a hash of indices or keys; None for values other than numbers, strings and lists of these."""
    if isinstance(indices, np.ndarray):
        indices = indices.tolist()
    try:
        text = json.dumps(indices, default=operator.index)
    except (TypeError, ValueError):
        return None
    return blake2b(text.encode(), digest_size=8).hexdigest()


@contextmanager
def seeded(sampler: Any, seed: int) -> Iterator[None]:
    """Replace the generator of PyTorch's samplers, also of a wrapped one, by one with this seed within a block."""
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
    """Return the sampler of PyTorch with a generator: this one, or one that it wraps."""
    torch = sys.modules.get("torch")
    while torch is not None and isinstance(sampler, torch.utils.data.Sampler):
        if hasattr(sampler, "generator") and isinstance(sampler.generator, (torch.Generator, type(None))):
            return sampler
        sampler = getattr(sampler, "sampler", None)  # the sampler of a BatchSampler
    return None


def _permutation(count: int, seed: int) -> Any:
    indices = np.empty(count, np.int64)
    _native.random_permutation(indices, _as_32_bits(seed))
    return indices


def _as_32_bits(seed: int) -> int:
    """Return the bits of a seed that PyTorch's CPU generator uses."""
    return seed & 0xFFFFFFFF
