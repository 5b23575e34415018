"""Calls inside of jax.jit go from XLA to the engine: without Python, and as the same calls outside of jit do."""

from __future__ import annotations

import gc
import inspect
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest
from groups.toy_backend import StoreBackend

import procgroup as dist
from procgroup import functional
from procgroup.backends import registry
from procgroup.process.exit_reason import ExitReason
from world import run

pytest.importorskip("jax")

FAST = {"XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false --xla_backend_optimization_level=0"}
PACKAGE = str(Path(dist.__file__).parent)

OPERATIONS = (
    *("all_reduce", "broadcast", "all_gather", "reduce_scatter", "all_to_all", "reduce", "barrier", "send", "recv"),
)


def calls_of(rank: int, size: int) -> dict[str, Callable[[Any], Any]]:
    """Return, by name, what takes arrays whose first dimension has one element per rank."""
    return {
        "all_reduce": functional.all_reduce,
        "premultiplied": lambda tree: functional.all_reduce(tree, dist.ReduceOp.PREMUL_SUM(0.5)),
        "broadcast": lambda tree: functional.broadcast(tree, size - 1),
        "all_gather": functional.all_gather,
        "reduce_scatter": functional.reduce_scatter,
        "all_to_all": functional.all_to_all,
        "sendrecv": lambda tree: functional.sendrecv(tree, (rank + 1) % size, (rank - 1) % size),
        "to itself": lambda tree: functional.sendrecv(tree, rank, rank),
    }


