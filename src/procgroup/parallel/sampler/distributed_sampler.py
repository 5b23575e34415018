"""DistributedSampler: each rank its own part of the data, in every epoch, also after a restart with other ranks."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, Generic, Protocol, TypeVar, overload

from procgroup.groups.group import ProcessGroup
from procgroup.parallel.sampler.epoch_pass import MODES, Pass, count_dealt, deal, deal_stream, is_read_by_workers
from procgroup.parallel.sampler.orders import WeightedOrder, digest_of, is_dataset, order_of, seeded, tell_epoch
from procgroup.parallel.sampler.rank_agreement import world_of

Index = TypeVar("Index", covariant=True)


class Dataset(Protocol):
    """Something with ``[index]``; a list, an array, a ``torch.utils.data.Dataset``."""

    def __getitem__(self, index: Any, /) -> Any: ...


class DistributedSampler(Generic[Index]):
    """Deals indices out to the ranks: torch.utils.data.DistributedSampler's order, with PyTorch and without it.

    ``dataset`` is something with a length and ``[index]``, whose indices are dealt out; or a sampler or another
    iterable without ``[index]``, and then what it yields is. Where that has no length, this has none either.

    Attributes, as in torch: ``dataset``, ``num_replicas``, ``rank``, ``epoch``, ``shuffle``, ``seed``, ``drop_last``,
    ``num_samples`` (of this rank in a whole epoch), ``total_size`` (of all ranks); and ``mode``.
    """

    @overload
    def __init__(
        self: DistributedSampler[int],
        dataset: Dataset,
        num_replicas: int | None = None,
        rank: int | None = None,
        shuffle: bool | None = None,
        seed: int = 0,
        drop_last: bool = False,
        *,
        mode: str | None = None,
        weights: Any = None,
        draws: int | None = None,
        replacement: bool = True,
        group: ProcessGroup | None = None,
    ) -> None: ...

    @overload
    def __init__(
        self,
        dataset: Iterable[Index],
        num_replicas: int | None = None,
        rank: int | None = None,
        shuffle: bool | None = None,
        seed: int = 0,
        drop_last: bool = False,
        *,
        mode: str | None = None,
        weights: Any = None,
        draws: int | None = None,
        replacement: bool = True,
        group: ProcessGroup | None = None,
    ) -> None: ...

    def __init__(
        self,
        dataset: Any,
        num_replicas: int | None = None,
        rank: int | None = None,
        shuffle: bool | None = None,
        seed: int = 0,
        drop_last: bool = False,
        *,
        mode: str | None = None,
        weights: Any = None,
        draws: int | None = None,
        replacement: bool = True,
        group: ProcessGroup | None = None,
    ) -> None:
        """``num_replicas`` and ``rank`` are those of ``group`` unless given, by default of the default group.

        ``shuffle`` is True for a dataset unless given; the order of a sampler is kept unless it is. ``mode`` says what
        happens to a rest of fewer indices than ranks: "pad" repeats indices from the beginning of the order, "drop"
        leaves the rest out, "exact" gives some ranks one index more than others. With ``weights``, one per index,
        ``draws`` indices, by default as many as there are, are drawn at random.

        Raises ValueError for arguments that do not fit together, and where no world is known.
        """
        self.num_replicas: int
        self.rank: int
        self.num_replicas, self.rank, self._comparison = world_of(num_replicas, rank, group)
        self.dataset: Any = dataset
        self.mode: str = _mode(mode, drop_last)
        self.drop_last: bool = self.mode == "drop"
        self.seed = seed
        self.epoch: int = 0
        self.shuffle: bool = is_dataset(dataset) if shuffle is None else bool(shuffle)
        if weights is None and not (draws is None and replacement):
            raise ValueError("`draws` and `replacement` are for `weights`, which were not given.")
        weighted = None if weights is None else WeightedOrder(weights, seed, draws, replacement)
        self._order = order_of(dataset, seed, self.shuffle, weighted)
        self._pass: Pass | None = None
        self._repeats = 0  # how often this epoch was visited to its end before
        self._resume = _Beginning()
        self._stream_was_read = False
        self._epoch_is_set = True
        self._has_warned = False
        self._counts_by_hand = False
        self._is_read_by_workers = False
        self._has_warned_of_workers = False

    def __iter__(self) -> Iterator[Index]:
        """Begin a pass over the epoch, where a loaded state says or else at its beginning.

        Raises CollectiveMismatch when another rank of the group visits something else in this epoch, ValueError when
        the order is not the one in which the loaded state was counted, or an iterator was used up by an earlier pass.
        """
        self._begin_again()
        self._is_read_by_workers = is_read_by_workers()
        return self._read_stream() if self._order is None else self._deal()

    def __len__(self) -> int:
        """Return how many indices this rank's next pass yields: after a state was loaded, those that are left."""
        return count_dealt(self._length() - self._begin().position, self.rank, self.num_replicas, self.mode)

    @property
    def num_samples(self) -> int:
        return count_dealt(self._length(), self.rank, self.num_replicas, self.mode)

    @property
    def total_size(self) -> int:
        return self._length() if self.mode == "exact" else self.num_samples * self.num_replicas

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next pass, and so its order. A loaded position in this very epoch stays."""
        self.epoch = epoch
        self._epoch_is_set = True

    def advance(self, samples: int) -> None:
        """Tell that this rank has used so many more of the indices that were drawn; call it after each step.

        From then on ``state_dict`` counts these, not what a loader has drawn ahead. Raises ValueError for more
        than was drawn.
        """
        drawn = 0 if self._pass is None else self._pass.drawn - self._pass.used
        if not 0 <= samples <= drawn:
            raise ValueError(
                f"DistributedSampler.advance({samples}): expected 0 to {drawn} samples, which this rank has drawn in "
                f"this pass and not used yet. Count this rank's own samples, once each."
            )
        self._counts_by_hand = True
        if self._pass is not None:
            self._pass.used += samples

    def state_dict(self) -> dict[str, Any]:
        """Return, in plain numbers and strings, how far the ranks have come; it is the same on all that are in step.

        Counts what ``advance`` was told or, where it was never called, what was drawn; warns when that is too much,
        because a loader's workers draw ahead.
        """
        now = self._pass
        if now is None or self._epoch_is_set or now.epoch != self.epoch:
            now = None
        if now is not None and self._is_read_by_workers and not (self._counts_by_hand or now.is_exhausted):
            self._warn_of_workers()
        count = 0 if now is None else now.used if self._counts_by_hand else now.drawn
        return {
            "epoch": self.epoch,
            "position": self._begin().position if now is None else now.position(count),
            "counts_by_hand": self._counts_by_hand,
            "order": self._begin().order if now is None else now.order,
            **self._identity(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where a state was taken, also with another number of ranks: its epoch, and what is left of it.

        Raises ValueError for what is no state, and for the state of another length, seed or kind of order.
        """
        expected = self._identity()
        if missing := sorted({"epoch", "position", "counts_by_hand", "order", *expected} - set(state)):
            raise ValueError(f"This is no state of a DistributedSampler: it has no {', '.join(missing)}.")
        if differing := [name for name, value in expected.items() if state[name] != value]:
            raise ValueError(
                "This state is of another sampler: "
                + ", ".join(f"{name} {state[name]}, here {expected[name]}" for name in differing)
                + ". Make the sampler as the one that gave the state was made."
            )
        length, position = expected["length"], state["position"]
        if position < 0 or (length is not None and position > length):
            raise ValueError(f"This state has position {position}, expected 0 to {length}.")
        self.set_epoch(state["epoch"])
        self._resume = _Beginning(state["epoch"], state["position"], state["order"])
        self._counts_by_hand = state["counts_by_hand"]
        self._pass = None
        self._repeats = 0

    def __getstate__(self) -> dict[str, Any]:
        """A copy in another process is no rank of the group."""
        return {**self.__dict__, "_comparison": None, "_pass": None}

    def _identity(self) -> dict[str, Any]:
        """Return what two samplers have in common that visit the same indices in the same order."""
        length = None if self._order is None else len(self._order)
        return {"length": length, "seed": self.seed, "shuffle": self.shuffle}

    def _length(self) -> int:
        if self._order is None:
            raise TypeError(f"A DistributedSampler over a {type(self.dataset).__name__} without a length has none.")
        return len(self._order)

    def _begin(self) -> _Beginning:
        """Return where the next pass begins."""
        is_over = self._pass is not None and self._pass.is_complete
        return self._resume if self._resume.epoch == self.epoch and not is_over else _Beginning(self.epoch)

    def _begin_again(self) -> None:
        """Leave an earlier pass behind, and warn when it ended the epoch that begins now."""
        before = self._pass
        if before is not None:
            is_same = before.epoch == self.epoch
            self._repeats = self._repeats + before.is_complete if is_same else 0
            if before.is_complete:
                self._resume = _Beginning()
                if is_same and not self._epoch_is_set:
                    self._warn_of_same_order()
        self._epoch_is_set = False

    def _warn_of_same_order(self) -> None:
        """Say, once, that an epoch repeats the order of the one before."""
        depends = self.shuffle if self._order is None else self._order.is_shuffled
        if not depends or self._has_warned:
            return
        self._has_warned = True
        warnings.warn(
            f"DistributedSampler over a {type(self.dataset).__name__} visits epoch {self.epoch} again, in the same "
            f"order: set_epoch was not called. Call sampler.set_epoch(epoch) before each epoch, or pass shuffle=False.",
            stacklevel=4,
        )

    def _warn_of_workers(self) -> None:
        """Say, once, that a state counts what nobody has used yet."""
        if not self._has_warned_of_workers:
            self._has_warned_of_workers = True
            warnings.warn(
                f"DistributedSampler over a {type(self.dataset).__name__}: this state counts what the loader's workers "
                f"have drawn ahead, and a restart would leave that out. Call sampler.advance(len(batch)) after a step.",
                stacklevel=3,
            )

    def _deal(self) -> Iterator[Any]:
        assert self._order is not None
        begin = self._begin()
        indices = self._order.indices(self.epoch)
        order = self._order.digest(indices)
        if begin.order not in (None, order):
            raise ValueError(
                f"The {type(self.dataset).__name__} yields another order in epoch {self.epoch} than when the state "
                f"was taken, so that its position means nothing. Let its order depend on its set_epoch alone."
            )
        named = "" if order is None else f" in order {order}"
        self._compare("begin", f"{len(indices)} indices{named} from position {begin.position} on")
        own = deal(indices, begin.position, self.rank, self.num_replicas, self.mode)
        self._pass = Pass(self.epoch, begin.position, self.num_replicas, order)
        self._pass.ends_after(len(own), len(indices))
        return self._pass.draw(own)

    def _read_stream(self) -> Iterator[Any]:
        if self._stream_was_read and iter(self.dataset) is self.dataset:
            raise ValueError(f"This {type(self.dataset).__name__} can be read once only; pass what can be read again.")
        self._stream_was_read = True
        self._pass = Pass(self.epoch, self._begin().position, self.num_replicas, None)
        return self._pass.draw(self._rounds(self._pass))

    def _rounds(self, own: Pass) -> Iterator[Any]:
        """Yield what is this rank's of a stream, comparing what the ranks read, ever more rarely, and its end."""
        so_far = blake2b(digest_size=8)
        rounds, total = 0, own.start

        def look(indices: list[Any]) -> None:
            nonlocal rounds, total
            rounds, total = rounds + 1, total + len(indices)
            so_far.update((digest_of(indices) or "").encode())
            if rounds.bit_count() == 1:
                self._compare(f"round {rounds}", f"{total} indices {so_far.hexdigest()} from position {own.start} on")

        tell_epoch(self.dataset, self.epoch)
        with seeded(self.dataset, self.seed + self.epoch):
            stream = iter(self.dataset)
            yield from deal_stream(stream, own.start, self.rank, self.num_replicas, self.mode, look)
        self._compare("end", f"{total} indices in all")
        own.ends_after(own.drawn, total)

    def _compare(self, moment: str, text: str) -> None:
        if self._comparison is not None:
            world = f"seed {self.seed}, {'shuffled, ' if self.shuffle else ''}mode {self.mode}"
            self._comparison.compare(f"{self.epoch}/{self._repeats}/{moment}", f"{text}, {world}")


@dataclass(frozen=True)
class _Beginning:
    """Where an epoch's passes begin, and a hash of the order in which that was counted."""

    epoch: int = 0
    position: int = 0
    order: str | None = None


def _mode(mode: str | None, drop_last: bool) -> str:
    if mode is None:
        return "drop" if drop_last else "pad"
    if mode not in MODES:
        raise ValueError(f"expected `mode` to be one of {', '.join(MODES)}, got {mode!r}")
    if drop_last and mode != "drop":
        raise ValueError(f"drop_last=True means mode 'drop', and mode={mode!r} was given too.")
    return mode
