"""Which backend has which operation: a table of what was just run on tensors in CPU memory.

python -m procgroup run --nproc-per-node 2 examples/backend_table.py

A column is a backend's name, given to procgroup or, the last one, to torch.distributed. "yes" means that the right
numbers came out. What "no" means stands below the table, as the backend has put it.
"""

import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed

import procgroup

Call = Callable[[Any, torch.Tensor, torch.Tensor], object]
RANK = int(os.environ["RANK"])
COLUMNS = [(procgroup, name) for name in ("gloo", "procgroup", "mpi", "nccl")] + [(torch.distributed, "procgroup")]
REDUCTIONS = {
    "SUM": [30, 32],
    "PRODUCT": [200, 231],
    "MIN": [10, 11],
    "MAX": [20, 21],
    "BAND": [0, 1],
    "BOR": [30, 31],
    "BXOR": [30, 30],
}


def all_reduce(op: str) -> Call:
    """Return the call that reduces x with this op."""
    return lambda dist, x, y: dist.all_reduce(x, getattr(dist.ReduceOp, op))


# Each call, and what it leaves on rank 0 and on rank 1, whose tensors x are [10, 11] and [20, 21] before: in x, or in
# the four elements of y. None where nothing is promised.
OPERATIONS: dict[str, tuple[Call, list[int] | None, list[int] | None]] = {
    "send, recv": (lambda dist, x, y: dist.send(x, 1) if RANK == 0 else dist.recv(x, 0), [10, 11], [10, 11]),
    "isend, irecv": (
        lambda dist, x, y: (dist.isend(x, 1) if RANK == 0 else dist.irecv(x, 0)).wait(),
        [10, 11],
        [10, 11],
    ),
    "broadcast": (lambda dist, x, y: dist.broadcast(x, src=1), [20, 21], [20, 21]),
    **{f"all_reduce {op}": (all_reduce(op), both, both) for op, both in REDUCTIONS.items()},
    "reduce": (lambda dist, x, y: dist.reduce(x, dst=0), [30, 32], None),
    "all_gather": (lambda dist, x, y: dist.all_gather(list(y.chunk(2)), x), [10, 11, 20, 21], [10, 11, 20, 21]),
    "gather": (
        lambda dist, x, y: dist.gather(x, list(y.chunk(2)) if RANK == 0 else None, dst=0),
        [10, 11, 20, 21],
        None,
    ),
    "scatter": (lambda dist, x, y: dist.scatter(y[:1], list(x.chunk(2)) if RANK == 0 else None, src=0), [10], [11]),
    "reduce_scatter": (lambda dist, x, y: dist.reduce_scatter(y[:1], list(x.chunk(2))), [30], [32]),
    "all_to_all": (lambda dist, x, y: dist.all_to_all(list(y[:2].chunk(2)), list(x.chunk(2))), [10, 20], [11, 21]),
    "barrier": (lambda dist, x, y: dist.barrier(), [10, 11], [20, 21]),
}


def cell(dist: Any, operation: str) -> str:
    """Make one call on both ranks; return "yes", or the refusal."""
    call, *expected = OPERATIONS[operation]
    x, y = torch.tensor([10, 11]) + 10 * RANK, torch.zeros(4, dtype=torch.int64)
    try:
        call(dist, x, y)
    except (NotImplementedError, RuntimeError) as error:
        return str(error)
    result = (y[y != 0] if y.any() else x).tolist()
    assert expected[RANK] in (None, result), (dist.__name__, operation, result)
    return "yes"


def column(dist: Any, backend: str) -> dict[str, str]:
    """Return the cell of each operation."""
    try:
        dist.init_process_group(backend)
    except RuntimeError as error:
        return dict.fromkeys(OPERATIONS, str(error))
    cells = {operation: cell(dist, operation) for operation in OPERATIONS}
    dist.destroy_process_group()
    return cells


table = {(dist.__name__, backend): column(dist, backend) for dist, backend in COLUMNS}
if RANK == 0:
    for number, title in enumerate(("", "backend")):
        print(f"{title:20}" + "".join(f"{head[number]:12}" for head in table))
    for operation in OPERATIONS:
        answers = ["yes" if cells[operation] == "yes" else "no" for cells in table.values()]
        print(f"{operation:20}" + "".join(f"{answer:12}" for answer in answers))
    refusals = {(*head, answer): None for head, cells in table.items() for answer in cells.values() if answer != "yes"}
    print(*(f"{package}, {backend}: {refusal}" for package, backend, refusal in refusals), sep="\n")
