"""Averages of matrices as products of two thin ones, with error feedback.

A gradient of n rows and m columns is approximated by P Q^T, where P has a few columns, and Q as many: P is the mean of
M Q with the last step's Q, made orthonormal; the new Q is the mean of M^T P. That is one step of a power iteration: as
gradients change slowly, it comes near the best approximation of this rank.

Vogels, Karimireddy and Jaggi, "PowerSGD", arXiv 1905.13727, algorithms 1 and 2.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple

from procgroup.groups.group import ProcessGroup
from procgroup.parallel.communication_hooks.default_hooks import average, require_floating_point
from procgroup.parallel.communication_hooks.hook_state import HookState
from procgroup.parallel.communication_hooks.interface import GradBucket, Pending
from procgroup.parallel.communication_hooks.orthogonal import orthogonalize
from procgroup.parallel.communication_hooks.residuals import Residuals, finite, working_dtype
from procgroup.parallel.pytorch import torch
from procgroup.types import ReduceOp


class PowerSGDState(HookState):
    """What ``powerSGD_hook`` keeps on this rank: the number of steps, each matrix's Q, and its error feedback.

    A gradient is compressed when that makes it ``min_compression_rate`` times smaller or more. The first
    ``start_powerSGD_iter`` steps are averaged as they are. With ``warm_start`` each step begins with the last one's Q,
    without it with a random one. All arguments but the group must be the same on all ranks.

    Raises ValueError for a rank below 1, a negative start and a compression rate that is not above 0.
    """

    SHARED: ClassVar[tuple[str, ...]] = (
        "matrix_approximation_rank",
        "start_powerSGD_iter",
        "min_compression_rate",
        "use_error_feedback",
        "warm_start",
        "random_seed",
    )

    def __init__(
        self,
        process_group: ProcessGroup | None = None,
        matrix_approximation_rank: int = 1,
        start_powerSGD_iter: int = 1000,  # noqa: N803 - torch's name
        min_compression_rate: float = 2,
        use_error_feedback: bool = True,
        warm_start: bool = True,
        random_seed: int = 0,
    ) -> None:
        super().__init__(process_group)
        if matrix_approximation_rank < 1:
            raise ValueError(
                f"Expected parameter `matrix_approximation_rank` to be at least 1, got {matrix_approximation_rank}."
            )
        if start_powerSGD_iter < 0:
            raise ValueError(f"Expected parameter `start_powerSGD_iter` to be at least 0, got {start_powerSGD_iter}.")
        if not min_compression_rate > 0:
            raise ValueError(f"Expected parameter `min_compression_rate` to be above 0, got {min_compression_rate}.")
        self.matrix_approximation_rank = matrix_approximation_rank
        self.start_powerSGD_iter = start_powerSGD_iter
        self.min_compression_rate = min_compression_rate
        self.use_error_feedback = use_error_feedback
        self.warm_start = warm_start
        self.random_seed = random_seed
        self.iter: Any = 0
        self._draws = 0
        self._factors: dict[Any, Any] = {}
        self._residuals = Residuals()
        self._counts = [0, 0]

    def compression_stats(self) -> tuple[float, int, int]:
        """Return how many times fewer elements were sent since compression began, and how many these are and were."""
        before, after = self._counts
        return before / after if after else 0.0, before, after

    def state_dict(self, model: Any) -> dict[str, Any]:
        """Return what is kept, by the parameters' names in ``model``; error feedback is this rank's own."""
        named = {name: self._factors.get(parameter) for name, parameter in model.named_parameters()}
        return {
            "iter": self.iter,
            "draws": self._draws,
            "factors": {name: factor.clone() for name, factor in named.items() if factor is not None},
            "residuals": self._residuals.state_dict(model),
        }

    def load_state_dict(self, state: Mapping[str, Any], model: Any) -> None:
        """Take over what ``state_dict`` gave, on as many ranks. Raises ValueError where the model does not fit."""
        self._residuals.load_state_dict(state["residuals"], model)
        parameters = dict(model.named_parameters())
        if unknown := [name for name in state["factors"] if name not in parameters]:
            raise ValueError(f"Expected the factors of parameters of the model; it has none of the names {unknown}.")
        self._factors = {parameters[name]: factor.clone() for name, factor in state["factors"].items()}
        self.iter, self._draws = state["iter"], state["draws"]

    def _factor(self, parameter: Any, shape: tuple[int, int], dtype: Any) -> Any:
        """Return the Q to begin with, each column with 1 as its largest magnitude: nothing can vanish by scale."""
        factor = self._factors.get(parameter) if self.warm_start else None
        if factor is None or factor.shape != shape:  # it may come from a state with another rank
            return self._draw(shape, dtype)
        largest = factor.abs().amax(0)
        is_usable = (largest > 0) & largest.isfinite()
        if is_usable.all():
            return factor / largest
        return torch.where(is_usable, factor / largest, self._draw(shape, dtype))

    def _draw(self, shape: tuple[int, int], dtype: Any) -> Any:
        self._draws += 1
        # The generator takes the lower 32 bits only; the odd factor keeps the draws of neighbouring seeds apart.
        generator = torch.Generator().manual_seed((self.random_seed * 0x9E3779B1 + self._draws) % (1 << 32))
        return torch.randn(shape, generator=generator, dtype=dtype)

    def _columns_for(self, rows: int, columns: int) -> int:
        """Return how many columns P and Q have for a matrix of this shape; 0 where it is not worth it."""
        rank = min(self.matrix_approximation_rank, rows, columns)
        is_worth_it = (rows + columns) * rank * self.min_compression_rate < rows * columns
        return rank if is_worth_it else 0


def powerSGD_hook(state: PowerSGDState, bucket: GradBucket) -> Pending:  # noqa: N802 - torch's name
    """Average the matrices of the bucket as products of rank r, and all else as it is.

    Sent: r * (n + m) elements of 4 bytes (8 of float64) for a matrix of n rows and m columns, in two calls. Error of
    one step: the mean M becomes P P^T M, never farther from M than zeros are; it is exact, but for rounding, where M
    has rank r or less, and the best approximation of rank r in the limit of many steps on one M. With error feedback
    the rest is added to the next step's gradients. A NaN or infinity, also one that a product of numbers above 1e38
    gives, makes its matrix NaN on every rank, and is not kept. What was sent in a step that all ranks dropped
    (BackwardFailed) is lost.

    Cost: three products with thin matrices and some five passes over the bucket. Raises TypeError for complex
    gradients, CollectiveMismatch for different settings.
    """
    require_floating_point(bucket, "powerSGD_hook")
    group = state.group()
    is_plain = state.iter < state.start_powerSGD_iter
    if bucket.is_last():
        state.iter += 1
    return average(group, bucket.buffer()) if is_plain else _Exchange(state, group, bucket).begin()


class _Matrix(NamedTuple):
    """A gradient that is compressed, and, once averaged, its mean: views of the bucket's two flat tensors."""

    parameter: Any
    exact: Any
    mean: Any
    columns: int


