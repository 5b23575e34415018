"""Averages in one byte per element: blocks of integers that share a scale, with error feedback.

Each rank owns one *shard* of the bucket. Every rank quantises its gradients and sends each shard to its owner; the
owner adds what has come in float32, and quantises the mean, which it sends to all. So an element crosses twice, at one
byte, and is rounded twice: what the first rounding loses is kept by each rank, what the second loses by the owner.

The blocks are those of Dettmers et al., "8-bit Optimizers via Block-wise Quantization", arXiv 2110.02861; error
feedback on both sides that of Tang et al., "DoubleSqueeze", arXiv 1905.05957.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from procgroup.groups.group import ProcessGroup
from procgroup.parallel.communication_hooks.default_hooks import require_floating_point
from procgroup.parallel.communication_hooks.hook_state import HookState
from procgroup.parallel.communication_hooks.interface import GradBucket, Pending
from procgroup.parallel.communication_hooks.residuals import Residuals, finite, working_dtype
from procgroup.parallel.pytorch import torch

LARGEST_CODE = 127
SCALE_BYTES = 4


class BlockQuantizedState(HookState):
    """What ``block_quantized_hook`` keeps on this rank: one number of float32 per gradient element, and a shard more.

    The same on all ranks: ``block_size``, ``use_error_feedback``. Raises ValueError for a block size below 1.
    """

    SHARED: ClassVar[tuple[str, ...]] = ("block_size", "use_error_feedback")

    def __init__(
        self, process_group: ProcessGroup | None = None, block_size: int = 256, use_error_feedback: bool = True
    ) -> None:
        super().__init__(process_group)
        if block_size < 1:
            raise ValueError(f"Expected parameter `block_size` to be at least 1, got {block_size}.")
        self.block_size = block_size
        self.use_error_feedback = use_error_feedback
        self._residuals = Residuals()
        # By the parameters of a bucket: where this rank's shard begins, and what its mean has lost, times the ranks.
        self._of_shards: dict[tuple[Any, ...], tuple[int, Any]] = {}

    def state_dict(self, model: Any) -> dict[str, Any]:
        """Return this rank's error feedback by the parameters' names in ``model``; every rank has its own."""
        self._take_back_shards()
        return self._residuals.state_dict(model)

    def load_state_dict(self, state: Mapping[str, Any], model: Any) -> None:
        """Take over what ``state_dict`` gave, on as many ranks. Raises ValueError where the model does not fit."""
        self._residuals.load_state_dict(state, model)
        self._of_shards.clear()

    def _residual(self, bucket: GradBucket) -> Any:
        if not self._residuals.has(bucket):
            self._take_back_shards()
        return self._residuals.of(bucket)

    def _take_back_shards(self) -> None:
        """Add to this rank's own residuals what its shards have lost: in other buckets it owns other shards."""
        for parameters, (begin, lost) in self._of_shards.items():
            flat = self._residuals.flat(parameters)
            part = flat[begin : begin + lost.numel()]
            part += lost[: part.numel()]
        self._of_shards.clear()


def block_quantized_hook(state: BlockQuantizedState, bucket: GradBucket) -> Pending:
    """Average the bucket in int8, with one scale of float32 per block.

    Sent: 1 + 4 / ``block_size`` bytes per element, twice, for whole blocks and as many of them for each rank. Error of
    one step: at most 1 / 254 of the largest magnitude in the block, averaged over the ranks, and again 1 / 254 of the
    largest in the block of the mean. With error feedback it is sent later: the sum of all averages differs from that of
    the exact means by no more than one such error, whatever the number of steps. A NaN or infinity makes its block NaN
    on every rank, and is not kept. What was sent in a step that all ranks dropped (BackwardFailed) is lost.

    Cost: some ten passes over the bucket and three times its memory. Raises TypeError for complex gradients,
    CollectiveMismatch for different settings.
    """
    require_floating_point(bucket, "block_quantized_hook")
    group = state.group()
    buffer = bucket.buffer()
    exact = buffer.to(working_dtype(buffer), copy=True)
    residual = state._residual(bucket) if state.use_error_feedback else None
    if residual is not None:
        exact += residual
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
    """Return the codes, in int8, and the scales of blocks, which are the last dimension."""
    scales = (blocks.abs().amax(-1, keepdim=True) / LARGEST_CODE).float()
    scales.masked_fill_(~scales.isfinite(), torch.nan)
    codes = torch.nan_to_num_(blocks / scales, nan=0.0).round_().clamp_(-LARGEST_CODE, LARGEST_CODE)
    return codes.to(torch.int8), scales


def dequantize(codes: Any, scales: Any, dtype: Any) -> Any:
    """Return the numbers that codes and scales stand for."""
    return codes.to(dtype) * scales.to(dtype)


def _lost(blocks: Any, codes: Any, scales: Any) -> Any:
    """Leave in blocks what codes and scales do not say of them."""
    blocks -= dequantize(codes, scales, blocks.dtype)
    return blocks if scales.isfinite().all() else finite(blocks)


def _share_mean(state: BlockQuantizedState, group: ProcessGroup, parameters: Any, received: Any, buffer: Any) -> Any:
    """Average this rank's shard of all ranks, send it to all and receive the other shards."""
    size, dtype = group.size(), working_dtype(buffer)
    codes, scales = _unpacked(received, state.block_size)
    mean = torch.zeros(codes.shape[1:], dtype=dtype)
    for one, scale in zip(codes, scales, strict=True):
        mean += dequantize(one, scale.to(dtype) / size, dtype)  # divided first: the sum stays finite
    if state.use_error_feedback:
        begin, lost = state._of_shards.get(tuple(parameters), (group.rank() * mean.numel(), None))
        if lost is not None:
            mean += lost.view_as(mean) / size
    codes, scales = quantize(mean)
    if state.use_error_feedback:
        state._of_shards[tuple(parameters)] = begin, _lost(mean, codes, scales).view(-1).mul_(size)
    whole = torch.empty_like(received)
    group.all_gather_single(whole, _packed(codes.unsqueeze(0), scales.unsqueeze(0)))
    return buffer.copy_(dequantize(*_unpacked(whole, state.block_size), dtype).view(-1)[: buffer.numel()])


def _in_blocks(flat: Any, size: int, block_size: int) -> Any:
    """Return the elements as (ranks, blocks, elements of a block), with zeros at the end."""
    blocks = -(-flat.numel() // (size * block_size))
    padded = torch.nn.functional.pad(flat, (0, size * blocks * block_size - flat.numel()))
    return padded.view(size, blocks, block_size)


def _packed(codes: Any, scales: Any) -> Any:
    """Return codes and scales of each shard as one row of bytes."""
    shards = len(codes)
    return torch.cat([codes.view(torch.uint8).view(shards, -1), scales.view(torch.uint8).view(shards, -1)], dim=1)


def _unpacked(rows: Any, block_size: int) -> tuple[Any, Any]:
    blocks = rows.shape[1] // (block_size + SCALE_BYTES)
    codes, scales = rows.split([blocks * block_size, blocks * SCALE_BYTES], dim=1)
    shape = len(rows), blocks, block_size
    return codes.view(torch.int8).reshape(shape), scales.contiguous().view(torch.float32).view(*shape[:2], 1)
