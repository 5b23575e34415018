"""Numbers and NumPy's arrays go through native code, all else through Python: the calls and results are the same."""

from __future__ import annotations

import collections
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import procgroup as dist
import world
from procgroup import functional

Values = Callable[[int, int], Any]

# By rank and number of ranks.
VALUES: dict[str, Values] = {
    "float": lambda rank, size: rank + 0.5,
    "integer": lambda rank, size: (1 << 62) + rank,
    "bool": lambda rank, size: rank > 0,
    "complex": lambda rank, size: complex(rank, -1),
    "NumPy's scalar": lambda rank, size: np.float32(rank + 0.25),
    "array": lambda rank, size: np.arange(6.0).reshape(2, 3) + rank,
    "array without dimensions": lambda rank, size: np.array(rank, np.int16),
    "empty array": lambda rank, size: np.empty((0, 3), np.float32),
    "transposed array": lambda rank, size: (np.arange(6.0).reshape(2, 3) + rank).T,
    "array of many elements": lambda rank, size: np.arange(3000, dtype=np.int32) * (rank + 1),
    "list": lambda rank, size: [rank * 1.0, np.ones(3, np.int64) * rank, (np.float32(rank), None)],
    "dict": lambda rank, size: {"b": np.full(2, rank), "a": [np.full(3, rank), 1.5], "c_1.x": np.ones(1, np.float32)},
    "dict with keys in other quotes": lambda rank, size: {"it's": 1.0 * rank, "b": 2.0, "a b": 3.0, "ä": 4.0},
    "dict with keys that begin alike": lambda rank, size: {"a b": 1.0, "a": 2.0 * rank, "a.b": 3.0, 'a"': 4.0, "": 5.0},
    "dict of numbers": lambda rank, size: {2: 1.0 * rank, 10: 2.0},
    "another kind of dict": lambda rank, size: collections.OrderedDict(z=1.0 * rank, a=np.ones(2)),
    "integers beside floats": lambda rank, size: {"count": rank, "mean": 0.5 * rank},
    "nothing": lambda rank, size: [],
}
ROWS: dict[str, Values] = {
    "array": lambda rank, size: np.arange(size * 3.0).reshape(size, 3) + rank,
    "vector": lambda rank, size: np.arange(size) + rank,
    "dict": lambda rank, size: {
        "a": np.full((size, 2), rank),
        "b": np.full((size, 0, 2), 1.5),
        "c": np.ones((size, 4)),
    },
}
CALLS: dict[str, Callable[[Any, int, int], Any]] = {
    "all_reduce": lambda tree, rank, size: functional.all_reduce(tree),
    "product": lambda tree, rank, size: functional.all_reduce(tree, dist.ReduceOp.PRODUCT),
    "all_gather": lambda tree, rank, size: functional.all_gather(tree),
    "broadcast": lambda tree, rank, size: functional.broadcast(tree, src=size - 1),
    "sendrecv": lambda tree, rank, size: functional.sendrecv(tree, dst=(rank + 1) % size, src=(rank - 1) % size),
    "sendrecv with oneself": lambda tree, rank, size: functional.sendrecv(tree, dst=rank, src=rank),
}
CALLS_OF_ROWS: dict[str, Callable[[Any, int, int], Any]] = {
    "reduce_scatter": lambda tree, rank, size: functional.reduce_scatter(tree),
    "all_to_all": lambda tree, rank, size: functional.all_to_all(tree),
}


def flat(tree: Any) -> list[Any]:
    """Return what is in a tree, with its types, shapes, dtypes and elements, in one list that can be compared."""
    if isinstance(tree, dict):
        return [type(tree), list(tree), *(part for value in tree.values() for part in flat(value))]
    if isinstance(tree, (list, tuple)):
        return [type(tree), len(tree), *(part for value in tree for part in flat(value))]
    if isinstance(tree, np.ndarray):
        return ["array", tree.dtype, tree.shape, tree.flags.writeable, tree.tolist()]
    return [type(tree), tree]


def compare(rank: int, size: int) -> list[str]:
    dist.init_process_group()
    group = dist.group.WORLD
    assert group is not None
    wrong = []
    for values, calls in ((VALUES, CALLS), (ROWS, CALLS_OF_ROWS)):
        for value in values:
            for name, call in calls.items():
                natively = call(values[value](rank, size), rank, size)
                remove = group.add_hook(lambda op, arguments: None)  # then Python makes the call
                in_python = call(values[value](rank, size), rank, size)
                if rank % 2 == 0:
                    remove()
                mixed = call(values[value](rank, size), rank, size)
                remove()
                if not flat(natively) == flat(in_python) == flat(mixed):
                    wrong.append(f"{name} of {value}: {natively!r}, {in_python!r}, {mixed!r}")
    dist.destroy_process_group()
    return wrong


