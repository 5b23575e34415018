"""SyncBatchNorm: batch normalization with the statistics of the batches of all ranks, on CPUs and GPUs.

With n_r, m_r and v_r the number of values per channel on rank r, their mean and their variance, the ranks gather these
once, and all compute::

    n = sum(n_r)        mean = sum(n_r m_r) / n        variance = sum(n_r v_r + n_r (m_r - mean)^2) / n

With x^ = (x - mean) / sqrt(variance + eps), the gradient of the input for a gradient dy of the output is::

    dx = weight / sqrt(variance + eps) * (dy - sum(dy) / n - x^ sum(dy x^) / n)

The two sums over all ranks are one all_reduce. Those of this rank are the gradients of the bias and the weight, which
DistributedDataParallel averages as those of other parameters. Counts and statistics stay where the input is: no host
waits for a GPU.
"""

from __future__ import annotations

import copy
from typing import Any

from procgroup.arrays.untraced import untraced
from procgroup.groups.group import ProcessGroup
from procgroup.parallel.group_choice import default_group, group_of
from procgroup.parallel.pytorch import torch
from procgroup.types import ReduceOp


class SyncBatchNorm(torch.nn.SyncBatchNorm):  # type: ignore[misc]
    """Batch normalization over the batches of all ranks of a group, with the arguments of ``torch.nn.SyncBatchNorm``.

    Inputs have two or more dimensions, the second one of ``num_features`` channels; ranks may have batches of different
    sizes, also empty ones. While it trains, a forward and its backward are collectives: all ranks of
    ``process_group``, by default of all, call the layers of a model in the same order. In ``eval()`` it makes no
    calls. Without a group it is the normalization of one process. Raises ValueError for other shapes, and for a group
    of one rank with one value per channel.
    """

    def forward(self, input: Any) -> Any:  # noqa: A002 - torch's name
        """Normalize a batch; while it trains, with the statistics of all ranks, which it also keeps."""
        self._check_input_dim(input)
        self._check_non_zero_input_channels(input)
        group = _group_of(self.process_group) if self.training else None
        if group is not None and group.size() > 1:
            return self._normalize(input, group)
        return torch.nn.modules.batchnorm._BatchNorm.forward(self, input)

    @untraced
    def _normalize(self, inputs: Any, group: ProcessGroup) -> Any:
        mean, variance, count = _statistics(inputs, group)
        if self.track_running_stats and self.running_mean is not None:
            with torch.no_grad():
                self._keep(mean, variance, count)
        wide = _wide(inputs)
        parameters = [None if each is None else each.to(wide) for each in (self.weight, self.bias)]
        if self.weight is None:
            parameters = [mean.new_ones(mean.shape, dtype=wide), mean.new_zeros(mean.shape, dtype=wide)]
        return _Normalize.apply(inputs, *parameters, mean.to(wide), variance.to(wide), count, self.eps, group)

    def _keep(self, mean: Any, variance: Any, count: Any) -> None:
        """Update the running statistics, as torch's layers do without autograd's version counter."""
        self.num_batches_tracked.data.add_(1)
        factor = self.num_batches_tracked.double().reciprocal()
        if self.momentum is not None:
            factor = torch.full_like(factor, self.momentum)
        factor = factor * (count > 0)  # unchanged by batches that are all empty
        unbiased = variance * count / (count - 1).clamp(min=1)
        for running, found in ((self.running_mean, mean), (self.running_var, unbiased)):
            running.data.copy_(running.double().lerp(found, factor))

    @classmethod
    def convert_sync_batchnorm(cls, module: Any, process_group: Any = None) -> Any:
        """Return a module with its BatchNorm layers replaced by layers of this class, over a group.

        A converted layer has the parameters, the buffers and the mode of the one that it replaces.
        """
        made = module
        if isinstance(module, torch.nn.modules.batchnorm._BatchNorm):
            made = cls(
                module.num_features,
                module.eps,
                module.momentum,
                module.affine,
                module.track_running_stats,
                process_group,
            )
            made._parameters.update(module._parameters)
            made._buffers.update(module._buffers)
            made.training = module.training
            if hasattr(module, "qconfig"):
                made.qconfig = module.qconfig
        for name, child in module.named_children():
            made.add_module(name, cls.convert_sync_batchnorm(child, process_group))
        return made

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        made = type(self).__new__(type(self))
        memo[id(self)] = made
        memo[id(self.process_group)] = self.process_group  # a copy has the same group
        made.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return made


