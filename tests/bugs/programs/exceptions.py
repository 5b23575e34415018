"""Exceptions on one rank: the others raise its type, text and line."""

from __future__ import annotations

import resource
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

from bugs.bug import LONG_TIMEOUT, death, failure
from bugs.library import dist, expect, full, join, limit


def add_up() -> None:
    """Make calls until one fails."""
    while True:
        total = full(4, 1.0)
        dist.all_reduce(total)
        expect(total, float(dist.get_world_size()))


@failure()
def data_are_missing_on_one_rank() -> None:
    """Rank 1 does not find its file, before the first call."""
    join(LONG_TIMEOUT)
    if dist.get_rank() == 1:
        Path("/no/such/file").read_text()  # BUG
    add_up()


@failure()
def loop_raises_on_one_rank() -> None:
    """Rank 1 meets a bad record in the third step."""
    join(LONG_TIMEOUT)
    for step in range(10):
        total = full(4, 1.0)
        dist.all_reduce(total)
        expect(total, 3.0)
        if step == 2 and dist.get_rank() == 1:
            int("12,5")  # BUG


@failure()
def callback_raises_on_one_rank() -> None:
    """A callback of rank 1 divides by a count of zero, in the middle of what is like a backward pass."""
    join(LONG_TIMEOUT)
    counts = [4, 2, 0 if dist.get_rank() == 1 else 1]

    def layer_is_ready(layer: int, gradients: Any) -> None:
        dist.all_reduce(gradients / (8 // counts[layer]), async_op=True).wait()  # BUG

    for layer in range(3):
        layer_is_ready(layer, full(4, 1.0))


@failure()
def exception_with_calls_in_flight() -> None:
    """Rank 1 raises while its asynchronous receives and sends still wait for their partners."""
    join(LONG_TIMEOUT)
    if dist.get_rank() == 1:
        works = [dist.irecv(full(4, 0.0), 0, tag=9), dist.isend(full(1_000_000, 1.0), 2, tag=9)]
        works[3].wait()  # BUG
    add_up()


@failure()
def exception_passes_a_finally() -> None:
    """Rank 1 raises, and its program destroys the group in `finally`."""
    join(LONG_TIMEOUT)
    options: dict[str, float] = {}
    try:
        if dist.get_rank() == 1:
            options["learning_rate"]  # BUG
        add_up()
    finally:
        dist.destroy_process_group()


@failure()
def exception_in_a_thread() -> None:
    """All communication is in a thread, which raises on rank 1, and the main thread only waits for it."""
    join(LONG_TIMEOUT)
    failed: list[BaseException] = []

    def train() -> None:
        if dist.get_rank() == 1:
            raise ValueError("no such layer")  # BUG
        try:
            add_up()
        except RuntimeError as error:
            failed.append(error)

    thread = threading.Thread(target=train)
    thread.start()
    thread.join()
    for error in failed:
        raise error


@failure()
def exception_is_chained() -> None:
    """Rank 1 raises an exception of its own from another one."""
    join(LONG_TIMEOUT)
    if dist.get_rank() == 1:
        try:
            int("a lot")
        except ValueError as error:
            raise RuntimeError("cannot read the configuration") from error  # BUG
    add_up()


@failure("CollectiveMismatch", "PeerFailed", "PeerLost", "CollectiveTimeout")
def exception_is_swallowed() -> None:
    """Rank 1 catches all that a step may raise, and so leaves a call out."""
    join()
    for step in range(3):
        try:
            if step == 1 and dist.get_rank() == 1:
                raise OSError("a file is away for a moment")
            total = full(4 + step, 1.0)
            dist.all_reduce(total)  # BUG
            expect(total, 3.0)
        except OSError:
            continue


@death("PeerLost", "PeerFailed")
def program_exits_early() -> None:
    """Rank 1 finds nothing to do and calls sys.exit()."""
    join(LONG_TIMEOUT)
    if dist.get_rank() == 1:
        sys.exit()  # BUG
    add_up()


@death("PeerLost", "PeerFailed")
def program_exits_with_a_status() -> None:
    """Rank 1 finds a mistake in its arguments and calls sys.exit(2)."""
    join(LONG_TIMEOUT)
    if dist.get_rank() == 1:
        sys.exit(2)  # BUG
    add_up()


@failure()
def interrupted() -> None:
    """Somebody presses Ctrl-C, and only rank 1 gets it."""
    join(LONG_TIMEOUT)
    if dist.get_rank() == 1:
        signal.raise_signal(signal.SIGINT)  # BUG
    add_up()


@failure(guilty_errors=("KeyboardInterrupt",))
def interrupted_in_a_call() -> None:
    """Somebody presses Ctrl-C while rank 1 waits in a call."""
    join(LONG_TIMEOUT)

    def interrupt() -> None:
        time.sleep(0.3)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    if dist.get_rank() == 1:
        threading.Thread(target=interrupt).start()
    if dist.get_rank() == 2:
        time.sleep(0.6)
    total = full(4, 1.0)
    dist.all_reduce(total)  # BUG
    expect(total, 3.0)
    add_up()


@failure()
def memory_error() -> None:
    """Rank 1 allocates more than it may."""
    join(LONG_TIMEOUT)
    if dist.get_rank() == 1:
        mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (mapped + (1 << 30), resource.RLIM_INFINITY))
        bytearray(16 << 30)  # BUG
    add_up()


@failure("PicklingFailed", "PeerFailed")
def object_cannot_be_pickled() -> None:
    """Rank 1 gathers an object with a lock in it, which pickle refuses."""
    join(LONG_TIMEOUT)
    mine: Any = {"lock": threading.Lock()} if dist.get_rank() == 1 else {"lock": None}
    dist.all_gather_object([None] * 3, mine)  # BUG


class AddedLately:
    """A class that rank 1 has not yet."""


@failure("PeerFailed", guilty_errors=("UnpicklingFailed", "AttributeError"))
def object_cannot_be_unpickled() -> None:
    """Rank 1 has an older version of a module than rank 0, which broadcasts an object of a new class."""
    join(LONG_TIMEOUT)
    objects = [AddedLately() if dist.get_rank() == 0 else None]
    if dist.get_rank() == 1:
        del globals()["AddedLately"]
    dist.broadcast_object_list(objects, src=0)  # BUG
    add_up()


@death("PeerLost", "PeerFailed")
def group_is_used_after_its_end() -> None:
    """Rank 1 destroys the group one call too early."""
    join(LONG_TIMEOUT)
    if dist.get_rank() == 1:
        dist.destroy_process_group()
    dist.all_reduce(full(4, 1.0))  # BUG


@failure()
def argument_is_wrong_on_one_rank() -> None:
    """Rank 1 names a root that there is not."""
    join(LONG_TIMEOUT)
    dist.broadcast(full(20_000, 1.0), src=7 if dist.get_rank() == 1 else 0)  # BUG


@failure()
def second_start_on_one_rank() -> None:
    """A library that rank 1 imports initialises once more."""
    join(LONG_TIMEOUT)
    if dist.get_rank() == 1:
        dist.init_process_group("gloo", timeout=limit())  # BUG
    add_up()
