"""Value types that every package shares."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from enum import IntEnum
from numbers import Complex, Real
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

Timeout = timedelta | float | int
"""A length of time: a ``timedelta``, or a number of seconds."""

DEFAULT_TIMEOUT = timedelta(minutes=30)
"""How long a process group's operations may take by default."""

DEFAULT_STORE_TIMEOUT = timedelta(minutes=5)
"""How long a store's waiting operations may take by default."""


class Endpoint(NamedTuple):
    """A host (name or address, IPv6 without brackets) and a TCP port."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class SupportsDLPack(Protocol):
    """An object with DLPack: an array of PyTorch, JAX, CuPy or NumPy."""

    def __dlpack__(self, *args: Any, **kwargs: Any) -> Any: ...


if TYPE_CHECKING:
    from typing_extensions import Buffer  # type checkers know it everywhere; collections.abc has it from Python 3.12 on

    Array = SupportsDLPack | Buffer
else:
    Array = Any
"""An array of any library: an object with DLPack or the buffer protocol."""

Arrays = Sequence[Array]
"""One array for each rank, or for each place of a list."""


class ReduceOp(IntEnum):
    """How the elements of the ranks are combined. The numbers are those of the native engine's table.

    ``AVG`` divides the sum by the number of ranks and exists for all but bool; of integers the sum does not
    overflow, and the quotient is truncated toward zero. ``BAND``, ``BOR`` and ``BXOR`` exist for integers and bool
    only, as ``LAND``, ``LOR`` and ``LXOR`` do, which give 0 or 1: any other integer than 0 counts as 1, also in a group
    of one rank. ``PREMUL_SUM(factor)`` multiplies this rank's elements by its factor first, and exists for
    floating-point and complex arrays only.
    """

    SUM = 0
    AVG = 1
    PRODUCT = 2
    MIN = 3
    MAX = 4
    BAND = 5
    BOR = 6
    BXOR = 7
    PREMUL_SUM = 8
    LAND = 9
    LOR = 10
    LXOR = 11

    def __call__(self, factor: float) -> PremulSum:
        """Return the reduce op that ``ReduceOp.PREMUL_SUM(factor)`` means. Raises TypeError for another op."""
        if self is not ReduceOp.PREMUL_SUM:
            raise TypeError(f"ReduceOp.{self.name} takes no factor; only ReduceOp.PREMUL_SUM does.")
        return PremulSum(factor)


class PremulSum:
    """The reduce op that multiplies this rank's elements by ``factor`` and sums; ranks may have different factors.

    Raises TypeError unless the factor is a real number.
    """

    def __init__(self, factor: float) -> None:
        given: object = factor
        # NumPy's complex numbers have __float__ too, which drops a part of them.
        is_complex = isinstance(given, Complex) and not isinstance(given, Real)
        if is_complex or not (hasattr(given, "__float__") or hasattr(given, "__index__")):
            raise TypeError(
                f"Expected the factor of ReduceOp.PREMUL_SUM to be a real number, got {factor!r} of type "
                f"{type(factor).__name__}."
            )
        self._factor = factor

    @property
    def factor(self) -> float:
        """What this rank's elements are multiplied by."""
        return self._factor

    @property
    def op(self) -> ReduceOp:
        """The op without its factor."""
        return ReduceOp.PREMUL_SUM

    def __repr__(self) -> str:
        return f"PremulSum(factor={self.factor!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PremulSum) and self.factor == other.factor

    def __hash__(self) -> int:
        return hash((PremulSum, self.factor))


AnyReduceOp = ReduceOp | PremulSum
"""What a reduction takes. ``ReduceOp.PREMUL_SUM`` alone, without a factor, is refused."""


def seconds(timeout: Timeout) -> float:
    """Return a timeout in seconds.

    Raises TypeError for anything but a ``timedelta``, an ``int`` or a ``float``, and ValueError
    for a negative or not-a-number length.
    """
    if isinstance(timeout, timedelta):
        length = timeout.total_seconds()
    elif isinstance(timeout, (int, float)) and not isinstance(timeout, bool):
        length = float(timeout)
    else:
        raise TypeError(
            f"expected timeout to be a datetime.timedelta or a number of seconds, "
            f"got {timeout!r} of type {type(timeout).__name__}"
        )
    if not length >= 0:
        raise ValueError(f"expected timeout to be at least 0 seconds, got {length}")
    return length


def as_timedelta(seconds: float) -> timedelta:
    """Return a length of time as a timedelta; an infinite one as the longest timedelta."""
    return timedelta(seconds=min(seconds, timedelta.max.total_seconds() - 1))