def adopt_sync_batch_norms(module: Any, process_group: Any) -> None:
    """Make the layers of ``torch.nn.SyncBatchNorm`` in a module layers of SyncBatchNorm.

    Those without a group get ``process_group``. Torch's forward needs torch.distributed, and refuses CPUs. Raises
    ValueError for a class derived from torch's, and for a group of another backend.
    """
    for name, part in module.named_modules():
        if not isinstance(part, torch.nn.SyncBatchNorm):
            continue
        if type(part) is torch.nn.SyncBatchNorm:
            part.__class__ = SyncBatchNorm
        if not isinstance(part, SyncBatchNorm):
            raise ValueError(
                f"{name or 'the module'} is a {type(part).__name__}, which is derived from torch.nn.SyncBatchNorm and "
                "would normalize by torch.distributed. Derive it from procgroup.parallel.SyncBatchNorm."
            )
        if part.process_group is None:
            part.process_group = process_group
        _group_of(part.process_group)


def _group_of(process_group: Any) -> ProcessGroup | None:
    """Return the group of a layer; None where there is not a group."""
    return None if process_group is None and default_group() is None else group_of(process_group)


def _wide(inputs: Any) -> Any:
    """Return the dtype of statistics and parameters beside an input: float64 for float64, otherwise float32."""
    return torch.float64 if inputs.dtype is torch.float64 else torch.float32


def _statistics(inputs: Any, group: ProcessGroup) -> tuple[Any, Any, Any]:
    """Return the mean and the variance of all ranks' values by channel, and their number per channel, in float64."""
    with torch.no_grad():
        channels = inputs.shape[1]
        own = torch.zeros(2 * channels + 1, dtype=torch.float64, device=inputs.device)
        if inputs.numel():
            dimensions = [0, *range(2, inputs.dim())]
            variance, mean = torch.var_mean(inputs.detach().to(_wide(inputs)), dimensions, correction=0)
            own[:channels].copy_(mean)
            own[channels:-1].copy_(variance)
            own[-1:].fill_(inputs.numel() // channels)
        rows = own.new_empty(group.size(), len(own))
        group.all_gather_single(rows, own)
        means, variances, counts = rows.split([channels, channels, 1], dim=1)
        count = counts.sum()
        divisor = count.clamp(min=1)
        mean = (counts * means).sum(0) / divisor
        variance = (counts * (variances + (means - mean).square())).sum(0) / divisor
    return mean, variance, count


class _Normalize(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(
        ctx: Any, inputs: Any, weight: Any, bias: Any, mean: Any, variance: Any, count: Any, eps: float, group: Any
    ) -> Any:
        ctx.save_for_backward(inputs, weight, mean, variance, count)
        ctx.eps, ctx.group = eps, group
        return torch.batch_norm(inputs, weight, bias, mean, variance, False, 0.0, eps, False)

    @staticmethod
    @torch.autograd.function.once_differentiable  # type: ignore[untyped-decorator]
    @untraced
    def backward(ctx: Any, gradient: Any) -> Any:
        inputs, weight, mean, variance, count = ctx.saved_tensors
        result = torch.zeros_like(inputs)
        of_weight, of_bias = torch.zeros_like(mean), torch.zeros_like(mean)
        if inputs.numel():
            result, of_weight, of_bias = torch.ops.aten.native_batch_norm_backward(
                gradient, inputs, weight, mean, variance, None, None, False, ctx.eps, [True, True, True]
            )
        if ctx.needs_input_grad[0]:
            sums = torch.stack([of_bias, of_weight])
            ctx.group.all_reduce(sums, ReduceOp.SUM)
            of_mean, of_scale = sums / count.clamp(min=1).to(sums.dtype)
            inverse = (variance + ctx.eps).rsqrt()
            # What is subtracted from weight / sqrt(variance + eps) * dy is a line in x for each channel.
            slope = -weight * inverse * inverse * of_scale
            offset = -weight * inverse * of_mean - slope * mean
            shape = [1, len(mean), *[1] * (inputs.dim() - 2)]
            result = (result + inputs * slope.view(shape) + offset.view(shape)).to(inputs.dtype)
        return result, of_weight, of_bias, None, None, None, None, None
