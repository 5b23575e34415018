"""What each function of procgroup.functional does with one array: its shapes, the group's call, and its transpose.

The transposed functions are those of linear functions, for JAX. The linear function takes the arrays of all ranks to
the results of all ranks; its transpose takes the cotangents of all results to those of all arrays. So a derivative is
that of the sum of all ranks' losses: rank r's gradient is d(loss of rank 0 + ... + loss of rank n-1) / d(its array).

    all_reduce SUM       y_r = x_0 + ... + x_(n-1)           x'_s = y'_0 + ... + y'_(n-1)       all_reduce SUM
    all_reduce AVG       y_r = (x_0 + ... + x_(n-1)) / n     x'_s = (y'_0 + ... + y'_(n-1)) / n all_reduce AVG
    all_gather           y_r[s] = x_s                        x'_s = y'_0[s] + ... + y'_(n-1)[s] reduce_scatter SUM
    reduce_scatter SUM   y_r = x_0[r] + ... + x_(n-1)[r]     x'_s[r] = y'_r                     all_gather
    all_to_all           y_r[s] = x_s[r]                     x'_s[r] = y'_r[s]                  all_to_all
    broadcast            y_r = x_root                        x'_root = y'_0 + ...; others 0     reduce SUM
    sendrecv             y_r = x_source(r)                   x'_s = y'_destination(s)           sendrecv back
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from procgroup.errors import ArgumentError
from procgroup.functional.fusing import FusedArrays, Leaf
from procgroup.groups.group import ProcessGroup
from procgroup.types import AnyReduceOp, PremulSum, ReduceOp

# Far from what programs use, so that no message of send, recv or sendrecv meets one of procgroup.send.
TAG = (1 << 63) - 4


class EngineCall(NamedTuple):
    """A call of the engine: its operation, a root or the destination of a message, its source, and a reduce op."""

    op: str
    root: int = -1
    source: int = -1
    reduce_op: AnyReduceOp | None = None


@dataclass(frozen=True)
class FunctionalOperation(ABC):
    """One function. Ranks in it are group ranks."""

    name: ClassVar[str]
    """What errors call the function."""
    takes_one_per_rank: ClassVar[bool] = False
    """Whether the first dimension of what is given has one element per rank."""
    returns_one_per_rank: ClassVar[bool] = False
    """Whether the first dimension of the result has one element per rank."""
    in_place: ClassVar[bool] = False
    """Whether the result takes the place of what is given."""

    @abstractmethod
    def run(self, group: ProcessGroup, given: FusedArrays, result: FusedArrays) -> None:
        """Make the group's call."""

    @abstractmethod
    def check(self, group: ProcessGroup, given: FusedArrays, result: FusedArrays) -> None:
        """Raise what the group's call would raise for these arrays; nothing is issued."""

    @abstractmethod
    def engine_call(self) -> EngineCall:
        """Return the call that ``run`` makes, for functions that JAX compiles."""

    def part_shape(self, leaf: Leaf, size: int) -> tuple[int, ...]:
        """Return the shape of what moves between two ranks. Raises ArgumentError for another first dimension."""
        shape = leaf.seen.shape
        if not self.takes_one_per_rank:
            return shape
        if shape[:1] != (size,):
            raise ArgumentError(
                f"functional.{self.name}: {leaf.name} has shape {shape}; expected a first dimension "
                f"of {size}, one element per rank."
            )
        return shape[1:]

    def result_shape(self, leaf: Leaf, size: int) -> tuple[int, ...]:
        """Return the shape of the result for one array."""
        leading = (size,) if self.returns_one_per_rank else ()
        return (*leading, *self.part_shape(leaf, size))

    def transposed(self) -> FunctionalOperation | None:
        """Return the transposed operation, which takes the cotangents of the results; None where there is none."""
        return None

    def cotangent(self, given: Any, size: int) -> Any:
        """Return what the transposed operation takes for the cotangent of a result, in a group of that size."""
        return given

    def describe(self) -> str:
        """Return what errors call this call."""
        return f"functional.{self.name}"


@dataclass(frozen=True)
class Collective(FunctionalOperation):
    """A function that is one method of the group."""

    method: ClassVar[str]
    """The group's method that moves the elements."""

    @abstractmethod
    def arguments(self, given: FusedArrays, result: FusedArrays) -> tuple[Any, ...]:
        """Return the arguments of the group's method."""

    def run(self, group: ProcessGroup, given: FusedArrays, result: FusedArrays) -> None:
        getattr(group, self.method)(*self.arguments(given, result))

    def check(self, group: ProcessGroup, given: FusedArrays, result: FusedArrays) -> None:
        group.check_collective(self.method, *self.arguments(given, result))


@dataclass(frozen=True)
class AllReduce(Collective):
    """Combine the arrays of all ranks."""

    op: AnyReduceOp
    method: ClassVar[str] = "all_reduce"
    name: ClassVar[str] = "all_reduce"
    in_place: ClassVar[bool] = True

    def arguments(self, given: FusedArrays, result: FusedArrays) -> tuple[Any, ...]:
        return given.array, self.op

    def engine_call(self) -> EngineCall:
        return EngineCall("all_reduce", reduce_op=self.op)

    def transposed(self) -> FunctionalOperation | None:
        return self if self.op in (ReduceOp.SUM, ReduceOp.AVG) else None

    def describe(self) -> str:
        return f"functional.{self.name}({_name_of(self.op)})"


