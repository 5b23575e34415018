"""procgroup.functional: new arrays of the library that was given, whole trees in one call per dtype."""

from __future__ import annotations

import sys
from collections import OrderedDict, namedtuple
from typing import Any

import numpy as np
import pytest

import procgroup as dist
from procgroup import functional
from procgroup.functional.trees import flatten
from procgroup.testing import run_ranks
from world import run

Pair = namedtuple("Pair", "left right")


def tree_of(rank: int) -> dict[str, Any]:
    return {
        "weights": [np.arange(6.0).reshape(2, 3).T + rank, np.full((), rank, np.int32)],
        "pair": Pair(np.full((2, 2), 10.0 + rank), None),
        "empty": np.zeros((0, 3)),
        "first": (np.array([rank, 1], np.int32),),
    }


def play_numpy(rank: int, size: int) -> None:
    dist.init_process_group(timeout=30)
    given = tree_of(rank)
    total = functional.all_reduce(given)
    ranks = sum(range(size))
    np.testing.assert_array_equal(total["weights"][0], size * np.arange(6.0).reshape(2, 3).T + ranks)
    assert total["weights"][1] == ranks and total["weights"][1].shape == ()
    assert isinstance(total["pair"], Pair) and total["pair"].right is None
    np.testing.assert_array_equal(total["pair"].left, np.full((2, 2), 10.0 * size + ranks))
    np.testing.assert_array_equal(total["first"][0], [ranks, size])
    assert total["empty"].shape == (0, 3) and list(total) == list(given)
    np.testing.assert_array_equal(given["weights"][0], tree_of(rank)["weights"][0])
    assert total["pair"].left.flags.writeable

    largest = functional.all_reduce(np.array([rank, -rank]), dist.ReduceOp.MAX)
    assert largest.tolist() == [size - 1, 0]
    gathered = functional.all_gather({"a": np.full(2, rank), "b": np.array(rank)})
    assert gathered["a"].tolist() == [[r, r] for r in range(size)] and gathered["b"].tolist() == list(range(size))
    columns = np.arange(size * 3).reshape(3, size).T
    part = functional.reduce_scatter([columns, columns * 2.0])
    np.testing.assert_array_equal(part[0], columns[rank] * size)
    np.testing.assert_array_equal(part[1], columns[rank] * 2.0 * size)
    swapped = functional.all_to_all((np.array([[10 * rank + r] for r in range(size)]), np.full((size, 0), 1)))
    assert swapped[0].tolist() == [[10 * r + rank] for r in range(size)] and swapped[1].shape == (size, 0)
    assert functional.broadcast([np.full(3, rank)], size - 1)[0].tolist() == [size - 1] * 3
    for call in (functional.reduce_scatter, functional.all_to_all):
        with pytest.raises(dist.ArgumentError, match=f"tree has shape \\({size + 1},\\); expected a first dimension"):
            call(np.zeros(size + 1))
    with pytest.raises(TypeError, match=r"`tree\[1\]`"):
        functional.all_reduce([np.zeros(1), "text"])
    outside: Any = dist.GroupMember.NON_GROUP_MEMBER
    with pytest.raises(ValueError, match="Invalid process group specified: -100"):
        functional.all_gather(np.zeros(1), outside)
    dist.destroy_process_group()


@pytest.mark.parametrize("size", [1, 3])
def test_trees_of_numpy_arrays_come_back_as_new_ones(size: int) -> None:
    run(play_numpy, size)


def play_bad_second_dtype(rank: int, size: int) -> None:
    dist.init_process_group(timeout=10)
    good = {"a": np.full((size, 2), 1.0), "b": np.full(size, 2)}
    short = {"a": np.full((size, 2), 1.0), "b": np.full(size + 1, 2)}
    calls: list[tuple[Any, Any, type[Exception], str]] = [
        (functional.reduce_scatter, short, dist.ArgumentError, r"tree\['b'\] has shape"),
        (functional.all_to_all, short, dist.ArgumentError, r"tree\['b'\] has shape"),
        (lambda tree: functional.all_reduce(tree, dist.ReduceOp.PREMUL_SUM(0.5)), good, RuntimeError, "int64"),
        (lambda tree: functional.reduce_scatter(tree, dist.ReduceOp.PREMUL_SUM(0.5)), good, RuntimeError, "int64"),
    ]
    for call, bad, error, text in calls:
        if rank == 0:
            with pytest.raises(error, match=text):
                call(bad)
        total = functional.all_reduce(good)
        assert total["a"].tolist() == [[size, size]] * size and total["b"].tolist() == [2 * size] * size
    dist.destroy_process_group()


@pytest.mark.parametrize("size", [1, 2])
def test_a_bad_array_of_the_second_dtype_is_found_before_the_first_ones_call(size: int) -> None:
    run(play_bad_second_dtype, size)


def play_library(name: str) -> None:
    library = __import__("torch" if name == "torch" else "jax.numpy", fromlist=["x"])
    size = dist.get_world_size()
    for dtype in ("float32", "int32", "bool", "bfloat16", "complex64"):
        given = [library.ones(5, dtype=getattr(library, dtype)), library.zeros((2, 1), dtype=getattr(library, dtype))]
        ones, zeros = functional.all_reduce(given)
        assert type(ones) is type(given[0]) and ones.dtype == given[0].dtype and zeros.shape == (2, 1)
        assert bool((ones == (1 if dtype == "bool" else size)).all()) and bool((zeros == 0).all())
        assert bool((given[0] == 1).all())
        assert functional.all_gather(given)[1].shape == (size, 2, 1)
        assert bool((functional.broadcast(given, 0)[0] == 1).all())
    mixed = functional.all_reduce({"a": library.ones(2), "b": np.ones(2, np.float32)})
    assert type(mixed["b"]) is np.ndarray and type(mixed["a"]) is type(library.ones(1))
    if name == "jax":
        with pytest.raises(dist.ArgumentError, match=r"immutable.*procgroup\.functional"):
            dist.all_reduce(library.ones(2))


