"""Arrays that are no plain blocks of memory: the results are right, or the call is refused before anything is sent."""

from __future__ import annotations

from bugs.bug import NO_TORCH, failure, harmless
from bugs.library import array, dist, expect, full, join, repeated

ROWS = [[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]


@harmless()
def column_is_reduced() -> None:
    """The ranks add a column of a matrix, whose elements are not side by side."""
    join()
    matrix = array(ROWS)
    dist.all_reduce(matrix[:, 1])  # BUG
    expect(matrix, [[1.0, 6.0, 3.0], [4.0, 15.0, 6.0]])


@harmless()
def every_second_element_is_reduced() -> None:
    """Rank 0 keeps its numbers apart in memory, the others side by side."""
    join()
    values = array([1.0, 7.0, 2.0, 7.0])[::2] if dist.get_rank() == 0 else array([1.0, 2.0])  # BUG
    dist.all_reduce(values)
    expect(values, [3.0, 6.0])


@harmless()
def order_of_a_matrix_differs() -> None:
    """Rank 1 has a transposed matrix, in Fortran's order, the others one in C's."""
    join()
    matrix = array([[1.0, 3.0], [2.0, 4.0]]).T if dist.get_rank() == 1 else array([[1.0, 2.0], [3.0, 4.0]])  # BUG
    dist.all_reduce(matrix)
    expect(matrix, [[3.0, 6.0], [9.0, 12.0]])


@harmless()
def transposed_matrix_is_broadcast() -> None:
    """Rank 0 broadcasts a transposed matrix into matrices in C's order."""
    join()
    matrix = array(ROWS).T if dist.get_rank() == 0 else full(6, 0.0).reshape(3, 2)  # BUG
    dist.broadcast(matrix, src=0)
    expect(matrix, [[1.0, 4.0], [2.0, 5.0], [3.0, 6.0]])


@harmless()
def columns_are_scattered() -> None:
    """Rank 0 deals out the columns of a matrix."""
    join()
    rank = dist.get_rank()
    matrix, column = array(ROWS), full(2, 0.0)
    dist.scatter(column, [matrix[:, index] for index in range(3)] if rank == 0 else None, src=0)  # BUG
    expect(column, [1.0 + rank, 4.0 + rank])


@harmless()
def column_is_sent() -> None:
    """Rank 0 sends a column, and rank 1 receives it into every second element."""
    join()
    values = array([0.0, 7.0, 0.0, 7.0])
    if dist.get_rank() == 0:
        dist.send(array(ROWS)[:, 2], 1)
    elif dist.get_rank() == 1:
        dist.recv(values[::2], 0)  # BUG
        expect(values, [3.0, 7.0, 6.0, 7.0])


@harmless(left_out=NO_TORCH)
def array_is_reversed() -> None:
    """The ranks add a reversed array, whose strides are negative."""
    join()
    values = array([1.0, 2.0, 3.0])
    dist.all_reduce(values[::-1])  # BUG
    expect(values, [3.0, 6.0, 9.0])


@failure(left_out=NO_TORCH, keeps_arrays=True)
def output_is_read_only() -> None:
    """Rank 1 receives into an array that is read-only, because it is mapped from a file."""
    join()
    values = full(4, 1.0)
    if dist.get_rank() == 1:
        values.flags.writeable = False
    dist.all_reduce(values)  # BUG


@failure(keeps_arrays=True)
def outputs_overlap() -> None:
    """Rank 1 gathers into blocks of one buffer that overlap, because of an offset that is wrong."""
    join()
    stride = 3 if dist.get_rank() == 1 else 4
    buffer = full(12, 0.0)
    outputs = [buffer[stride * rank : stride * rank + 4] for rank in range(3)]
    dist.all_gather(outputs, full(4, 1.0))  # BUG


@failure(keeps_arrays=True)
def output_is_one_element_many_times() -> None:
    """Rank 1 reduces a number that is only shown as an array of four."""
    join()
    number = array([1.0])
    dist.all_reduce(repeated(number, 4) if dist.get_rank() == 1 else full(4, 1.0))  # BUG


@harmless()
def output_is_also_an_input() -> None:
    """The ranks gather into a buffer of which a block is the input."""
    join()
    rank = dist.get_rank()
    buffer = full(6, float(rank))
    dist.all_gather(list(buffer.reshape(3, 2)), buffer[2 * rank : 2 * rank + 2])  # BUG
    expect(buffer, [0.0, 0.0, 1.0, 1.0, 2.0, 2.0])
