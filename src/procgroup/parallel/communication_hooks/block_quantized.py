"""Block-quantized averages: int8 elements in blocks that share a scale, with error feedback.

Each rank owns one *shard* of the bucket. Every rank quantizes its gradients and sends each shard to its owner. The
owner adds the shards in float32, quantizes the mean and sends it to all ranks. An element is thus sent twice, at one
byte, and rounded twice. Each rank keeps the error of its first rounding, and the owner that of the second.

The blocks are those of Dettmers et al., "8-bit Optimizers via Block-wise Quantization", arXiv 2110.02861; error
feedback for both roundings is that of Tang et al., "DoubleSqueeze", arXiv 1905.05957.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from procgroup.groups.group import ProcessGroup
from procgroup.parallel.communication_hooks.default_hooks import require_floating_point
from procgroup.parallel.communication_hooks.hook_state import CompressionState, finite, require_at_least, working_dtype
from procgroup.parallel.communication_hooks.interface import GradBucket, Pending
from procgroup.parallel.pytorch import torch

LARGEST_CODE = 127
SCALE_BYTES = 4


class BlockQuantizedState(CompressionState):
    """The state of ``block_quantized_hook`` on this rank: a float32 number per gradient element and per shard element.

    ``block_size`` and ``use_error_feedback`` must be the same on all ranks. Raises ValueError for a block size below 1.
    """

    SHARED: ClassVar[tuple[str, ...]] = ("block_size", "use_error_feedback")

    def __init__(
        self, process_group: ProcessGroup | None = None, block_size: int = 256, use_error_feedback: bool = True
    ) -> None:
        super().__init__(process_group, use_error_feedback)
        require_at_least(1, block_size=block_size)
        self.block_size = block_size
        # By the parameters of a bucket: the offset of this rank's shard, and the rounding error of its mean multiplied
        # by the number of ranks.
        self._shard_errors: dict[tuple[Any, ...], tuple[int, Any]] = {}

    def state_dict(self, model: Any) -> dict[str, Any]:
        """Return this rank's error feedback by the parameters' names in ``model``. It differs between ranks."""
        self._merge_shard_errors()
        return super().state_dict(model)

    def load_state_dict(self, state: Mapping[str, Any], model: Any) -> None:
        """Load a ``state_dict`` of the same number of ranks. Raises ValueError when it does not fit the model."""
        super().load_state_dict(state, model)
        self._shard_errors.clear()

    def _compensated(self, bucket: GradBucket) -> tuple[Any, Any]:
        if bucket not in self._residuals:
            self._merge_shard_errors()
        return super()._compensated(bucket)

    def _merge_shard_errors(self) -> None:
        """Add the errors of shards to this rank's residuals. With other buckets this rank owns other shards."""
        for parameters, (begin, lost) in self._shard_errors.items():
            flat = self._residuals.flat(parameters)
            part = flat[begin : begin + lost.numel()]
            part += lost[: part.numel()]
        self._shard_errors.clear()


def block_quantized_hook(state: BlockQuantizedState, bucket: GradBucket) -> Pending:
    """Average the bucket in int8, with one float32 scale per block.

    Bytes sent: 1 + 4 / ``block_size`` per element, twice; shards are padded to whole blocks. Error of one step: at most
    1 / 254 of the largest magnitude in the block, averaged over the ranks, plus 1 / 254 of the largest magnitude in the
    block of the mean. Error feedback sends the error in later steps: the sum of all averages differs from the sum of
    the exact means by at most one such error, after any number of steps. A NaN or infinity makes its block NaN on every
    rank and is not kept. Values sent in a step that all ranks dropped (BackwardFailed) are lost.

    Cost: about ten passes over the bucket and three times its memory. Raises TypeError for complex gradients,
    CollectiveMismatch for different settings.
    """
    require_floating_point(bucket, "block_quantized_hook")
    group = state.group()
    buffer = bucket.buffer()
    exact, residual = state._compensated(bucket)
    shards = _in_blocks(exact, group.size(), state.block_size)
    codes, scales = quantize(shards)
    if residual is not None:
        residual.copy_(_lost(shards, codes, scales).view(-1)[: buffer.numel()])
    sent = _packed(codes, scales)
    received = torch.empty_like(sent)
    work = group.all_to_all_single(received, sent, async_op=True)
    assert work is not None
    return Pending(work, lambda _: _share_mean(state, group, bucket.parameters(), received, buffer))