@pytest.mark.parametrize("name", [pytest.param("torch", marks=pytest.mark.torch), "jax"])
def test_each_library_gets_its_own_arrays_back(name: str) -> None:
    pytest.importorskip(name)
    run_ranks(play_library, 2, name)


def test_the_order_of_the_leaves_follows_from_the_keys_alone() -> None:
    one, rebuild = flatten({"b": 1, "a": [2, (3,)], "c": None, 4: 5})
    other, _ = flatten({4: 5, "c": None, "a": [2, (3,)], "b": 1})
    assert one == other == [5, 2, 3, 1]
    assert rebuild(iter([50, 20, 30, 10])) == {"b": 10, "a": [20, (30,)], "c": None, 4: 50}


def test_kinds_of_containers_are_kept() -> None:
    tree = OrderedDict(z=Pair([1], 2), a=())
    leaves, rebuild = flatten(tree)
    built = rebuild(iter(leaves))
    assert built == tree and type(built) is OrderedDict and type(built["z"]) is Pair


def test_nodes_that_jax_knows_are_trees() -> None:
    jax = pytest.importorskip("jax")

    class Box:
        def __init__(self, inside: Any) -> None:
            self.inside = inside

    jax.tree_util.register_pytree_node(Box, lambda box: ((box.inside,), None), lambda _, inside: Box(*inside))
    leaves, rebuild = flatten([Box({"a": 1}), 2])
    assert leaves == [1, 2] and rebuild(iter([3, 4]))[0].inside == {"a": 3}
    assert "jax" in sys.modules


def play_numbers(rank: int, size: int) -> None:
    dist.init_process_group(timeout=30)
    op = dist.ReduceOp
    ranks = sum(range(size))
    for given, chosen, expected in (
        (rank + 1, op.SUM, ranks + size),
        (rank + 1, op.AVG, (ranks + size) / size),
        (rank, op.MAX, size - 1),
        (-rank, op.MIN, 1 - size),
        (10**18, op.PRODUCT, 10 ** (18 * size)),
        (2**63 - 1, op.SUM, size * (2**63 - 1)),
        (rank, op.BOR, 1 if size == 2 else 3 if size > 2 else 0),
        (True, op.SUM, True if size == 1 else size),
        (rank == 0, op.BAND, size == 1),
        (5 << rank, op.LAND, 1),
        (rank == 0, op.LOR, True),
        (np.int8(5), op.LXOR, np.int8(size % 2)),
        (0.5, op.SUM, size * 0.5),
        (1.5 + 0.5j, op.SUM, size * (1.5 + 0.5j)),
        (np.float32(0.5), op.SUM, np.float32(size * 0.5)),
        (np.int8(3), op.MAX, np.int8(3)),
    ):
        result = functional.all_reduce(given, chosen)
        assert (result, type(result)) == (expected, type(expected)), (given, chosen, result)
    tree = functional.all_reduce({"n": 1, "array": np.ones(2, np.int64), "loss": 0.25, "flag": True})
    assert tree["n"] == size and tree["array"].tolist() == [size] * 2 and tree["loss"] == size / 4
    assert functional.all_gather(rank) == list(range(size)) and functional.all_gather(rank / 2)[-1] == (size - 1) / 2
    assert functional.all_gather(np.float32(rank)).tolist() == list(range(size))
    assert functional.broadcast(rank + 7, size - 1) == size + 6 and functional.broadcast(True) is True
    assert functional.sendrecv(rank, dst=(rank + 1) % size, src=(rank - 1) % size) == (rank - 1) % size

    # Refused before anything is sent, so that the next call finds all ranks in step.
    with pytest.raises(dist.ArgumentError, match=r"`tree` is an integer of 65 bits; expected at most 64"):
        functional.all_reduce(2**63)
    with pytest.raises(TypeError, match=r"PREMUL_SUM\(2\) does not exist for Python's integers; pass a float"):
        functional.all_reduce(1, op.PREMUL_SUM(2))
    with pytest.raises(dist.ArgumentError, match=r"functional.reduce_scatter: tree has shape \(\); expected a first"):
        functional.reduce_scatter(1)
    assert functional.all_reduce(1.0, op.PREMUL_SUM(2)) == 2.0 * size
    if size > 1:
        with pytest.raises(dist.CollectiveMismatch):
            functional.all_reduce(1 if rank == 0 else 1.0)
    dist.destroy_process_group()


@pytest.mark.parametrize("size", [1, 3])
def test_numbers_come_back_as_numbers(size: int) -> None:
    run(play_numbers, size)


def play_ring(rank: int, size: int) -> None:
    dist.init_process_group(timeout=30)
    after, before = (rank + 1) % size, (rank - 1) % size
    for count in (1, 1000, 1_000_000):  # larger than what a send takes without its receive
        given = {"a": np.full(count, rank), "b": [np.full((2, 2), rank + 0.5)]}
        got = functional.sendrecv(given, dst=after, src=before)
        assert (got["a"] == before).all() and (got["b"][0] == before + 0.5).all() and (given["a"] == rank).all()
    assert functional.sendrecv(np.array([rank]), rank, rank).tolist() == [rank]
    if size > 1:
        with pytest.raises(dist.ArgumentError, match="as both destination and source, or as neither"):
            functional.sendrecv(np.zeros(1), rank, before)
    functional.barrier()
    dist.destroy_process_group()


@pytest.mark.parametrize("size", [1, 2, 3])
def test_arrays_go_around_a_ring(size: int) -> None:
    run(play_ring, size)
