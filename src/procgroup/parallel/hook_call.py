"""A communication hook as it is called: with a bucket, and with what it returns looked at before it is believed."""

from __future__ import annotations

from typing import Any

from procgroup.parallel.buckets import Bucket
from procgroup.parallel.grad_bucket import GradBucket, Hook
from procgroup.parallel.pytorch import torch


class HookCall:
    """A hook with its state."""

    def __init__(self, state: Any, hook: Hook) -> None:
        self._state = state
        self._hook = hook

    def begin(self, bucket: Bucket, is_last: bool) -> Any:
        """Call the hook; return what it wants to be waited for. Raises TypeError for what has no ``wait``."""
        pending = self._hook(self._state, GradBucket(bucket.index, bucket.buffer, bucket.places, is_last))
        if not callable(getattr(pending, "wait", None)):
            raise TypeError(
                f"{self} returned {_shown(pending)}; expected something with wait() that gives the averaged bucket, "
                "such as a Future of procgroup or of torch."
            )
        return pending

    def finish(self, bucket: Bucket) -> None:
        """Wait, and take what has come for the bucket's average. Raises TypeError for what cannot be that."""
        result = bucket.pending.wait()
        if isinstance(result, (list, tuple)) and result:
            result = result[0]
        if not isinstance(result, torch.Tensor) or result.numel() != bucket.buffer.numel():
            raise TypeError(
                f"{self} gave {_shown(result)} for {bucket}; expected a tensor of {bucket.buffer.numel()} elements. "
                "Of a Work return get_future(), which gives the tensors of the call."
            )
        bucket.replace(result)

    def __str__(self) -> str:
        return f"Communication hook {getattr(self._hook, '__name__', repr(self._hook))}"


def _shown(value: Any) -> str:
    return f"a tensor of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else repr(value)