@dataclass(frozen=True)
class Broadcast(Collective):
    """Copy the arrays of rank ``root``."""

    root: int
    method: ClassVar[str] = "broadcast"
    name: ClassVar[str] = "broadcast"
    in_place: ClassVar[bool] = True

    def arguments(self, given: FusedArrays, result: FusedArrays) -> tuple[Any, ...]:
        return given.array, self.root

    def engine_call(self) -> EngineCall:
        return EngineCall("broadcast", self.root)

    def transposed(self) -> FunctionalOperation:
        return ReduceToRoot(self.root)


@dataclass(frozen=True)
class ReduceToRoot(Collective):
    """Sum the arrays of all ranks on ``root``; return zeros elsewhere."""

    root: int
    method: ClassVar[str] = "reduce"
    name: ClassVar[str] = "broadcast, transposed"
    in_place: ClassVar[bool] = True

    def arguments(self, given: FusedArrays, result: FusedArrays) -> tuple[Any, ...]:
        return given.array, self.root, ReduceOp.SUM

    def run(self, group: ProcessGroup, given: FusedArrays, result: FusedArrays) -> None:
        super().run(group, given, result)
        if group.rank() != self.root:
            given.clear()

    def engine_call(self) -> EngineCall:
        return EngineCall("reduce", self.root, reduce_op=ReduceOp.SUM)

    def transposed(self) -> FunctionalOperation:
        return Broadcast(self.root)


@dataclass(frozen=True)
class AllGather(Collective):
    """Stack the arrays of all ranks."""

    method: ClassVar[str] = "all_gather_single"
    name: ClassVar[str] = "all_gather"
    returns_one_per_rank: ClassVar[bool] = True

    def arguments(self, given: FusedArrays, result: FusedArrays) -> tuple[Any, ...]:
        return result.array, given.array

    def engine_call(self) -> EngineCall:
        return EngineCall("all_gather")

    def transposed(self) -> FunctionalOperation:
        return ReduceScatter(ReduceOp.SUM)


@dataclass(frozen=True)
class GatherIntegers(AllGather):
    """Stack the integers of all ranks, which each rank combines by ``op``: an all_reduce for whoever called it."""

    op: ReduceOp
    method: ClassVar[str] = "all_gather_integers"
    name: ClassVar[str] = "all_reduce"

    def arguments(self, given: FusedArrays, result: FusedArrays) -> tuple[Any, ...]:
        return result.array, given.array, self.op


@dataclass(frozen=True)
class ReduceScatter(Collective):
    """Combine the arrays of all ranks, and keep this rank's element."""

    op: AnyReduceOp
    method: ClassVar[str] = "reduce_scatter_single"
    name: ClassVar[str] = "reduce_scatter"
    takes_one_per_rank: ClassVar[bool] = True

    def arguments(self, given: FusedArrays, result: FusedArrays) -> tuple[Any, ...]:
        return result.array, given.array, self.op

    def engine_call(self) -> EngineCall:
        return EngineCall("reduce_scatter", reduce_op=self.op)

    def transposed(self) -> FunctionalOperation | None:
        return AllGather() if self.op in (ReduceOp.SUM, ReduceOp.AVG) else None

    def cotangent(self, given: Any, size: int) -> Any:
        return given / size if self.op == ReduceOp.AVG else given

    def describe(self) -> str:
        return f"functional.{self.name}({_name_of(self.op)})"


@dataclass(frozen=True)
class AllToAll(Collective):
    """Send element ``[r]`` to rank ``r``; stack the received elements of all ranks."""

    method: ClassVar[str] = "all_to_all_single"
    name: ClassVar[str] = "all_to_all"
    takes_one_per_rank: ClassVar[bool] = True
    returns_one_per_rank: ClassVar[bool] = True

    def arguments(self, given: FusedArrays, result: FusedArrays) -> tuple[Any, ...]:
        return result.array, given.array, None, None

    def engine_call(self) -> EngineCall:
        return EngineCall("all_to_all")

    def transposed(self) -> FunctionalOperation:
        return self


@dataclass(frozen=True)
class SendRecv(FunctionalOperation):
    """Send to ``destination`` and receive from ``source``, at the same time."""

    destination: int
    source: int
    name: ClassVar[str] = "sendrecv"

    def run(self, group: ProcessGroup, given: FusedArrays, result: FusedArrays) -> None:
        if self._stays_here(group):
            result.copy_from(given)
            return
        sending = group.send(given.array, self.destination, TAG, True)
        group.recv(result.array, self.source, TAG)
        assert sending is not None
        sending.wait()

    def check(self, group: ProcessGroup, given: FusedArrays, result: FusedArrays) -> None:
        if not self._stays_here(group):
            group.check_message("send", given.array, self.destination, TAG)

    def engine_call(self) -> EngineCall:
        return EngineCall("send", self.destination, self.source)

    def _stays_here(self, group: ProcessGroup) -> bool:
        return self.destination == self.source == group.rank()

    def transposed(self) -> FunctionalOperation:
        return SendRecv(self.source, self.destination)


def _name_of(op: AnyReduceOp) -> str:
    return f"PREMUL_SUM({op.factor})" if isinstance(op, PremulSum) else op.name