def play_path(rank: int, size: int) -> None:
    import jax
    import jax.numpy as jnp

    from procgroup.functional import traced

    dist.init_process_group(timeout=30)

    @jax.jit
    def step(tree: Any) -> Any:
        functional.barrier()
        found = {name: call(tree) for name, call in calls_of(rank, size).items()}
        return found, jax.grad(lambda x: functional.broadcast(x, 0).sum())(tree[0])  # a reduce to the root

    tree = [jnp.ones((size, 2)), jnp.ones((size, 2000))]
    expected = jax.block_until_ready(step(tree))
    group = dist.group.WORLD
    assert group is not None
    before = len(group.records())

    # Where a thread of XLA makes the calls, nothing would be seen of them: there Python would need this method.
    traced.TracedCall.run = None  # type: ignore[method-assign, assignment]
    entered: list[str] = []

    def profile(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(PACKAGE):
            entered.append(frame.f_code.co_qualname)

    sys.setprofile(profile)
    try:
        found = jax.block_until_ready(step(tree))
    finally:
        sys.setprofile(None)
    assert entered == []
    made = sorted(record["op"] for record in group.records()[before:])
    assert made == sorted((*OPERATIONS, "all_reduce", "broadcast")), made  # two of them are called twice
    assert jax.tree.all(jax.tree.map(lambda left, right: bool((left == right).all()), found, expected))
    dist.destroy_process_group()


def test_no_function_of_python_runs_below_a_compiled_call() -> None:
    run(play_path, 2, timeout=60, environment=FAST)


def play_alike(rank: int, size: int) -> None:
    """Rank 0 makes each call inside of jit, the others outside: they meet, and have the same results."""
    import jax

    dist.init_process_group(timeout=30)
    jax.config.update("jax_enable_x64", True)
    reducible = ("bool", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64")
    inexact = ("float16", "bfloat16", "float32", "float64", "complex64", "complex128")
    moved = ("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu")

    def tree_of(*dtypes: str) -> Any:
        shapes = ((size, 3), (size, 0), (size, 2, 5))
        return {name: [np.full(shape, rank + 1).astype(jax.numpy.dtype(name)) for shape in shapes] for name in dtypes}

    moving = ("broadcast", "all_gather", "all_to_all", "sendrecv", "to itself")
    trees = {name: tree_of(*reducible, *inexact, *(moved if name in moving else ())) for name in calls_of(rank, size)}
    trees["premultiplied"] = tree_of(*inexact)  # which is for these alone
    trees["logical"] = tree_of(*reducible)
    alone = {"all_gather": np.full((size, 300_000), rank + 1, np.float32), "all_reduce": np.zeros((0, 2), np.float32)}

    def call_all(trees: Any, alone: Any) -> Any:
        calls = calls_of(rank, size)
        calls["logical"] = lambda tree: functional.all_reduce(tree, dist.ReduceOp.LXOR)
        return [
            {name: call(trees[name]) for name, call in calls.items()},
            {name: calls[name](alone[name]) for name in alone},
        ]

    inside = (jax.jit(call_all) if rank == 0 else call_all)(trees, alone)
    outside = call_all(trees, alone)
    assert jax.tree.structure(inside) == jax.tree.structure(outside)
    for one, other in zip(jax.tree.leaves(inside), jax.tree.leaves(outside), strict=True):
        assert (one.shape, one.dtype) == (other.shape, other.dtype)
        assert np.asarray(one).tobytes() == other.tobytes(), (one.shape, one.dtype)

    ends = dist.new_group([0, 2])

    @jax.jit
    def step_of_two_groups(x: Any) -> Any:
        x = functional.all_reduce(x)
        if rank != 1:
            x = functional.broadcast(x + rank, group=ends, group_src=1)
        return functional.all_gather(x)

    assert step_of_two_groups(np.ones(1)).tolist() == [[5], [3], [5]]
    dist.destroy_process_group()


def test_ranks_inside_and_outside_of_jit_meet_with_every_dtype_and_size() -> None:
    run(play_alike, 3, timeout=250, environment=FAST)


def play_refusals_and_life(rank: int, size: int) -> None:
    import jax
    import jax.numpy as jnp

    dist.init_process_group(timeout=30)
    for dtype, op, error, text in (
        ("int4", dist.ReduceOp.SUM, TypeError, "`tree` has dtype int4, which cannot be sent; expected one of bfloat16"),
        ("float8_e5m2", dist.ReduceOp.SUM, TypeError, "float8_e5m2 arrays can be moved, not reduced"),
        ("float32", dist.ReduceOp.BAND, dist.ArgumentError, "ReduceOp.BAND is not defined for float32 arrays"),
        ("complex64", dist.ReduceOp.MAX, ValueError, "does not support ReduceOp.MAX on complex tensors"),
    ):
        given = jnp.ones(2, dtype)
        with pytest.raises(error, match=text):
            jax.jit(functional.all_reduce, static_argnums=1)(given, op)
    assert functional.all_reduce(jnp.ones(1)).tolist() == [size]  # nothing was sent

    def use() -> weakref.ref[Any]:
        group = dist.new_group()
        jax.block_until_ready(jax.jit(lambda x: functional.all_reduce(x, group=group))(jnp.ones(2)))
        dist.destroy_process_group(group)
        return weakref.ref(group)

    # A compiled function keeps its call, and the call its group.
    ended = use()
    gc.collect()
    assert ended() is not None
    jax.clear_caches()
    gc.collect()
    assert ended() is None
    dist.destroy_process_group()


def test_what_cannot_be_sent_is_refused_when_compiled_and_groups_end_with_functions() -> None:
    run(play_refusals_and_life, 2, timeout=60, environment=FAST)


def play_states(rank: int, size: int) -> None:
    """Hooks, a backend of Python, and a function that outlives its group: those calls go through Python."""
    import jax
    import jax.numpy as jnp

    dist.init_process_group(timeout=30)
    group = dist.group.WORLD
    assert group is not None
    step = jax.jit(lambda tree: functional.all_reduce(tree))
    tree = [jnp.ones(3), jnp.ones((2, 0)), jnp.ones((), jnp.int32)]

    def check() -> None:
        found = step(tree)
        assert found[0].tolist() == [size] * 3 and found[1].shape == (2, 0) and int(found[2]) == size

    check()
    seen: list[str] = []
    remove = group.add_hook(lambda op, arguments: seen.append(op))
    check()
    assert seen == ["all_reduce"] * 2  # one for each dtype
    remove()
    check()
    assert len(seen) == 2

    def refuse(op: str, arguments: Any) -> None:
        raise LookupError("a hook of this program")

    remove = group.add_hook(refuse)
    with pytest.raises(LookupError, match="a hook of this program"), functional.jit_errors():
        jax.block_until_ready(step(tree))
    remove()
    check()

    registry.register_backend("toy", StoreBackend, devices="cpu")
    own = dist.new_group(backend="toy")
    total = jax.jit(lambda x: functional.all_reduce(x, group=own))
    assert total(jnp.ones(3)).tolist() == [size] * 3
    dist.destroy_process_group()
    with pytest.raises(dist.GroupDestroyed), functional.jit_errors():
        jax.block_until_ready(step(tree))


def test_states_of_a_group_in_which_calls_pass_through_python() -> None:
    run(play_states, 2, timeout=60, environment=FAST)


def play_errors(rank: int, size: int) -> None:
    import jax
    import jax.numpy as jnp

    dist.init_process_group(timeout=30)
    groups = [dist.new_group(timeout=20) for _ in range(4)]

    def raised(call: Callable[[Any], Any], count: int = 2) -> BaseException:
        with pytest.raises(dist.DistError) as caught, functional.jit_errors():
            jax.block_until_ready(jax.jit(call)(jnp.ones(count)))
        assert isinstance(caught.value.__cause__, jax.errors.JaxRuntimeError)
        return caught.value

    # The line is the one that was traced.
    frame = inspect.currentframe()
    assert frame is not None
    here = f"{Path(__file__).name}:"
    error: Any = raised(lambda x: functional.all_reduce(x, group=groups[0]), 2 + rank)
    line = frame.f_lineno - 1
    assert isinstance(error, dist.CollectiveMismatch) and error.issued_at.endswith(f"{here}{line}"), error.issued_at
    assert f"{here}{line}" in str(error)
    records = [record["source"] for record in groups[0].records() if record["op"] == "all_reduce"]
    assert records[-1].endswith(f"{here}{line}")

    # A message of another size ends the receive of each: it is sent nevertheless.
    error = raised(lambda x: functional.sendrecv(x, 1 - rank, 1 - rank, groups[1]), 300_000 + rank)
    assert isinstance(error, dist.CollectiveMismatch), error

    if rank == 0:  # and the other one never
        groups[2].set_timeout(0.2)
        error = raised(lambda x: functional.all_reduce(x, group=groups[2]))
        assert isinstance(error, dist.CollectiveTimeout) and error.missing == (1,), error
    functional.barrier()
    if rank == 0:
        groups[3].abort()
    error = raised(lambda x: functional.all_gather(x, group=groups[3]))
    assert isinstance(error, dist.GroupBroken if rank == 0 else dist.PeerFailed), error

    functional.barrier()
    if rank == 0:
        error = raised(functional.all_reduce)
        assert isinstance(error, dist.PeerFailed) and "a reason" in str(error), error
        assert here in error.issued_at  # where no function of this program is traced, the line that compiles it
    else:
        groups[2].fail(ExitReason("a reason"), True)


def test_errors_by_kind_and_the_line_that_was_traced() -> None:
    run(play_errors, 2, timeout=60, environment=FAST)


def play_platforms(rank: int, size: int) -> None:
    """Lower a function for GPUs of NVIDIA, which this machine need not have, and for CPUs with them."""
    import jax
    import jax.numpy as jnp

    dist.init_process_group(timeout=30)

    @jax.jit
    def step(tree: Any) -> Any:
        functional.barrier()
        return functional.all_reduce(tree)

    tree = [jnp.ones(3), jnp.ones(2, jnp.int32)]
    for platforms in (("cpu",), ("cuda",), ("cpu", "cuda")):
        text = step.trace(tree).lower(lowering_platforms=platforms).as_text()
        assert text.count("custom_call @procgroup_call(") == 2, text  # the barrier, and one call for both dtypes
        assert "callback" not in text, text
    found = step(tree)
    assert [one.tolist() for one in found] == [[size] * 3, [size] * 2]
    dist.destroy_process_group()


def test_one_custom_call_serves_cpus_and_gpus_of_nvidia() -> None:
    run(play_platforms, 2, timeout=60, environment=FAST)