@pytest.mark.parametrize("size", [1, 2, 3])
def test_native_and_python_s_calls_are_the_same(size: int) -> None:
    assert world.run(compare, size) == [[]] * size


def change(rank: int, size: int) -> list[float]:
    dist.init_process_group()
    given = np.full(3, 1.0 + rank)
    other = 1 - rank
    results = [
        functional.all_reduce(given), functional.broadcast(given), functional.sendrecv(given, dst=other, src=other)
    ]  # fmt: skip
    for result in results:
        result += 100
    functional.barrier()
    dist.destroy_process_group()
    return [float(element) for element in given]


def test_results_are_new_arrays() -> None:
    assert world.run(change, 2) == [[1.0] * 3, [2.0] * 3]


def refuse(rank: int, size: int) -> list[str]:
    dist.init_process_group()
    texts = []
    bad: list[Callable[[], Any]] = [
        lambda: functional.all_reduce(1 << 64),
        lambda: functional.all_reduce({"a": 1.0, "b": np.array(["text"])}),
        lambda: functional.all_reduce(1.5, dist.ReduceOp.BAND),
        lambda: functional.reduce_scatter(np.ones(3)),
        lambda: functional.sendrecv(1.0, dst=rank, src=1 - rank),
        lambda: functional.sendrecv(1.0, dst=2, src=0),
    ]
    for call in bad:
        with pytest.raises(Exception) as raised:
            call()
        texts.append(f"{raised.type.__name__}: {raised.value}")
    assert functional.all_reduce(1.0) == 2.0
    dist.destroy_process_group()
    return texts


def test_bad_arguments_raise_before_anything_moves() -> None:
    parts = [
        "ArgumentError: `tree` is an integer of 66 bits",
        "TypeError: `tree['b']`",
        "BAND is not defined for float64",
        "expected a first dimension of 2",
        "as both destination and source",
        "ValueError: Global rank 2 is not part",
    ]
    for texts in world.run(refuse, 2):
        assert [text for part, text in zip(parts, texts, strict=True) if part not in text] == []


def change_during_the_call(rank: int, size: int, way: str) -> str:
    dist.init_process_group()
    group = dist.group.WORLD
    assert group is not None
    tree: dict[Any, Any] = {"a": [1.0, 2.0]}

    def change() -> None:
        while not any(record["op"] == "all_reduce" for record in group.records()):
            time.sleep(0.001)
        if way == "grows":
            tree["a"].append(3.0)
        elif way == "shrinks":
            tree["a"].pop()
        else:
            tree[7] = 3.0
        group.get_group_store().set("changed", "yes")

    if rank == 0:
        threading.Thread(target=change).start()
    else:
        group.get_group_store().wait(["changed"])
    text = ""
    try:
        functional.all_reduce(tree)
    except RuntimeError as error:
        text = str(error)
    dist.destroy_process_group()
    return text


@pytest.mark.parametrize("way", ["grows", "shrinks", "gets a key that is no text"])
def test_a_tree_that_another_thread_changes_during_the_call_raises(way: str) -> None:
    texts = world.run(change_during_the_call, 2, args=(way,))
    assert texts == ["`tree` was changed by another thread during the call, and its results have no place", ""]


def contain_itself(rank: int, size: int) -> bool:
    dist.init_process_group()
    tree: list[Any] = [1.0]
    tree.append(tree)
    with pytest.raises(RecursionError):
        functional.all_reduce(tree)
    dist.destroy_process_group()
    return True


def test_a_tree_that_contains_itself_is_refused() -> None:
    assert world.run(contain_itself, 1) == [True]


def coalesce(rank: int, size: int) -> list[str]:
    dist.init_process_group()
    texts = []
    for value in (1.0, np.ones(3), {"a": np.ones(3)}):
        with pytest.raises(ValueError) as raised, dist._coalescing_manager():
            functional.all_reduce(value)
        texts.append(str(raised.value))
    assert functional.all_reduce(1.0) == 2.0
    dist.destroy_process_group()
    return texts


def test_a_call_that_returns_its_result_cannot_be_coalesced() -> None:
    for texts in world.run(coalesce, 2):
        assert all(text.startswith("functional.all_reduce on group 0") for text in texts)
