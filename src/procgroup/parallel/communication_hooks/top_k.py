"""Top-k sparsification: average the largest elements only, with error feedback for the others.

Stich, Cordonnier and Jaggi, "Sparsified SGD with Memory", arXiv 1809.07599.
"""

from __future__ import annotations

import math
from typing import Any, ClassVar

from procgroup.groups.group import ProcessGroup
from procgroup.parallel.communication_hooks.default_hooks import require_floating_point
from procgroup.parallel.communication_hooks.hook_state import CompressionState, finite, working_dtype
from procgroup.parallel.communication_hooks.interface import GradBucket, Pending
from procgroup.parallel.pytorch import torch

_ALL_ELEMENTS = -1
"""In place of the first index: all elements become NaN."""


class TopKState(CompressionState):
    """The state of ``top_k_hook`` on this rank: one float32 number per gradient element.

    The hook sends a fraction ``ratio`` of each bucket's elements, at least one element. ``ratio`` and
    ``use_error_feedback`` must be the same on all ranks. Raises ValueError for a ratio that is not in (0, 1].
    """

    SHARED: ClassVar[tuple[str, ...]] = ("ratio", "use_error_feedback")

    def __init__(
        self, process_group: ProcessGroup | None = None, ratio: float = 0.01, use_error_feedback: bool = True
    ) -> None:
        super().__init__(process_group, use_error_feedback)
        if not 0 < ratio <= 1:
            raise ValueError(f"Expected parameter `ratio` to be above 0 and at most 1, got {ratio}.")
        self.ratio = ratio


def top_k_hook(state: TopKState, bucket: GradBucket) -> Pending:
    """Average the ``k`` elements of the bucket with the largest magnitude on each rank; other elements count as zero.

    Bytes sent: 8 per chosen element (12 for float64) to every other rank. Received are 8 * ``ratio`` * ranks bytes per
    element of the bucket: less than with all_reduce only for a ratio below 1 / ranks. Error of one step: the elements
    that a rank does not send have at most 1 - k / n of the sum of squares. With error feedback they are added up, and
    sent when they are large. NaN and infinities are sent first and not kept; if a rank has more than ``k`` of them, the
    whole bucket becomes NaN on every rank. Values sent in a step that all ranks dropped (BackwardFailed), or for a
    parameter that no rank used in the step, are lost.

    Cost: one selection and about five passes over the bucket, and its memory once more. Raises TypeError for complex
    gradients, CollectiveMismatch for different settings.
    """
    require_floating_point(bucket, "top_k_hook")
    group = state.group()
    buffer = bucket.buffer()
    exact, residual = state._compensated(bucket)
    count = math.ceil(state.ratio * buffer.numel())
    indices = exact.abs().topk(count, sorted=False).indices  # NaN is larger than every number
    sent = _packed(exact, indices)
    if residual is not None:
        residual.copy_(finite(exact.index_fill_(0, indices, 0.0)))
    received = sent.new_empty(group.size(), sent.numel())
    work = group.all_gather_single(received, sent, async_op=True)
    assert work is not None
    return Pending(work, lambda _: buffer.copy_(_mean(received, count, buffer)))


def _packed(exact: Any, indices: Any) -> Any:
    """Return the chosen values and their indices, as bytes."""
    values = exact[indices]
    places = indices.to(torch.int32 if exact.numel() < 1 << 31 else torch.int64)
    if not (values.is_cpu and values.isfinite().any()):  # on GPUs the host would wait for the values
        is_too_few = (~exact.isfinite()).sum() > len(values)
        places[:1].masked_fill_(is_too_few, _ALL_ELEMENTS)
    return torch.cat([values.view(torch.uint8), places.view(torch.uint8)])


def _mean(received: Any, count: int, buffer: Any) -> Any:
    """Return the mean of the chosen values, added in the order of the ranks."""
    total = torch.zeros(buffer.numel(), dtype=working_dtype(buffer), device=buffer.device)
    becomes_nan = torch.zeros((), dtype=torch.bool, device=buffer.device)
    value_bytes = count * total.element_size()
    for row in received:
        values, places = row[:value_bytes], row[value_bytes:]
        at = places.clone().view(torch.int32 if buffer.numel() < 1 << 31 else torch.int64).long()
        becomes_nan |= (at == _ALL_ELEMENTS).any()
        # Divide before adding, so that the sum stays finite.
        total[at] += values.clone().view(total.dtype) / len(received)
    return total.masked_fill_(becomes_nan, torch.nan)