class _Exchange:
    """One bucket of one step."""

    def __init__(self, state: PowerSGDState, group: ProcessGroup, bucket: GradBucket) -> None:
        self._state = state
        self._group = group
        self._buffer = bucket.buffer()
        self._exact = self._buffer.to(working_dtype(self._buffer), copy=True)
        self._residual = state._residuals.of(bucket) if state.use_error_feedback else None
        if self._residual is not None:
            self._exact += self._residual
        self._mean = torch.empty_like(self._exact)
        self._matrices: list[_Matrix] = []
        # Views of what is averaged as it is: gradients, and where their means belong.
        self._others: list[tuple[Any, Any]] = []
        self._divide(bucket.parameters())

    def begin(self) -> Pending:
        """Send the gradients that are averaged as they are, and each matrix's P."""
        factors = [
            self._state._factor(matrix.parameter, (matrix.exact.shape[1], matrix.columns), matrix.exact.dtype)
            for matrix in self._matrices
        ]
        products = [matrix.exact @ factor for matrix, factor in zip(self._matrices, factors, strict=True)]
        sent = _joined([exact for exact, _ in self._others] + products, self._exact)
        self._state._counts[0] += self._exact.numel()
        self._state._counts[1] += sent.numel()
        return Pending(average(self._group, sent), self._finish)

    def _finish(self, averaged: Any) -> Any:
        shapes = [mean.shape for _, mean in self._others]
        shapes += [(len(matrix.exact), matrix.columns) for matrix in self._matrices]
        parts = _divided(averaged, shapes)
        for (_, mean), part in zip(self._others, parts, strict=False):
            mean.copy_(part)
        if self._matrices:
            self._multiply([orthogonalize(part) for part in parts[len(self._others) :]])
        if self._residual is not None:
            for exact, _ in self._others:
                exact.zero_()  # nothing of it is kept
            self._residual.copy_(finite(self._exact))
        return self._buffer.copy_(self._mean)

    def _multiply(self, lefts: list[Any]) -> None:
        """Average each Q, and put the product where the mean belongs; leave in the gradient what was not sent of it."""
        products = [matrix.exact.T @ left for matrix, left in zip(self._matrices, lefts, strict=True)]
        sent = _joined(products, self._exact)
        for matrix, left, product in zip(self._matrices, lefts, products, strict=True):
            matrix.exact.addmm_(left, product.T, alpha=-1)
        self._state._counts[1] += sent.numel()
        self._group.all_reduce(sent, ReduceOp.AVG)
        rights = _divided(sent, [product.shape for product in products])
        for matrix, left, right in zip(self._matrices, lefts, rights, strict=True):
            # Made of additions of whole matrices: a library's product may differ between ranks in its last bits.
            torch.mul(left[:, :1], right[:, 0], out=matrix.mean)
            for column in range(1, matrix.columns):
                matrix.mean.add_(left[:, column : column + 1] * right[:, column])
            if self._state.warm_start:
                self._state._factors[matrix.parameter] = right.clone()

    def _divide(self, parameters: list[Any]) -> None:
        counts = [parameter.numel() for parameter in parameters]
        pairs = zip(self._exact.split(counts), self._mean.split(counts), strict=True)
        for parameter, (exact, mean) in zip(parameters, pairs, strict=True):
            rows = _rows(parameter)
            columns = self._state._columns_for(rows, exact.numel() // rows)
            if columns:
                self._matrices.append(_Matrix(parameter, exact.view(rows, -1), mean.view(rows, -1), columns))
            else:
                self._others.append((exact, mean))


def _rows(parameter: Any) -> int:
    """Return the length of the dimension that comes first in memory."""
    lengths = [pair for pair in zip(parameter.stride(), parameter.shape, strict=True) if pair[1] > 1]
    return int(max(lengths)[1]) if lengths else 1


def _joined(parts: list[Any], like: Any) -> Any:
    return torch.cat([part.reshape(-1) for part in parts]) if parts else like.new_empty(0)


def _divided(flat: Any, shapes: list[Any]) -> list[Any]:
    counts = [torch.Size(shape).numel() for shape in shapes]
    return [part.view(shape) for part, shape in zip(flat.split(counts), shapes, strict=True)]
