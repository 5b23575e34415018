"""Training steps in CUDA graphs: which ones can be captured.

A replay repeats what was queued on the GPU in the capture, and makes no call of this library. So a step is captured
when the buckets have their order and nothing of an earlier step is left: every replay is then the same step. Flags of
used parameters are exchanged once, in the capture.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

from procgroup.parallel.pytorch import torch


def is_capturing() -> bool:
    """Return whether the current stream of the current GPU is being captured."""
    return bool(torch.cuda.is_current_stream_capturing())


def require_capturable(*, is_settled: bool, has_sparse: bool, outlives_ranks: bool) -> None:
    """Raise RuntimeError for a step that cannot be captured, before any of it is.

    ``is_settled`` says that the buckets have their order.
    """
    if has_sparse:
        reason = "with sparse gradients, whose rows the host counts. Make the Embedding with sparse=False"
    elif outlives_ranks:
        reason = (
            "with on_lost_rank: the graph would belong to the group that a lost rank ends. Leave on_lost_rank at "
            '"raise", or train without graphs'
        )
    elif not is_settled:
        reason = (
            "before the buckets have the order in which gradients arrive. Make two or more steps before the capture"
        )
    else:
        return
    _refuse(reason)


def require_no_join() -> None:
    """Raise RuntimeError in a capture: a forward within a Join is not captured."""
    if is_capturing():
        _refuse("inside of join(), where the ranks announce each step on the host. Capture steps outside of it")


def _refuse(reason: str) -> NoReturn:
    raise RuntimeError(f"DistributedDataParallel: a step cannot be captured in a CUDA graph {reason}.")


def refuse_remainder() -> NoReturn:
    """Raise RuntimeError: the graph has calls that ended, with the other ranks, a backward that had failed."""
    raise RuntimeError(
        "DistributedDataParallel: the backward before has failed on this rank, and this forward has ended it with the "
        "other ranks, in the CUDA graph that is being captured. Drop this graph, and capture the step again."
    )


def require_on_gpu(tensor: Any) -> None:
    """Raise RuntimeError for an input in host memory, in a capture."""
    if not tensor.is_cuda and is_capturing():
        raise RuntimeError(
            "DistributedDataParallel: an input is in host memory, and its copy to the GPU, for which the host waits, "
            "cannot be captured in a CUDA graph. Make the inputs on the GPU before the capture, and copy each batch "
            "into them before its replay: inputs.copy_(batch)."
        )


@contextmanager
def advising_hooks(device: Any) -> Iterator[None]:
    """Say of errors of a communication hook in a capture that it must not wait for the GPU."""
    try:
        yield
    except Exception as error:
        if device.type == "cuda" and is_capturing():
            error.add_note(
                "in a communication hook, in a step that is captured in a CUDA graph: there a hook must not let the "
                "host wait for the GPU, as item(), tolist() and cpu() do"
            )
        raise
