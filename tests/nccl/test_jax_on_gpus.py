"""The handler of jax.jit on GPUs, with call frames made by hand and with stand-ins: XLA itself has no GPU here."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from nccl import gpu_arrays
from nccl.gpu_arrays import GpuArray, new_stream

import procgroup as dist
from procgroup.functional.operations import AllReduce
from world import run

pytest.importorskip("jax")
if gpu_arrays.MISSING:
    pytest.skip(gpu_arrays.MISSING, allow_module_level=True)

GPUS = {"PROCGROUP_STAND_IN_GPUS": "4"}


class Compiled:
    """An all_reduce of a compiled function, on arrays like these."""

    def __init__(self, stream: int, *like: Any) -> None:
        from nccl.xla_frames import Handler

        from procgroup.functional import traced

        group = dist.group.WORLD
        assert group is not None
        call = traced.TracedCall(AllReduce(dist.ReduceOp.SUM), group, 0)
        self._call = traced._compile(call, like, like)
        self._handle = Handler(on_gpu=True)
        self._stream = stream

    def __call__(self, *given: Any) -> tuple[list[Any], str]:
        """Return the results, and the text of the error."""
        arrays = [GpuArray.of(one, stream=self._stream) for one in given]
        results = [GpuArray.of(np.full_like(one, -1), stream=self._stream) for one in given]
        error = self._handle(self._call.number, arrays, results, self._stream)
        return [result.get() for result in results], error


def play_path(rank: int, size: int, backend: str) -> None:
    gpu_arrays.start()
    dist.init_process_group(backend, timeout=30)
    group = dist.group.WORLD
    assert group is not None
    like = [np.full(3, rank + 1, np.float32), np.full((2, 2), rank + 1, np.int16), np.zeros(0, np.float32)]
    total = size * (size + 1) // 2
    call = Compiled(new_stream(), *like)

    def check() -> None:
        results, error = call(*like)
        assert error == ""
        assert [result.tolist() for result in results] == [[total] * 3, [[total] * 2] * 2, []]

    for _ in range(3):
        check()
    seen: list[str] = []
    remove = group.add_hook(lambda op, arguments: seen.append(op))
    check()  # by Python, on copies in host memory
    assert seen == ["all_reduce"] * 2  # one for each dtype
    remove()
    check()
    never_called = Compiled(new_stream(), *like)
    dist.destroy_process_group()
    for late in (call, never_called):
        _, error = late(*like)
        assert error.startswith("GroupDestroyed: "), error


@pytest.mark.parametrize("backend", ["nccl", "gloo"])
def test_handler_by_nccl_and_through_host_memory(backend: str) -> None:
    run(play_path, 2, args=(backend,), timeout=250, environment=GPUS)


def play_errors(rank: int, size: int) -> None:
    from procgroup.functional import traced

    gpu_arrays.start()
    dist.init_process_group("nccl", timeout=30)
    ones = np.ones(3 + rank, np.float32)
    call = Compiled(new_stream(), ones)
    _, error = Compiled(new_stream(), ones[:3])(ones[:3])
    assert error == ""

    # Another GPU than that of the first call: nothing is sent.
    gpu_arrays.start(2)
    _, error = Compiled(new_stream(2), ones)(ones)
    assert error.startswith("ArgumentError: all_reduce: the arrays are on GPU 2, but this group uses GPU"), error
    assert isinstance(traced._raised[-1], dist.ArgumentError)
    gpu_arrays.start()

    # Of other sizes: the next call raises it, where the first has returned by then.
    for _ in range(1000):
        _, error = call(ones)
        if error:
            break
    assert "called all_reduce(SUM) of 3 float32" in error, error
    quoted = next(one for one in reversed(traced._raised) if traced._quoted(one) in error)
    assert isinstance(quoted, dist.DistError)
    dist.destroy_process_group()


def test_errors_of_the_handler_are_kept() -> None:
    run(play_errors, 2, timeout=250, environment=GPUS)
