"""What the bug programs import: `dist` and arrays of the library that they run on, and checks of their results.

The same source runs on procgroup with NumPy's arrays, and on torch.distributed with tensors.
"""

from __future__ import annotations

import importlib
import itertools
import os
import signal
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

from bugs.bug import LONG_TIMEOUT, TIMEOUT

IS_TORCH = os.environ.get("BUG_LIBRARY") == "torch"
BACKEND = os.environ.get("BUG_BACKEND") or None
RANK = int(os.environ.get("BUG_RANK", "0"))
SIZE = int(os.environ.get("BUG_SIZE", "1"))
STORE = (os.environ.get("BUG_STORE_HOST", "127.0.0.1"), int(os.environ.get("BUG_STORE_PORT", "0")))
"""Where the programs that bring a store of their own have it, on rank 0."""
LONGEST = float(os.environ.get("BUG_LONGEST_TIMEOUT", "inf"))
"""Seconds to which timeouts are cut: where errors come at the timeout only, a program takes no longer than that."""

if BACKEND == "procgroup":
    importlib.import_module("procgroup.torch_plugin").register()
dist: Any = importlib.import_module("torch.distributed" if IS_TORCH else "procgroup")
arrays: Any = importlib.import_module("torch" if IS_TORCH else "numpy")

Values = float | Sequence[Any]

_watched: deque[tuple[Any, Any]] = deque(maxlen=8)


class WrongResult(Exception):
    """A call returned without an error, and its result is wrong."""


def limit(seconds: float = TIMEOUT) -> timedelta:
    """Return a timeout as both libraries take it."""
    return timedelta(seconds=min(seconds, LONGEST))


def start(seconds: float = TIMEOUT, **options: Any) -> None:
    """Start as a user's program does."""
    dist.init_process_group(BACKEND, timeout=limit(seconds), **options)


def join(seconds: float = TIMEOUT) -> None:
    """Start, and then wait for the other ranks, so that times are counted from one moment.

    The timeout is for the calls: to start may take longer on a busy machine.
    """
    start(seconds, **({} if IS_TORCH else {"pg_options": {"init_method_timeout": limit(LONG_TIMEOUT)}}))
    dist.barrier()


def start_and_die(number: int, how: int = signal.SIGKILL) -> None:
    """Start at a store of the program's own; rank 1 gets a signal before its request ``number`` to the store.

    On procgroup under torch that is the store of procgroup's at which the ranks meet.
    """
    store = dist.TCPStore(*STORE, SIZE, RANK == 0, timeout=limit())
    if RANK == 1 and BACKEND == "procgroup":
        _die_at_request_to_meeting(number, how)
    elif RANK == 1:
        store = _dying_at_request(number, how, store)
    start(store=store, rank=RANK, world_size=SIZE)
    if RANK == 1:
        os.kill(os.getpid(), how)
    dist.barrier()


def _dying_at_request(number: int, how: int, store: Any) -> Any:
    """Return a store with the keys of ``store``, which sends the process a signal before this request."""
    numbers = itertools.count(1)

    def passing(name: str) -> Callable[..., Any]:
        inner = getattr(store, name)

        def request(_: Any, *arguments: Any, **named: Any) -> Any:
            if next(numbers) == number:
                os.kill(os.getpid(), how)
            return inner(*arguments, **named)

        return request

    requests = {name: passing(name) for name in _request_names(dist.Store)}
    if IS_TORCH:  # whose C++ calls the methods of a store from Python if that is no TCPStore
        return type("DyingAtRequest", (dist.Store,), requests | {"clone": lambda self: self})()
    store.__class__ = type("DyingAtRequest", (type(store),), requests)
    return store


def _die_at_request_to_meeting(number: int, how: int) -> None:
    """Let this process get a signal before that request to a store of procgroup's."""
    numbers = itertools.count(1)
    tcp = importlib.import_module("procgroup.stores.tcp")
    kind = tcp.TCPStore

    def passing(name: str) -> Callable[..., Any]:
        def request(self: Any, *arguments: Any, **named: Any) -> Any:
            if next(numbers) == number:
                os.kill(os.getpid(), how)
            return getattr(kind, name)(self, *arguments, **named)

        return request

    store = importlib.import_module("procgroup.stores.store").Store
    tcp.TCPStore = type("DyingAtRequest", (kind,), {name: passing(name) for name in _request_names(store)})


def _request_names(store: Any) -> list[str]:
    """Return the names of a store's methods that count as requests."""
    names = [name for name in dir(store) if not name.startswith("_") and callable(getattr(store, name))]
    return [name for name in names if name not in ("clone", "with_timeout")]


def limit_memory(room: int) -> None:
    """Let this process use ``room`` more bytes of memory; the kernel kills it when it uses more."""
    directory = Path(os.environ["BUG_MEMORY_GROUP"])
    directory.mkdir()
    (directory / "memory.limit_in_bytes").write_text(str(room))
    (directory / "cgroup.procs").write_text(str(os.getpid()))


def array(values: Values, dtype: str = "float32") -> Any:
    """Return an array, or a tensor, whose values are watched from now on."""
    kind = getattr(arrays, dtype)
    return watched(arrays.tensor(values, dtype=kind) if IS_TORCH else arrays.array(values, kind))


def full(count: int, value: float, dtype: str = "float32") -> Any:
    """Return a watched array with ``count`` times the value."""
    kind = getattr(arrays, dtype)
    return watched(arrays.full((count,), value, dtype=kind))


def watched(made: Any) -> Any:
    """Watch an array: a call that fails may have to leave its values as they are."""
    _watched.append((made, _copy(made)))
    return made


def repeated(number: Any, count: int) -> Any:
    """Return one element as an array of ``count`` elements that are all in the same place, and can be written."""
    if IS_TORCH:
        return number.expand(count)
    return arrays.lib.stride_tricks.as_strided(number, (count,), (0,))


def expect(result: Any, values: Values) -> None:
    """Raise WrongResult if an array does not have these values, or if one number is given, this value everywhere."""
    expected = _copy(result)
    expected[...] = arrays.asarray(values)
    if not bool((result == expected).all()):
        raise WrongResult(f"got {result.reshape(-1)[:8]}, expected {expected.reshape(-1)[:8]}")
    forget_arrays()


def number_watched() -> int:
    """Return how many arrays have been made since results were last found right."""
    return len(_watched)


def forget_arrays() -> None:
    """Watch none of the arrays any more."""
    _watched.clear()


def changed() -> list[str]:
    """Return the arrays whose values are others than when they were made."""
    return [
        f"{before.reshape(-1)[:8]} became {made.reshape(-1)[:8]}"
        for made, before in _watched
        if not bool((made == before).all())
    ]


def refuses(call: Callable[[], object]) -> bool:
    """Return whether a call raises an error of the library."""
    try:
        call()
    except RuntimeError:
        return True
    return False


def _copy(values: Any) -> Any:
    return values.clone() if IS_TORCH else values.copy()
