"""The rank's side of the benchmark: wait for a command on the driver's socket, measure, answer, wait again.

Runs inside each peer's own environment, so it needs the standard library and NumPy only. Its protocol is
described in ``procgroup.diagnostics.bench.peer``. What a peer adds is one table, from the name of an
operation to a function that takes ``BenchArrays`` and returns the call to measure. Of the peer's arguments these count
here: ``--dtype NAME``, the element type, and ``--pin``.
"""

from __future__ import annotations

import gc
import itertools
import os
import select
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np

Call = Callable[[], Any]
Allocate = Callable[[tuple[int, ...]], Any]
DTYPE = sys.argv[sys.argv.index("--dtype") + 1] if "--dtype" in sys.argv else "float32"


def block_value(sender: int, receiver: int) -> int:
    """What rank ``sender`` gives to rank ``receiver``, everywhere in that block."""
    return sender + 1 + 10 * receiver


def messages_in_turn(operation: str, size_in_bytes: int) -> int:
    """How many messages a rank receives in one call of ``operation``, by which its time is divided; else 1."""
    if operation == "window":
        return min(64, max(1, (64 << 20) // max(size_in_bytes, 1)))
    return 2 if operation == "send_recv" else 1


class BenchArrays:
    """The arrays of one operation on one rank.

    ``array`` holds so many bytes. Where ranks exchange blocks, each as long as ``array``, ``blocks`` has a row for each
    rank that gets one from this rank, and ``output`` one for each rank that sends one; else they are empty. In a window
    ``output`` has a row for each message from rank ``partner``. ``allocate`` makes an array of a shape.
    """

    def __init__(self, operation: str, size_in_bytes: int, rank: int, ranks: int, allocate: Allocate) -> None:
        count = max(size_in_bytes // np.dtype(DTYPE).itemsize, 1)
        gets = operation in ("all_gather", "all_to_all") or (operation == "gather" and rank == 0)
        gives = operation in ("reduce_scatter", "all_to_all") or (operation == "scatter" and rank == 0)
        self.array: Any = allocate((count,))
        self.array.fill(0 if operation in ("scatter", "reduce_scatter") else rank + 1)
        self.blocks: Any = allocate((ranks if gives else 0, count))
        self.blocks.T[:] = [block_value(rank, receiver) for receiver in range(len(self.blocks))]
        self.partner: int = rank ^ 1
        has_window = operation == "window" and self.partner < ranks
        messages = messages_in_turn(operation, size_in_bytes) if has_window else 0
        self.output: Any = allocate((ranks if gets else messages, count))
        self.output.fill(0)
        self.rank = rank
        self.ranks = ranks


def ordinary(shape: tuple[int, ...]) -> Any:
    """Allocate as NumPy does."""
    return np.empty(shape, DTYPE)


def _is_sum(buffers: BenchArrays) -> bool:
    return bool((buffers.array == buffers.ranks * (buffers.ranks + 1) / 2).all())


def _is_gathered(buffers: BenchArrays) -> bool:
    return bool((buffers.output == np.arange(1, len(buffers.output) + 1)[:, None]).all())


def _is_own_sum(buffers: BenchArrays) -> bool:
    values = [block_value(sender, buffers.rank) for sender in range(buffers.ranks)]
    return bool((buffers.array == sum(values)).all())


def _is_exchanged(buffers: BenchArrays) -> bool:
    values = [block_value(sender, buffers.rank) for sender in range(buffers.ranks)]
    return bool((buffers.output == np.array(values)[:, None]).all())


CORRECT: Mapping[str, Callable[[BenchArrays], bool]] = {
    "all_reduce": _is_sum,
    "reduce": lambda buffers: buffers.rank != 0 or _is_sum(buffers),
    "broadcast": lambda buffers: bool((buffers.array == 1).all()),
    "all_gather": _is_gathered,
    "gather": _is_gathered,
    "scatter": lambda buffers: bool((buffers.array == block_value(0, buffers.rank)).all()),
    "reduce_scatter": _is_own_sum,
    "all_to_all": _is_exchanged,
    "send_recv": lambda buffers: buffers.rank != 1 or bool((buffers.array == 1).all()),
    "window": lambda buffers: bool((buffers.output == (buffers.rank ^ 1) + 1).all()),
    "barrier": lambda buffers: True,
}
"""Whether the arrays hold what the operation must leave there; roots are rank 0."""


class Driver:
    """This rank's socket to the driver: when the driver goes, so does the rank. Connect before all that can hang."""

    def __init__(self, path: str) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.connect(path)
        self._lines = self._socket.makefile("r", encoding="utf-8")
        threading.Thread(target=self._exit_with_the_driver, daemon=True).start()

    def _exit_with_the_driver(self) -> None:
        # Sleeps in poll for the whole run. It matters when the main thread is stuck inside its library.
        poller = select.poll()
        poller.register(self._socket, select.POLLRDHUP)
        poller.poll()
        os._exit(0)

    def say(self, line: str) -> None:
        self._socket.sendall(line.encode() + b"\n")

    def commands(self) -> Any:
        for line in self._lines:
            words = line.split()
            if words == ["quit"]:
                return
            yield words


def serve(
    driver: Driver,
    rank: int,
    ranks: int,
    operations: Mapping[str, Callable[[BenchArrays], Call]],
    name: str,
    allocate: Allocate = ordinary,
) -> None:
    """Answer the driver's commands until it says quit or disconnects."""
    pin_to_one_core(rank)
    gc.disable()
    driver.say(f"hello {rank} {ranks} {name}")
    prepared: dict[tuple[str, int], Call] = {}
    processor_time = time.process_time_ns()
    for _, operation, size, samples, calls in driver.commands():
        idle = time.process_time_ns() - processor_time
        try:
            key = (operation, int(size))
            if key not in prepared:
                prepared.clear()
                buffers = BenchArrays(operation, int(size), rank, ranks, allocate)
                prepared[key] = prepare(operations, operation, buffers)
            parts = messages_in_turn(operation, int(size))
            times = [time // parts for time in measure(prepared[key], int(samples), int(calls))]
        except Exception as error:
            driver.say(f"error rank {rank}: {type(error).__name__}: {error}".replace("\n", " "))
            continue
        driver.say(f"times {idle} {' '.join(map(str, times))}")
        processor_time = time.process_time_ns()


def prepare(operations: Mapping[str, Callable[[BenchArrays], Call]], operation: str, buffers: BenchArrays) -> Call:
    """Return the call to measure, after it was made once and its result was checked."""
    if operation not in operations:
        raise NotImplementedError(f"this peer does not measure {operation}")
    call = operations[operation](buffers)
    call()
    if operation in CORRECT and not CORRECT[operation](buffers):
        raise ArithmeticError(f"{operation} of {buffers.array.nbytes} bytes gave a wrong result")
    buffers.array.fill(0)  # sums stay finite and free of denormals, however many calls follow
    return call


def measure(call: Call, samples: int, calls: int) -> list[int]:
    """Return the nanoseconds of each sample of ``calls`` calls. Some calls before them are not timed."""
    clock = time.perf_counter_ns
    for _ in range(max(1, samples * calls // 20)):
        call()
    times = []
    for _ in range(samples):
        start = clock()
        for _ in itertools.repeat(None, calls):
            call()
        times.append(clock() - start)
    return times


def pin_to_one_core(rank: int) -> None:
    """Keep this thread, not its library's other threads, on one core when the driver was started with --pin."""
    if "--pin" in sys.argv:
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[rank % len(cores)]})


def torch_operations(
    dist: Any, reduce_scatter: Callable[..., Any], tensor_of: Callable[[Any], Any]
) -> dict[str, Callable[[BenchArrays], Call]]:
    """Return the operations of a peer whose functions are those of torch.distributed: Gloo, and procgroup.

    ``tensor_of`` makes of a NumPy array what ``dist`` takes.

    ``reduce_scatter`` is the function for one input array, whose name differs.
    """

    def array(buffers: BenchArrays) -> Any:
        return tensor_of(buffers.array)

    def rows(arrays: Any) -> Any:
        return list(tensor_of(arrays)) or None

    def ping_pong(buffers: BenchArrays) -> Call:
        tensor = array(buffers)

        def call() -> None:
            if buffers.rank == 0:
                dist.send(tensor, 1)
                dist.recv(tensor, 1)
            elif buffers.rank == 1:
                dist.recv(tensor, 0)
                dist.send(tensor, 0)

        return call

    def window(buffers: BenchArrays) -> Call:
        tensor, received = array(buffers), rows(buffers.output) or []

        def call() -> None:
            works = [dist.irecv(row, buffers.partner) for row in received]
            works += [dist.isend(tensor, buffers.partner) for _ in received]
            for work in works:
                work.wait()

        return call

    return {
        "all_reduce": lambda buffers: partial(dist.all_reduce, array(buffers)),
        "broadcast": lambda buffers: partial(dist.broadcast, array(buffers), 0),
        "reduce": lambda buffers: partial(dist.reduce, array(buffers), 0),
        "all_gather": lambda buffers: partial(dist.all_gather, rows(buffers.output), array(buffers)),
        "gather": lambda buffers: partial(dist.gather, array(buffers), rows(buffers.output), 0),
        "scatter": lambda buffers: partial(dist.scatter, array(buffers), rows(buffers.blocks), 0),
        "reduce_scatter": lambda buffers: partial(
            reduce_scatter, array(buffers), tensor_of(buffers.blocks.reshape(-1))
        ),
        "all_to_all": lambda buffers: partial(
            dist.all_to_all_single, tensor_of(buffers.output), tensor_of(buffers.blocks)
        ),
        "barrier": lambda buffers: dist.barrier,
        "send_recv": ping_pong,
        "window": window,
    }
