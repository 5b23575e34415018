"""Errors of data-parallel training. Each error has the parameters and ranks concerned as attributes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from procgroup.errors import DistError, name_ranks


class ModelMismatch(DistError):
    """The ranks have wrapped different models; no parameter was changed.

    ``ranks`` are the ranks that differ from rank 0, and ``rank`` is the first of them. ``expected`` and ``got`` are the
    first different parameters of rank 0 and of ``rank``: name, shape and dtype, or "nothing".
    """

    def __init__(self, *, expected: str, got: str, rank: int, ranks: Sequence[int]) -> None:
        self.expected = expected
        self.got = got
        self.rank = rank
        self.ranks: tuple[int, ...] = tuple(ranks)
        super().__init__(
            f"DistributedDataParallel: the ranks have different models; {name_ranks(ranks)} differ"
            f"{'s' if len(ranks) == 1 else ''} from rank 0. The first difference: rank 0 has {expected}, "
            f"rank {rank} has {got}. Build the same model on every rank; no parameter was changed."
        )


class BackwardFailed(DistError):
    """A backward failed on ``ranks``, so all ranks dropped its gradients.

    The group remains usable: all ranks can continue with the next step.
    """

    def __init__(self, *, ranks: Sequence[int]) -> None:
        self.ranks: tuple[int, ...] = tuple(ranks)
        super().__init__(
            f"DistributedDataParallel: backward failed on {name_ranks(ranks)}, so the gradients of this step were "
            f"dropped on every rank. Look at the error there; the next step can go on."
        )


class GraphChanged(DistError):
    """With static_graph=True, a backward used other parameters than the first one, or used them more or less often.

    ``uses`` maps ranks to lists of (name, shape, times in the first backward, times in this one).
    """

    def __init__(self, *, uses: Mapping[int, Sequence[tuple[str, tuple[int, ...], int, int]]]) -> None:
        self.uses: dict[int, list[tuple[str, tuple[int, ...], int, int]]] = {
            rank: list(changes) for rank, changes in uses.items() if changes
        }
        said = "; ".join(
            f"rank {rank}: "
            + ", ".join(f"{name} {shape} {then} times, now {now}" for name, shape, then, now in changes)
            for rank, changes in sorted(self.uses.items())
        )
        super().__init__(
            f"DistributedDataParallel: static_graph=True, but this backward did not use the parameters as the first "
            f"one did ({said}). Leave static_graph out: parameters that some ranks do not use need no flag."
        )


class InputsExhausted(DistError):
    """In join(throw_on_early_termination=True), ``ranks`` have no more inputs. All ranks raise it at the same step."""

    def __init__(self, *, ranks: Sequence[int]) -> None:
        self.ranks: tuple[int, ...] = tuple(ranks)
        super().__init__(
            "Detected at least one rank that exhausted inputs. Throwing across all ranks. "
            f"The inputs of {name_ranks(ranks)} are at their end; every rank stops at this step."
        )


class RanksApart(DistError):
    """In join(), the ranks call the model differently. ``places`` maps each rank to a description of its call."""

    def __init__(self, *, places: Mapping[int, str]) -> None:
        self.places: dict[int, str] = dict(places)
        super().__init__(
            "DistributedDataParallel: the ranks do not call the model in the same way ("
            + ", ".join(f"rank {rank} is {place}" for rank, place in sorted(self.places.items()))
            + "). Let each rank that has inputs make the same forwards and backwards."
        )