def quantize(blocks: Any) -> tuple[Any, Any]:
    """Return the int8 codes and the scales of blocks. The last dimension is that of a block."""
    scales = (blocks.abs().amax(-1, keepdim=True) / LARGEST_CODE).float()
    scales.masked_fill_(~scales.isfinite(), torch.nan)
    codes = torch.nan_to_num_(blocks / scales, nan=0.0).round_().clamp_(-LARGEST_CODE, LARGEST_CODE)
    return codes.to(torch.int8), scales


def dequantize(codes: Any, scales: Any, dtype: Any) -> Any:
    """Return the numbers for codes and scales."""
    return codes.to(dtype) * scales.to(dtype)


def _lost(blocks: Any, codes: Any, scales: Any) -> Any:
    """Subtract the quantized values from the blocks: the rest is the rounding error."""
    blocks -= dequantize(codes, scales, blocks.dtype)
    # Only on CPUs a look at the scales is cheaper than a pass: on GPUs the host would wait for them.
    return blocks if blocks.is_cpu and scales.isfinite().all() else finite(blocks)


def _share_mean(state: BlockQuantizedState, group: ProcessGroup, parameters: Any, received: Any, buffer: Any) -> Any:
    """Average this rank's shard, send the mean to all ranks and receive those of the other shards."""
    size, dtype = group.size(), working_dtype(buffer)
    codes, scales = _unpacked(received, state.block_size)
    mean = torch.zeros(codes.shape[1:], dtype=dtype, device=codes.device)
    for one, scale in zip(codes, scales, strict=True):
        mean += dequantize(one, scale.to(dtype) / size, dtype)  # divide before adding, so that the sum stays finite
    if state.use_error_feedback:
        begin, lost = state._shard_errors.get(tuple(parameters), (group.rank() * mean.numel(), None))
        if lost is not None:
            mean += lost.view_as(mean) / size
    codes, scales = quantize(mean)
    if state.use_error_feedback:
        error = _lost(mean, codes, scales).view(-1).mul_(size)
        if lost is None:
            state._shard_errors[tuple(parameters)] = begin, error
        else:
            lost.copy_(error)  # where a captured step reads it
    whole = torch.empty_like(received)
    group.all_gather_single(whole, _packed(codes.unsqueeze(0), scales.unsqueeze(0)))
    return buffer.copy_(dequantize(*_unpacked(whole, state.block_size), dtype).view(-1)[: buffer.numel()])


def _in_blocks(flat: Any, size: int, block_size: int) -> Any:
    """Return the elements in the shape (ranks, blocks, elements of a block), padded with zeros."""
    blocks = -(-flat.numel() // (size * block_size))
    padded = torch.nn.functional.pad(flat, (0, size * blocks * block_size - flat.numel()))
    return padded.view(size, blocks, block_size)


def _packed(codes: Any, scales: Any) -> Any:
    """Return the codes and scales of each shard as one row of bytes."""
    shards = len(codes)
    return torch.cat([codes.view(torch.uint8).view(shards, -1), scales.view(torch.uint8).view(shards, -1)], dim=1)


def _unpacked(rows: Any, block_size: int) -> tuple[Any, Any]:
    blocks = rows.shape[1] // (block_size + SCALE_BYTES)
    codes, scales = rows.split([blocks * block_size, blocks * SCALE_BYTES], dim=1)
    shape = len(rows), blocks, block_size
    return codes.view(torch.int8).reshape(shape), scales.contiguous().view(torch.float32).view(*shape[:2], 1)
