"""PowerSGD: average gradient matrices as low-rank products, with error feedback.

A gradient M of n rows and m columns is approximated by P Q^T, where P and Q have a few columns each. P is the mean of
M Q with the Q of the last step, orthonormalized; the new Q is the mean of M^T P. This is one step of a power iteration:
because gradients change slowly, it approaches the best approximation of this rank.

Vogels, Karimireddy and Jaggi, "PowerSGD", arXiv 1905.13727, algorithms 1 and 2.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple

from procgroup.groups.group import ProcessGroup
from procgroup.parallel.communication_hooks.default_hooks import average, require_floating_point
from procgroup.parallel.communication_hooks.hook_state import CompressionState, finite, require_at_least
from procgroup.parallel.communication_hooks.interface import GradBucket, Pending
from procgroup.parallel.pytorch import torch
from procgroup.types import ReduceOp

DEPENDENT = 1e-7
"""A unit column counts as dependent if no more than this length is left after subtracting the earlier columns."""


class PowerSGDState(CompressionState):
    """The state of ``powerSGD_hook`` on this rank: the number of steps, each matrix's Q, and the error feedback.

    A gradient is compressed if that makes it smaller by a factor of ``min_compression_rate`` or more. The gradients of
    the first ``start_powerSGD_iter`` steps are averaged without compression. With ``warm_start`` each step starts from
    the Q of the last one, without it from a random Q. All arguments except the group must be the same on all ranks.

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
        super().__init__(process_group, use_error_feedback)
        require_at_least(1, matrix_approximation_rank=matrix_approximation_rank)
        require_at_least(0, start_powerSGD_iter=start_powerSGD_iter)
        if not min_compression_rate > 0:
            raise ValueError(f"Expected parameter `min_compression_rate` to be above 0, got {min_compression_rate}.")
        self.matrix_approximation_rank = matrix_approximation_rank
        self.start_powerSGD_iter = start_powerSGD_iter
        self.min_compression_rate = min_compression_rate
        self.warm_start = warm_start
        self.random_seed = random_seed
        self.iter: Any = 0
        self._draws = 0
        self._factors: dict[Any, Any] = {}
        self._spares: dict[Any, Any] = {}
        self._counts = [0, 0]

    def compression_stats(self) -> tuple[float, int, int]:
        """Return the compression rate since compression began, and the numbers of elements before and after it."""
        before, after = self._counts
        return before / after if after else 0.0, before, after

    def state_dict(self, model: Any) -> dict[str, Any]:
        """Return the state by the parameters' names in ``model``. The error feedback differs between ranks."""
        named = {name: self._factors.get(parameter) for name, parameter in model.named_parameters()}
        return {
            "iter": self.iter,
            "draws": self._draws,
            "factors": {name: factor.clone() for name, factor in named.items() if factor is not None},
            "residuals": super().state_dict(model),
        }

    def load_state_dict(self, state: Mapping[str, Any], model: Any) -> None:
        """Load a ``state_dict`` of the same number of ranks. Raises ValueError when it does not fit the model."""
        super().load_state_dict(state["residuals"], model)
        parameters = dict(model.named_parameters())
        if unknown := [name for name in state["factors"] if name not in parameters]:
            raise ValueError(f"Expected the factors of parameters of the model; it has none of the names {unknown}.")
        self._factors = {
            parameters[name]: factor.to(parameters[name].device, copy=True) for name, factor in state["factors"].items()
        }
        self._spares.clear()
        self.iter, self._draws = state["iter"], state["draws"]

    def _factor(self, parameter: Any, shape: tuple[int, int], dtype: Any) -> Any:
        """Return the initial Q, with columns scaled to a largest magnitude of 1: products then cannot underflow."""
        factor = self._factors.get(parameter) if self.warm_start else None
        if factor is None or factor.shape != shape:  # loaded from a state with another approximation rank
            return self._draw(shape, dtype).to(parameter.device)
        largest = factor.abs().amax(0)
        is_usable = (largest > 0) & largest.isfinite()
        if not factor.is_cpu:  # the host does not wait to learn whether it has to draw
            return torch.where(is_usable, factor / largest, self._spare(parameter, shape, dtype))
        if is_usable.all():
            return factor / largest
        return torch.where(is_usable, factor / largest, self._draw(shape, dtype))

    def _keep_factor(self, parameter: Any, factor: Any) -> None:
        """Keep Q for the next step, in the memory of the last one: that is where a captured step reads it."""
        kept = self._factors.get(parameter)
        if kept is None or kept.shape != factor.shape:
            self._factors[parameter] = factor.clone()
        else:
            kept.copy_(factor)

    def _spare(self, parameter: Any, shape: tuple[int, int], dtype: Any) -> Any:
        """Return random columns on a GPU, the same in each step."""
        spare = self._spares.get(parameter)
        if spare is None or spare.shape != shape:
            spare = self._spares[parameter] = self._draw(shape, dtype).to(parameter.device)
        return spare

    def _draw(self, shape: tuple[int, int], dtype: Any) -> Any:
        self._draws += 1
        # The generator uses the lower 32 bits only; the odd factor separates the draws of neighbouring seeds.
        generator = torch.Generator("cpu").manual_seed((self.random_seed * 0x9E3779B1 + self._draws) % (1 << 32))
        # On the CPU, whose numbers do not depend on the kind of GPU.
        return torch.randn(shape, generator=generator, dtype=dtype, device="cpu")


