"""The rank's side of the benchmark: wait for a command on the driver's socket, measure, answer, wait again.

Runs inside each peer's own environment, so it needs the standard library and NumPy only. The lines it speaks are
described in ``procgroup.diagnostics.bench.protocol``. What a peer adds is one table, from the name of an
operation to a function that takes ``Buffers`` and returns the call to measure.
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
from typing import Any

import numpy as np

Call = Callable[[], Any]


class Buffers:
    """The arrays of one operation on one rank: ``array`` of so many bytes , ``output`` with a row per rank, float32."""

    def __init__(self, operation: str, size_in_bytes: int, rank: int, ranks: int) -> None:
        self.array = np.full(max(size_in_bytes // 4, 1), rank + 1, dtype=np.float32)
        self.output = np.zeros((ranks if operation == "all_gather" else 0, self.array.size), dtype=np.float32)
        self.rank = rank
        self.ranks = ranks


def _is_sum(buffers: Buffers) -> bool:
    return bool((buffers.array == buffers.ranks * (buffers.ranks + 1) / 2).all())


CORRECT: Mapping[str, Callable[[Buffers], bool]] = {
    "all_reduce": _is_sum,
    "reduce": lambda buffers: buffers.rank != 0 or _is_sum(buffers),
    "broadcast": lambda buffers: bool((buffers.array == 1).all()),
    "all_gather": lambda buffers: bool((buffers.output == np.arange(1, buffers.ranks + 1)[:, None]).all()),
    "send_recv": lambda buffers: buffers.rank != 1 or bool((buffers.array == 1).all()),
    "barrier": lambda buffers: True,
}
"""Whether the arrays hold what the operation must leave there when each rank started with rank + 1 everywhere."""


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
    driver: Driver, rank: int, ranks: int, operations: Mapping[str, Callable[[Buffers], Call]], name: str
) -> None:
    """Answer the driver's commands until it says quit or goes away."""
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
                prepared[key] = prepare(operations, operation, Buffers(operation, int(size), rank, ranks))
            times = measure(prepared[key], int(samples), int(calls))
        except Exception as error:
            driver.say(f"error rank {rank}: {type(error).__name__}: {error}".replace("\n", " "))
            continue
        driver.say(f"times {idle} {' '.join(map(str, times))}")
        processor_time = time.process_time_ns()


def prepare(operations: Mapping[str, Callable[[Buffers], Call]], operation: str, buffers: Buffers) -> Call:
    """Return the call to measure, after it was made once and its result was checked."""
    if operation not in operations:
        raise NotImplementedError(f"this peer does not measure {operation}")
    call = operations[operation](buffers)
    call()
    if not CORRECT[operation](buffers):
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
