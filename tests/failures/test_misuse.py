"""Wrong arguments: refused in words before a byte moves, on the rank that made the mistake; the group goes on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from failures.waiting_calls import TRANSPORTS, on

import procgroup as dist
from procgroup.types import ReduceOp
from world import run

Misuse = tuple[Callable[[], Any], type[Exception], str]


def read_only() -> Any:
    array = np.ones(4)
    array.flags.writeable = False
    return array


def outputs(count: int = 2, length: int = 4, dtype: str = "float64") -> list[Any]:
    return [np.zeros(length, dtype) for _ in range(count)]


def repeated(length: int) -> Any:
    return np.lib.stride_tricks.as_strided(np.ones(1), (length,), (0,))


def overlapping_rows() -> Any:
    return np.lib.stride_tricks.as_strided(np.ones(8), (4, 3), (8, 8))


ones = np.ones
MISUSES: dict[str, Misuse] = {
    "one element repeated": (lambda: dist.all_reduce(repeated(8)), dist.ArgumentError, "one place"),
    "overlapping rows as output": (
        lambda: dist.broadcast(overlapping_rows(), dist.get_rank() ^ 1),
        ValueError,
        "one place",
    ),
    "a repeated receive": (lambda: dist.recv(repeated(8), 1), ValueError, "one place"),
    "a repeated output": (lambda: dist.all_gather([repeated(4), ones(4)], ones(4)), ValueError, "one place"),
    "one column as two outputs": (
        lambda: dist.all_gather([ones((4, 2))[:, 1]] * 2, ones(4)),
        ValueError,
        "outputs overlap",
    ),
    "read-only all_reduce": (lambda: dist.all_reduce(read_only()), ValueError, "read-only"),
    "read-only all_reduce, async": (lambda: dist.all_reduce(read_only(), async_op=True), ValueError, "read-only"),
    "read-only recv": (lambda: dist.recv(read_only(), 1), ValueError, "read-only"),
    "read-only output": (lambda: dist.all_gather([read_only(), ones(4)], ones(4)), ValueError, "read-only"),
    "read-only bytes": (lambda: dist.all_reduce(b"12345678"), (ValueError, TypeError), "read-only"),
    "a list": (lambda: dist.all_reduce([1.0, 2.0]), TypeError, "tensor.*list"),
    "a number": (lambda: dist.broadcast(3.0, 0), TypeError, "tensor.*float"),
    "None": (lambda: dist.all_reduce(None), TypeError, "tensor.*NoneType"),
    "a string": (lambda: dist.send("text", 1), TypeError, "tensor.*str"),
    "objects": (lambda: dist.all_reduce(np.array([1, None])), TypeError, "object"),
    "strings": (lambda: dist.all_reduce(np.array(["a", "b"])), TypeError, "dtype"),
    "dates": (lambda: dist.send(np.zeros(2, "datetime64[s]"), 1), TypeError, "datetime64"),
    "records": (lambda: dist.all_reduce(np.zeros(2, "i4,f8")), TypeError, "dtype"),
    "another byte order": (lambda: dist.all_reduce(np.ones(4, ">f8")), ValueError, "byte order"),
    "long double": (lambda: dist.all_reduce(np.ones(4, np.longdouble)), TypeError, "float128|longdouble"),
    "AVG of bools": (lambda: dist.all_reduce(np.ones(4, bool), ReduceOp.AVG), (TypeError, ValueError), "AVG"),
    "BAND of floats": (lambda: dist.all_reduce(ones(4), ReduceOp.BAND), (TypeError, ValueError), "BAND"),
    "BXOR of floats": (lambda: dist.reduce(ones(4), 0, ReduceOp.BXOR), (TypeError, ValueError), "BXOR"),
    "op as text": (lambda: dist.all_reduce(ones(4), "sum"), TypeError, "op"),
    "op out of range": (lambda: dist.all_reduce(ones(4), 99), TypeError, "op"),
    "root out of range": (lambda: dist.broadcast(ones(4), 2), ValueError, "2"),
    "negative root": (lambda: dist.reduce(ones(4), -1), ValueError, "-1"),
    "root is no number": (lambda: dist.broadcast(ones(4), "0"), TypeError, "rank"),
    "root is a fraction": (lambda: dist.broadcast(ones(4), 0.0), TypeError, "rank"),
    "no root": (lambda: dist.broadcast(ones(4)), ValueError, "Must specify"),
    "two roots": (lambda: dist.reduce(ones(4), 0, group_dst=0), ValueError, "both"),
    "send out of range": (lambda: dist.send(ones(4), 7), ValueError, "7"),
    "send to oneself": (lambda: dist.send(ones(4), 0), ValueError, "same as the rank"),
    "receive out of range": (lambda: dist.recv(ones(4), 7), ValueError, "7"),
    "negative tag": (lambda: dist.send(ones(4), 1, tag=-1), ValueError, "tag"),
    "tag too large": (lambda: dist.irecv(ones(4), 1, tag=1 << 63), ValueError, "tag"),
    "tag is no number": (lambda: dist.recv(ones(4), 1, tag="a"), TypeError, "tag"),
    "too few outputs": (lambda: dist.all_gather(outputs(1), ones(4)), ValueError, "length 2"),
    "too many outputs": (lambda: dist.all_gather(outputs(3), ones(4)), ValueError, "length 2"),
    "outputs are an array": (lambda: dist.all_gather(ones((2, 4)), ones(4)), TypeError, "list"),
    "an output is a list": (lambda: dist.all_gather([ones(4), [0.0] * 4], ones(4)), TypeError, "list"),
    "a short output": (lambda: dist.all_gather(outputs(length=3), ones(4)), ValueError, "holds 3 float64"),
    "an output of another dtype": (
        lambda: dist.all_gather(outputs(dtype="float32"), ones(4)),
        (TypeError, ValueError),
        "float32",
    ),
    "device_ids is no list": (lambda: dist.barrier(device_ids=3), TypeError, "device_ids"),
    "group is no group": (lambda: dist.all_reduce(ones(4), group="world"), ValueError, "group"),
    "init twice": (lambda: dist.init_process_group(), ValueError, "twice"),
}


def overlapping_outputs() -> Any:
    memory = np.zeros(7)
    return dist.all_gather([memory[:4], memory[3:]], ones(4))


MISUSES["outputs that overlap"] = (overlapping_outputs, ValueError, "overlap")


def misuse_then_use(rank: int, size: int) -> list[str]:
    """Rank 0 makes every mistake; after each, both ranks make a right call."""
    dist.init_process_group(timeout=10)
    wrong = []
    for name, (call, kinds, pattern) in MISUSES.items():
        if rank == 0:
            wrong += [f"{name}: {text}" for text in judge(call, kinds, pattern)]
        array = np.full(3, 2.0)
        try:
            dist.all_reduce(array)
        except dist.DistError as error:
            return [*wrong, f"{name}: the group does not work afterwards: {error}"]
        if not (array == 4).all():
            wrong.append(f"{name}: the next call gave {array}")
    return wrong


def judge(call: Callable[[], Any], kinds: Any, pattern: str) -> list[str]:
    try:
        with pytest.raises(kinds, match=f"(?s){pattern}"):
            call()
    except AssertionError as error:
        return [f"wrong words: {error}"]
    except pytest.fail.Exception:
        return ["not refused"]
    except Exception as error:
        return [f"raised {type(error).__name__}: {error}"]
    return []


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_wrong_arguments_are_refused_and_the_group_goes_on(transport: str) -> None:
    wrong, others = run(misuse_then_use, 2, environment=on(transport))
    assert not wrong and not others, "\n" + "\n".join([*wrong, *others])


def call_before_init(rank: int, size: int) -> None:
    calls: list[Callable[[], Any]] = [
        lambda: dist.all_reduce(ones(3)),
        lambda: dist.broadcast(ones(3), 0),
        lambda: dist.reduce(ones(3), 0),
        lambda: dist.all_gather([ones(3)], ones(3)),
        lambda: dist.barrier(),
        lambda: dist.send(ones(3), 1),
        lambda: dist.recv(ones(3), 1),
        lambda: dist.get_rank(),
        lambda: dist.get_world_size(),
    ]
    for call in calls:
        with pytest.raises(ValueError, match="Default process group has not been initialized"):
            call()


def test_every_call_before_init_is_refused() -> None:
    run(call_before_init, 1)


def misuse_alone(rank: int, size: int) -> list[str]:
    dist.init_process_group()
    wrong = []
    for name, (call, kinds, pattern) in MISUSES.items():
        if "1" not in pattern and name not in ("too few outputs", "too many outputs"):
            found = judge(call, kinds, pattern) if takes_one_rank(name) else []
            wrong += [f"{name}: {text}" for text in found]
    return wrong


def takes_one_rank(name: str) -> bool:
    """Whether a mistake is one in a world of 1 too, for the same reason."""
    words = ("send", "recv", "receive", "tag", "output", "input", "one element", "a string", "dates")
    return not any(word in name for word in words)


def test_a_world_of_one_refuses_the_same() -> None:
    assert run(misuse_alone, 1) == [[]]
