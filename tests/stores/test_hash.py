"""HashStore's own properties: waits of threads, Ctrl-C, forks in the middle of a wait, and closed clones."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from procgroup.errors import DistStoreError, ForkedProcessError
from procgroup.stores import HashStore


def status_of_child(work: Callable[[], int]) -> int:
    """Fork, run ``work`` in the child, and return the status with which the child ended."""
    child = os.fork()
    if child == 0:
        status = 99
        try:
            status = work()
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_a_wait_lets_other_threads_run_python() -> None:
    store = HashStore()
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(store.get, "late", 20)
        count = sum(range(100_000))  # needs the interpreter's lock, which a wait must not hold
        store.set("late", str(count))
        assert waiting.result() == str(count).encode()


def test_ctrl_c_ends_a_wait_at_once_while_other_threads_wait_too() -> None:
    store = HashStore()
    pressed: list[float] = []

    def press() -> None:
        pressed.append(time.monotonic())
        os.kill(os.getpid(), signal.SIGINT)

    with ThreadPoolExecutor(3) as pool:
        others = [pool.submit(store.get, "end", 20) for _ in range(3)]
        timer = threading.Timer(0.2, press)
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            store.get("never", 20)
        assert time.monotonic() - pressed[0] < 5
        store.set("end", "x")
        assert [other.result() for other in others] == [b"x"] * 3


def test_a_signal_handler_may_use_the_store_that_it_interrupts() -> None:
    store = HashStore()
    before = signal.signal(signal.SIGUSR1, lambda *_: store.set("from the handler", "x"))
    try:
        timer = threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGUSR1))
        timer.start()
        assert store.get("from the handler", 10) == b"x"
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_a_child_forked_while_other_threads_wait_is_refused_at_once_and_ends() -> None:
    store = HashStore()

    def use_and_delete() -> int:
        nonlocal store
        try:
            store.set("key", "x")
        except ForkedProcessError:
            del store
            return 0
        return 1

    with ThreadPoolExecutor(4) as pool:
        waiting = [pool.submit(store.get, "end", 20) for _ in range(3)]
        waiting.append(pool.submit(store.barrier, "all", 2, 20))
        for _ in range(5):
            assert status_of_child(use_and_delete) == 0
        store.set("end", "x")
        store.barrier("all", 2, 20)
        assert [each.result() for each in waiting] == [b"x", b"x", b"x", None]


def test_a_child_forked_by_a_signal_handler_inside_a_wait_is_refused() -> None:
    code = """
import os, signal, threading
from procgroup.errors import ForkedProcessError, StoreTimeout
from procgroup.stores import HashStore

children = []
signal.signal(signal.SIGUSR1, lambda *_: children.append(os.fork()))
threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGUSR1)).start()
try:
    HashStore().get("never", 1.0)
except ForkedProcessError:
    os._exit(7)
except StoreTimeout:
    assert os.waitstatus_to_exitcode(os.waitpid(children[0], 0)[1]) == 7
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_the_process_ends_while_daemon_threads_wait() -> None:
    code = """
import threading
from procgroup.stores import HashStore
store = HashStore()
for _ in range(4):
    threading.Thread(target=store.get, args=("never", 60), daemon=True).start()
store.set("key", "x")
"""
    begin = time.monotonic()
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
    assert time.monotonic() - begin < 10


def test_a_closed_store_leaves_its_clones_open() -> None:
    store = HashStore()
    clone = store.clone()
    store.set("key", "x")
    store.close()
    with pytest.raises(DistStoreError, match="this HashStore was closed"):
        store.get("key")
    with pytest.raises(DistStoreError, match="this HashStore was closed"):
        store.clone()
    assert clone.get("key") == b"x"
