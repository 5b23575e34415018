"""Orthonormal columns with the same bits on every processor.

Libraries add the terms of a product in an order that depends on the processor, the number of threads and the alignment
of memory. Here every sum is made of additions of whole vectors, in an order that depends on the length only.
"""

from __future__ import annotations

from typing import Any

DEPENDENT = 1e-7
"""A column of which no more than this part is left, when the earlier ones are taken out, counts as dependent."""


def orthogonalize(matrix: Any) -> Any:
    """Return orthonormal columns that span those of a matrix, in its dtype; dependent columns become zeros.

    Gram and Schmidt's method in float64, each projection done twice. What is not finite makes its column NaN.
    """
    result = matrix.double()
    done: list[Any] = []
    for index, given in enumerate(result.unbind(1)):
        column = _normalized(given / given.abs().max())  # zeros become NaN here
        if (given == 0).all():
            column = given
        for _ in range(2 if done else 0):
            for other in done:
                column = column - other * _sum(other * column)
            if bool(_sum(column * column).sqrt() <= DEPENDENT):
                column = column * 0
                break
            column = _normalized(column)
        result[:, index] = column
        done.append(column)
    return result.to(matrix.dtype)


def _normalized(column: Any) -> Any:
    return column / _sum(column * column).sqrt()


def _sum(values: Any) -> Any:
    """Add up a vector by halves."""
    while len(values) > 1:
        half = len(values) // 2
        folded = values[:half] + values[half : 2 * half]
        if len(values) % 2:
            folded[0] += values[-1]
        values = folded
    return values[0]