def powerSGD_hook(state: PowerSGDState, bucket: GradBucket) -> Pending:  # noqa: N802 - torch's name
    """Average the matrices of the bucket as products of rank r, and the other gradients without compression.

    Bytes sent: 4 (8 for float64) for each of r * (n + m) elements of a matrix of n rows and m columns, in two
    collectives. Error of one step: the mean M becomes P P^T M; the error is never larger than that of an all-zero
    result. It is exact except for rounding if M has rank r or less, and the best approximation of rank r in the limit
    of many steps on one M. With error feedback the error is added to the gradients of the next step. A NaN or infinity,
    also from a product of numbers above 1e38, makes its matrix NaN on every rank and is not kept. If all ranks drop a
    step (BackwardFailed), what was sent in it is lost: the kept error is the rest only.

    Cost: three products with thin matrices and about five passes over the bucket. Raises TypeError for complex
    gradients, CollectiveMismatch for different settings.
    """
    require_floating_point(bucket, "powerSGD_hook")
    group = state.group()
    is_plain = state.iter < state.start_powerSGD_iter
    if bucket.is_last():
        state.iter += 1
    return average(group, bucket.buffer()) if is_plain else _FactorExchange(state, group, bucket).begin()


class _Matrix(NamedTuple):
    """A compressed gradient and the destination of its mean: views of the bucket's two flat tensors."""

    parameter: Any
    exact: Any
    mean: Any
    columns: int


class _FactorExchange:
    """The exchange of one bucket in one step."""

    def __init__(self, state: PowerSGDState, group: ProcessGroup, bucket: GradBucket) -> None:
        self._state = state
        self._group = group
        self._buffer = bucket.buffer()
        self._exact, self._residual = state._compensated(bucket)
        self._mean = torch.empty_like(self._exact)
        self._matrices: list[_Matrix] = []
        # Views of the gradients without compression, and the destinations of their means.
        self._others: list[tuple[Any, Any]] = []
        self._divide(bucket.parameters())

    def begin(self) -> Pending:
        """Send the gradients without compression, and each matrix's P."""
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
                exact.zero_()  # sent without an error
            self._residual.copy_(finite(self._exact))
        return self._buffer.copy_(self._mean)

    def _multiply(self, lefts: list[Any]) -> None:
        """Average each Q, store the product as the mean, and leave the error in the gradient."""
        products = [matrix.exact.T @ left for matrix, left in zip(self._matrices, lefts, strict=True)]
        sent = _joined(products, self._exact)
        for matrix, left, product in zip(self._matrices, lefts, products, strict=True):
            matrix.exact.addmm_(left, product.T, alpha=-1)
        self._state._counts[1] += sent.numel()
        self._group.all_reduce(sent, ReduceOp.AVG)
        rights = _divided(sent, [product.shape for product in products])
        for matrix, left, right in zip(self._matrices, lefts, rights, strict=True):
            # Computed by additions of whole matrices: a library's product may differ between ranks in its last bits.
            torch.mul(left[:, :1], right[:, 0], out=matrix.mean)
            for column in range(1, matrix.columns):
                matrix.mean.add_(left[:, column : column + 1] * right[:, column])
            if self._state.warm_start:
                self._state._keep_factor(matrix.parameter, right)

    def _divide(self, parameters: list[Any]) -> None:
        counts = [parameter.numel() for parameter in parameters]
        pairs = zip(self._exact.split(counts), self._mean.split(counts), strict=True)
        for parameter, (exact, mean) in zip(parameters, pairs, strict=True):
            rows = _rows(parameter)
            columns = exact.numel() // rows
            rank = min(self._state.matrix_approximation_rank, rows, columns)  # the number of columns of P and Q
            saves_enough = (rows + columns) * rank * self._state.min_compression_rate < rows * columns
            if saves_enough:
                self._matrices.append(_Matrix(parameter, exact.view(rows, -1), mean.view(rows, -1), rank))
            else:
                self._others.append((exact, mean))


def orthogonalize(matrix: Any) -> Any:
    """Return orthonormal columns that span those of a matrix, in its dtype; dependent columns become zeros.

    Gram-Schmidt in float64, with each projection done twice. A NaN or infinity makes its column NaN. The bits are the
    same on every processor: a library adds the terms of a product in an order that depends on the processor, the number
    of threads and the alignment of memory, so every sum here is made of additions of whole vectors, in an order that
    depends on the length only.
    """
    result = matrix.double()
    done: list[Any] = []
    for index, given in enumerate(result.unbind(1)):
        # Selected by torch.where, so that no host waits for a GPU. A column of zeros becomes NaN when it is normalized.
        column = torch.where((given == 0).all(), given, _normalized(given / given.abs().max()))
        for _ in range(2 if done else 0):
            for other in done:
                column = column - other * _sum(other * column)
            is_dependent = _sum(column * column).sqrt() <= DEPENDENT
            column = torch.where(is_dependent, torch.zeros_like(column), _normalized(column))
        result[:, index] = column
        done.append(column)
    return result.to(matrix.dtype)


def _normalized(column: Any) -> Any:
    return column / _sum(column * column).sqrt()


def _sum(values: Any) -> Any:
    """Add up a vector by halving it."""
    while len(values) > 1:
        half = len(values) // 2
        folded = values[:half] + values[half : 2 * half]
        if len(values) % 2:
            folded[0] += values[-1]
        values = folded
    return values[0]


def _rows(parameter: Any) -> int:
    """Return the length of the dimension with the largest stride."""
    lengths = [pair for pair in zip(parameter.stride(), parameter.shape, strict=True) if pair[1] > 1]
    return int(max(lengths)[1]) if lengths else 1


def _joined(parts: list[Any], like: Any) -> Any:
    return torch.cat([part.reshape(-1) for part in parts]) if parts else like.new_empty(0)


def _divided(flat: Any, shapes: list[Any]) -> list[Any]:
    counts = [torch.Size(shape).numel() for shape in shapes]
    return [part.view(shape) for part, shape in zip(flat.split(counts), shapes, strict=True)]
