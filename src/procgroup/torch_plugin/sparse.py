"""The sum of sparse tensors, as stock DDP asks for it where an Embedding has sparse gradients.

The ranks gather each other's indices and values, whose number differs, and add up what has the same index. So the
result has as many elements as all ranks' together have indices; nothing is made dense.
"""

from __future__ import annotations

from typing import Any

import torch

from procgroup.errors import ArgumentError
from procgroup.groups.group import ProcessGroup
from procgroup.types import AnyReduceOp, ReduceOp, Timeout


def all_reduce(group: ProcessGroup, tensor: Any, op: AnyReduceOp, timeout: Timeout | None) -> None:
    """Add up the sparse COO tensors of all ranks into each rank's. Blocks, whatever the caller asked for.

    Raises ArgumentError for other ops than SUM and, on every rank, for different shapes; CollectiveMismatch for
    different numbers of dimensions and for different dtypes.
    """
    if op is not ReduceOp.SUM:
        raise ArgumentError(f"all_reduce: sparse tensors can be summed only, got {op!r}")
    mine = tensor.coalesce()
    counts = _counts(group, mine, timeout)
    indices = _gathered(group, mine.indices().t().contiguous(), counts, timeout)
    values = _gathered(group, mine.values().contiguous(), counts, timeout)
    total = torch.sparse_coo_tensor(indices.t(), values, tensor.shape, check_invariants=False)
    tensor.copy_(total.coalesce())


def _counts(group: ProcessGroup, mine: Any, timeout: Timeout | None) -> list[int]:
    """Return how many indices each rank has. Their tensors' shapes must agree."""
    facts = torch.tensor([mine._nnz(), mine.sparse_dim(), *mine.shape], device="cpu")
    everyones = [torch.empty_like(facts) for _ in range(group.size())]
    group.all_gather(everyones, facts, timeout=timeout)
    for rank, others in enumerate(everyones):
        if not torch.equal(others[1:], facts[1:]):
            raise ArgumentError(
                f"all_reduce of sparse tensors on rank {group.rank()}: this rank's has {facts[1]} sparse dimensions "
                f"and shape {tuple(mine.shape)}, that of rank {rank} has {others[1]} and {tuple(others[2:].tolist())}"
            )
    return [int(others[0]) for others in everyones]


def _gathered(group: ProcessGroup, rows: Any, counts: list[int], timeout: Timeout | None) -> Any:
    """Return the rows of all ranks, one rank's after the other's."""
    everyones = torch.empty((sum(counts), *rows.shape[1:]), dtype=rows.dtype, device=rows.device)
    group.all_gather(list(everyones.split(counts)), rows, timeout=timeout)
    return everyones
