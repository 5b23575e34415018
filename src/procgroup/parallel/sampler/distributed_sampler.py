"""DistributedSampler: divide the indices of a dataset among the ranks, in every epoch and after a restart."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping
from hashlib import blake2b
from typing import Any, Generic, Protocol, TypeVar, overload

from procgroup.groups.group import ProcessGroup
from procgroup.parallel.sampler.epoch_pass import (
    EpochStart,
    Pass,
    choose_mode,
    count_share,
    is_read_by_workers,
    share_of,
    share_of_stream,
)
from procgroup.parallel.sampler.orders import WeightedOrder, digest_of, is_dataset, order_of, seeded, set_epoch
from procgroup.parallel.sampler.world import world_of

Index = TypeVar("Index", covariant=True)


class Dataset(Protocol):
    """An object with ``[index]``, such as a list, an array or a ``torch.utils.data.Dataset``."""

    def __getitem__(self, index: Any, /) -> Any: ...


class DistributedSampler(Generic[Index]):
    """Yield this rank's indices, in the order of torch.utils.data.DistributedSampler, with or without PyTorch.

    ``dataset`` is an object with a length and ``[index]``, whose indices are divided among the ranks; or a sampler or
    another iterable without ``[index]``, whose values are divided. Without a length of ``dataset`` the sampler has no
    length.

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
        """``num_replicas`` and ``rank`` are by default those of ``group``, which is by default the default group.

        ``shuffle`` is by default True for a dataset and False for a sampler. ``mode`` handles a remainder of fewer
        indices than ranks: "pad" repeats indices from the beginning of the order, "drop" omits the remainder, "exact"
        gives some ranks one index more than others. With ``weights``, one per index, ``draws`` indices (by default the
        number of weights) are drawn at random.

        Raises ValueError for contradicting arguments, and without a group and numbers.
        """
        self.num_replicas: int
        self.rank: int
        self.num_replicas, self.rank, self._comparison = world_of(num_replicas, rank, group)
        self.dataset: Any = dataset
        self.mode: str = choose_mode(mode, drop_last)
        self.drop_last: bool = self.mode == "drop"
        self.seed = seed
        self.epoch: int = 0
        self.shuffle: bool = is_dataset(dataset) if shuffle is None else bool(shuffle)
        if weights is None and not (draws is None and replacement):
            raise ValueError("`draws` and `replacement` are for `weights`, which were not given.")
        weighted = None if weights is None else WeightedOrder(weights, seed, draws, replacement)
        self._order = order_of(dataset, seed, self.shuffle, weighted)
        self._pass: Pass | None = None
        self._repeats = 0  # the number of earlier complete passes over this epoch
        self._resume = EpochStart()
        self._stream_was_read = False
        self._epoch_is_set = True
        self._counts_by_hand = False
        self._is_read_by_workers = False
        self._warned: set[str] = set()

    def __iter__(self) -> Iterator[Index]:
        """Start a pass over the epoch, at the position of a loaded state or at the beginning.

        Raises CollectiveMismatch when another rank of the group visits other indices in this epoch, ValueError when
        the order differs from that of the loaded state, and for an iterator that an earlier pass has exhausted.
        """
        self._end_previous_pass()
        self._is_read_by_workers = is_read_by_workers()
        return self._read_stream() if self._order is None else self._read_order()

    def __len__(self) -> int:
        """Return the number of indices in this rank's next pass: after loading a state, those that remain."""
        return count_share(self._length() - self._start().position, self.rank, self.num_replicas, self.mode)

    @property
    def num_samples(self) -> int:
        return count_share(self._length(), self.rank, self.num_replicas, self.mode)

    @property
    def total_size(self) -> int:
        return self._length() if self.mode == "exact" else self.num_samples * self.num_replicas

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next pass, which determines its order. A loaded position in the same epoch is kept."""
        self.epoch = epoch
        self._epoch_is_set = True

    def advance(self, samples: int) -> None:
        """Count indices that this rank has used since the last call; call it after each step.

        From then on ``state_dict`` counts used indices, not those that a loader has drawn ahead. Raises ValueError for
        more indices than were drawn.
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
        """Return the position in the epoch, as numbers and strings; the same on all ranks at the same step.

        Counts the indices given to ``advance`` or, if it was never called, the drawn indices. In that case it warns
        when a loader's workers draw ahead.
        """
        now = self._pass
        if now is None or self._epoch_is_set or now.epoch != self.epoch:
            now = None
        if now is not None and self._is_read_by_workers and not (self._counts_by_hand or now.is_exhausted):
            self._warn_once(
                "workers",
                ": this state counts what the loader's workers have drawn ahead, and a restart would leave that out. "
                "Call sampler.advance(len(batch)) after a step.",
                stacklevel=3,
            )
        count = 0 if now is None else now.used if self._counts_by_hand else now.drawn
        return {
            "epoch": self.epoch,
            "position": self._start().position if now is None else now.position(count),
            "counts_by_hand": self._counts_by_hand,
            "order": self._start().order if now is None else now.order,
            **self._identity(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue in the epoch and at the position of a state, also with another number of ranks.

        Raises ValueError for an invalid state, and for one of another length, seed or kind of order.
        """
        expected = self._identity()
        if missing := sorted({"epoch", "position", "counts_by_hand", "order", *expected} - set(state)):
            raise ValueError(f"This is not the state of a DistributedSampler: it lacks {', '.join(missing)}.")
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
        self._resume = EpochStart(state["epoch"], state["position"], state["order"])
        self._counts_by_hand = state["counts_by_hand"]
        self._pass = None
        self._repeats = 0

    def __getstate__(self) -> dict[str, Any]:
        """Return the state without the group: a copy in another process is not a rank of it."""
        return {**self.__dict__, "_comparison": None, "_pass": None}

    def _identity(self) -> dict[str, Any]:
        """Return values that are equal for samplers that visit the same indices in the same order."""
        length = None if self._order is None else len(self._order)
        return {"length": length, "seed": self.seed, "shuffle": self.shuffle}

    def _length(self) -> int:
        if self._order is None:
            raise TypeError(f"A DistributedSampler over a {type(self.dataset).__name__} without a length has none.")
        return len(self._order)

    def _start(self) -> EpochStart:
        """Return the start of the next pass."""
        has_ended = self._pass is not None and self._pass.is_complete
        return self._resume if self._resume.epoch == self.epoch and not has_ended else EpochStart(self.epoch)

    def _end_previous_pass(self) -> None:
        """Discard the previous pass; warn if it has completed the epoch that starts now."""
        before = self._pass
        if before is not None:
            is_same = before.epoch == self.epoch
            self._repeats = self._repeats + before.is_complete if is_same else 0
            if before.is_complete:
                self._resume = EpochStart()
                is_shuffled = self.shuffle if self._order is None else self._order.is_shuffled
                if is_same and is_shuffled and not self._epoch_is_set:
                    self._warn_once(
                        "same order",
                        f" visits epoch {self.epoch} again, in the same order: set_epoch was not called. Call "
                        f"sampler.set_epoch(epoch) before each epoch, or pass shuffle=False.",
                        stacklevel=4,
                    )
        self._epoch_is_set = False

    def _warn_once(self, topic: str, text: str, stacklevel: int) -> None:
        if topic not in self._warned:
            self._warned.add(topic)
            warnings.warn(f"DistributedSampler over a {type(self.dataset).__name__}{text}", stacklevel=stacklevel)

    def _read_order(self) -> Iterator[Any]:
        assert self._order is not None
        start = self._start()
        indices = self._order.indices(self.epoch)
        order = self._order.digest(indices)
        if start.order not in (None, order):
            raise ValueError(
                f"The {type(self.dataset).__name__} yields another order in epoch {self.epoch} than when the state "
                f"was taken, so that its position means nothing. Let its order depend on its set_epoch alone."
            )
        named = "" if order is None else f" in order {order}"
        self._compare("begin", f"{len(indices)} indices{named} from position {start.position} on")
        own = share_of(indices, start.position, self.rank, self.num_replicas, self.mode)
        self._pass = Pass(self.epoch, start.position, self.num_replicas, order)
        self._pass.set_length(len(own), len(indices))
        return self._pass.draw(own)

    def _read_stream(self) -> Iterator[Any]:
        if self._stream_was_read and iter(self.dataset) is self.dataset:
            raise ValueError(
                f"This {type(self.dataset).__name__} can be read once only; pass a dataset that can be read again."
            )
        self._stream_was_read = True
        self._pass = Pass(self.epoch, self._start().position, self.num_replicas, None)
        return self._pass.draw(self._rounds(self._pass))

    def _rounds(self, own: Pass) -> Iterator[Any]:
        """Yield this rank's items; compare hashes of the stream at growing intervals, and its length at the end."""
        digest = blake2b(digest_size=8)
        rounds, total = 0, own.start

        def compare_round(indices: list[Any]) -> None:
            nonlocal rounds, total
            rounds, total = rounds + 1, total + len(indices)
            digest.update((digest_of(indices) or "").encode())
            if rounds.bit_count() == 1:
                self._compare(f"round {rounds}", f"{total} indices {digest.hexdigest()} from position {own.start} on")

        set_epoch(self.dataset, self.epoch)
        with seeded(self.dataset, self.seed + self.epoch):
            stream = iter(self.dataset)
            yield from share_of_stream(stream, own.start, self.rank, self.num_replicas, self.mode, compare_round)
        self._compare("end", f"{total} indices in all")
        own.set_length(own.drawn, total)

    def _compare(self, moment: str, description: str) -> None:
        if self._comparison is not None:
            world = f"seed {self.seed}, {'shuffled, ' if self.shuffle else ''}mode {self.mode}"
            self._comparison.compare(f"{self.epoch}/{self._repeats}/{moment}", f"{description}, {world}")
