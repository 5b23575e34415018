"""Hooks without a memory: the average as it is, or in 16 bits per element."""

from __future__ import annotations

from functools import partial
from typing import Any

from procgroup.groups.group import ProcessGroup
from procgroup.parallel.communication_hooks.interface import GradBucket, Hook, Pending
from procgroup.parallel.group_choice import group_of
from procgroup.parallel.pytorch import torch
from procgroup.types import ReduceOp


def allreduce_hook(process_group: ProcessGroup | None, bucket: GradBucket) -> Pending:
    """Average the bucket as DistributedDataParallel does without a hook.

    Sent: the elements as they are. Error: that of ``all_reduce`` with AVG, the same bits as without a hook.
    """
    return average(process_group, bucket.buffer())


def fp16_compress_hook(process_group: ProcessGroup | None, bucket: GradBucket) -> Pending:
    """Average the bucket in float16.

    Sent: 2 bytes per element. Error: each rank's element is rounded, by 2^-11 of itself or, below 6.1e-5, by 2^-25; the
    sum is made in float32 and rounded once in the same way, and once more per host where there are several. What is
    above 65519 in magnitude becomes infinite on every rank; NaN and infinities arrive as they are. For gradients of
    more range there is ``bf16_compress_hook``. Raises TypeError for complex gradients.
    """
    return _average_in(torch.float16, process_group, bucket, "fp16_compress_hook")


def bf16_compress_hook(process_group: ProcessGroup | None, bucket: GradBucket) -> Pending:
    """Average the bucket in bfloat16.

    Sent: 2 bytes per element. Error: as with ``fp16_compress_hook``, but by 2^-8 of the element, in all of float32's
    range. Raises TypeError for complex gradients.
    """
    return _average_in(torch.bfloat16, process_group, bucket, "bf16_compress_hook")


def fp16_compress_wrapper(hook: Hook) -> Hook:
    """Return a hook that rounds the bucket to float16 and gives that to ``hook``, whose result is converted back.

    Error: 2^-11 of each rank's element, as with ``fp16_compress_hook``, before that of ``hook``.
    """
    return partial(_call_in, torch.float16, hook)


def bf16_compress_wrapper(hook: Hook) -> Hook:
    """Return a hook that rounds the bucket to bfloat16 and gives that to ``hook``, whose result is converted back.

    Error: 2^-8 of each rank's element before that of ``hook``.
    """
    return partial(_call_in, torch.bfloat16, hook)


def average(process_group: ProcessGroup | None, buffer: Any) -> Pending:
    """Begin to replace a tensor by its average over the ranks."""
    work = group_of(process_group).all_reduce(buffer, ReduceOp.AVG, True)
    assert work is not None
    return Pending(work, lambda _: buffer)


def require_floating_point(bucket: GradBucket, hook: str) -> None:
    """Raise TypeError for gradients that are no real floating-point numbers."""
    if not bucket.buffer().is_floating_point():
        raise TypeError(
            f"{hook} is for real floating-point gradients, and these are {bucket.buffer().dtype}: bucket "
            f"{bucket.index()}, with a parameter of shape {tuple(bucket.parameters()[0].shape)}. Use allreduce_hook, "
            "or no hook, for this model."
        )


def _average_in(dtype: Any, process_group: ProcessGroup | None, bucket: GradBucket, hook: str) -> Pending:
    require_floating_point(bucket, hook)
    buffer = bucket.buffer()
    return Pending(average(process_group, buffer.to(dtype)), buffer.copy_)


def _call_in(dtype: Any, hook: Hook, state: Any, bucket: GradBucket) -> Pending:
    require_floating_point(bucket, "A compress wrapper")
    buffer = bucket.buffer()
    bucket.set_buffer(buffer.to(dtype))

    def restore(result: Any) -> Any:
        found = result[0] if isinstance(result, (list, tuple)) else result
        return buffer.copy_(found.reshape(-1))

    return Pending(hook(state, bucket), restore)
