"""Sparse gradients, such as those of ``Embedding(sparse=True)``: every rank gets the rows of all, they stay sparse."""

from __future__ import annotations

from typing import Any

from procgroup.groups.group import ProcessGroup
from procgroup.parallel.pytorch import torch
from procgroup.types import AnyReduceOp, PremulSum


def sparse_parameters(module: Any) -> frozenset[str]:
    """Return the names of the parameters that will have sparse gradients."""
    return frozenset(
        f"{name}.weight".lstrip(".")
        for name, part in module.named_modules()
        if isinstance(part, (torch.nn.Embedding, torch.nn.EmbeddingBag)) and part.sparse
    )


def average_sparse(group: ProcessGroup, parameter: Any, op: AnyReduceOp) -> Any:
    """Return the average over the ranks of a parameter's sparse gradients, in which no row is there twice."""
    mine = _rows(parameter)
    indices, values = mine.indices().contiguous(), mine.values().contiguous()
    counts = torch.empty(group.size(), dtype=torch.int64)
    group.all_gather_single(counts, torch.tensor([indices.shape[1]]))
    # Rows first, so that what a rank has lies in one piece.
    rows = [torch.empty((count, indices.shape[0]), dtype=torch.int64) for count in counts.tolist()]
    group.all_gather(rows, indices.t().contiguous())
    parts = [torch.empty((count, *values.shape[1:]), dtype=values.dtype) for count in counts.tolist()]
    group.all_gather(parts, values)
    factor = op.factor if isinstance(op, PremulSum) else 1 / group.size()
    total = torch.sparse_coo_tensor(torch.cat(rows).t(), torch.cat(parts), parameter.shape, check_invariants=False)
    return total.coalesce() * factor


def _rows(parameter: Any) -> Any:
    """Return this rank's gradient: made sparse where the parameter is used in another way too, empty without one."""
    gradient = parameter.grad
    if gradient is None:
        no_indices = torch.empty((1, 0), dtype=torch.int64)
        gradient = torch.sparse_coo_tensor(no_indices, parameter.detach()[:0], parameter.shape, check_invariants=False)
    elif not gradient.is_sparse:
        gradient = gradient.to_sparse(1)
    return gradient.coalesce()
