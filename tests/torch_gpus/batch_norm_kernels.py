"""The kernels of torch.nn.SyncBatchNorm, of which torch has none for CPUs: made of other operations."""

from __future__ import annotations

from typing import Any

import torch

_KERNELS = torch.library.Library("aten", "IMPL")


def _by_channel(tensor: Any) -> Any:
    """Return a row of float32 for each channel."""
    return tensor.float().transpose(0, 1).reshape(tensor.shape[1], -1)


def _spread(values: Any, like: Any) -> Any:
    """Return one value for each channel in a shape that is broadcast to that of a tensor."""
    return values.float().reshape(1, -1, *[1] * (like.dim() - 2))


def batch_norm_stats(given: Any, eps: float) -> Any:
    rows = _by_channel(given)
    mean = rows.mean(1)
    return mean, (rows.var(1, unbiased=False) + eps).rsqrt()


def batch_norm_gather_stats_with_counts(
    given: Any, mean: Any, invstd: Any, running_mean: Any, running_var: Any, momentum: float, eps: float, counts: Any
) -> Any:
    shares = counts.float().reshape(-1, 1)
    count = shares.sum()
    whole = (mean * shares).sum(0) / count
    variance = ((invstd.square().reciprocal() - eps + (mean - whole).square()) * shares).sum(0) / count
    if running_mean is not None:
        running_mean.mul_(1 - momentum).add_(whole, alpha=momentum)
    if running_var is not None:
        running_var.mul_(1 - momentum).add_(variance * count / (count - 1), alpha=momentum)
    return whole, (variance + eps).rsqrt()


def batch_norm_elemt(given: Any, weight: Any, bias: Any, mean: Any, invstd: Any, eps: float) -> Any:
    result = (given.float() - _spread(mean, given)) * _spread(invstd, given)
    if weight is not None:
        result = result * _spread(weight, given)
    if bias is not None:
        result = result + _spread(bias, given)
    return result.to(given.dtype).contiguous(memory_format=torch._prims_common.suggest_memory_format(given))


def batch_norm_backward_reduce(
    grad_out: Any, given: Any, mean: Any, invstd: Any, weight: Any, input_g: bool, weight_g: bool, bias_g: bool
) -> Any:
    gradients = _by_channel(grad_out)
    total = gradients.sum(1)
    with_inputs = (gradients * (_by_channel(given) - mean.reshape(-1, 1))).sum(1)
    dtype = given.dtype if weight is None else weight.dtype
    return total, with_inputs, (with_inputs * invstd).to(dtype), total.to(dtype)


def batch_norm_backward_elemt(
    grad_out: Any, given: Any, mean: Any, invstd: Any, weight: Any, sum_dy: Any, sum_dy_xmu: Any, count: Any
) -> Any:
    number = count.sum().float()
    scale = _spread(invstd if weight is None else invstd * weight.float(), given)
    from_inputs = (given.float() - _spread(mean, given)) * _spread(invstd.square() * sum_dy_xmu / number, given)
    return ((grad_out.float() - _spread(sum_dy / number, given) - from_inputs) * scale).to(given.dtype)


def register() -> None:
    """Let torch's device "cuda" have these kernels."""
    named = (batch_norm_stats, batch_norm_gather_stats_with_counts, batch_norm_elemt)
    for kernel in (*named, batch_norm_backward_reduce, batch_norm_backward_elemt):
        _KERNELS.impl(kernel.__name__, kernel, "CUDA")
