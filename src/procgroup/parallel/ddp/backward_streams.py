"""The streams of GPUs on which the gradients of a backward arrive.

Autograd accumulates each gradient on the stream on which the forward has used the parameter. Mostly that is one stream.
Where a forward uses several, a bucket's gradients arrive on different ones, and the stream on which they are packed
waits for the others.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from procgroup.parallel.pytorch import torch


class BackwardStreams:
    """The streams that one backward has been seen on, by device."""

    def __init__(self) -> None:
        self._seen: dict[Any, set[Any]] = {}

    def see(self, device: Any) -> None:
        """Note the current stream, on which a gradient has arrived."""
        self._seen.setdefault(device, set()).add(torch.cuda.current_stream(device))

    def join(self, device: Any, gradients: Iterable[Any]) -> None:
        """Let the current stream wait for the others; keep the memory of gradients until it has read them."""
        current = torch.cuda.current_stream(device)
        others = self._seen.get(device, set()) - {current}
        for stream in others:
            current.wait_stream(stream)
        for gradient in gradients if others else ():
            if not gradient.is_sparse:
                gradient.record_stream(current)

    def clear(self) -> None:
        """Forget all streams, for the next backward."""
        self._seen.clear()
