"""Stateless hooks: average a bucket in full precision or in 16 bits per element, as PyTorch's default hooks do."""

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

    Bytes sent: those of the elements. Error: that of ``all_reduce`` with AVG; the same bits as without a hook.
    """
    return average(process_group, bucket.buffer())


def fp16_compress_hook(process_group: ProcessGroup | None, bucket: GradBucket) -> Pending:
    """Average the bucket in float16.

    Bytes sent: 2 per element. Error: each rank's element is rounded with a relative error of 2^-11 or, below 6.1e-5, an
    absolute error of 2^-25. The sum is computed in float32 and rounded in the same way once, and once more per host in
    a group that spans hosts. Magnitudes above 65519 become infinite on every rank; NaN and infinities are kept. For
    gradients with a larger range use ``bf16_compress_hook``. Raises TypeError for complex gradients.
    """
    return _average_in(torch.float16, process_group, bucket, "fp16_compress_hook")


def bf16_compress_hook(process_group: ProcessGroup | None, bucket: GradBucket) -> Pending:
    """Average the bucket in bfloat16.

    Bytes sent: 2 per element. Error: as with ``fp16_compress_hook``, but with a relative error of 2^-8 in the whole
    range of float32. Raises TypeError for complex gradients.
    """
    return _average_in(torch.bfloat16, process_group, bucket, "bf16_compress_hook")


def fp16_compress_wrapper(hook: Hook) -> Hook:
    """Return a hook that calls ``hook`` with the bucket in float16 and converts the result back.

    Error: a relative error of 2^-11 of each rank's element, as with ``fp16_compress_hook``, plus that of ``hook``.
    """
    return partial(_call_in, torch.float16, hook)


def bf16_compress_wrapper(hook: Hook) -> Hook:
    """Return a hook that calls ``hook`` with the bucket in bfloat16 and converts the result back.

    Error: a relative error of 2^-8 of each rank's element, plus that of ``hook``.
    """
    return partial(_call_in, torch.bfloat16, hook)


def average(process_group: ProcessGroup | None, buffer: Any) -> Pending:
    """Start an in-place average of a tensor over the ranks."""
    work = group_of(process_group).all_reduce(buffer, ReduceOp.AVG, True)
    assert work is not None
    return Pending(work, lambda _: buffer)


def require_floating_point(bucket: GradBucket, hook: str) -> None:
    """Raise TypeError unless the gradients are real floating-point numbers."""
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
