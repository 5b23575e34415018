"""procgroup.functional inside of JAX's transformations, compared with what one process computes for all ranks.

Every collective is a matrix that takes the arrays of all ranks, one after the other, to the results of all ranks. So
the oracle is NumPy in 64 bits: values, first and second derivatives and batches follow from the matrix. A gradient is
that of the sum of all ranks' losses.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import procgroup as dist
from procgroup import functional
from world import run

pytest.importorskip("jax")


def start(rank: int, size: int) -> None:
    """Start a rank whose XLA compiles at once and leaves threads to the others."""
    os.environ["XLA_FLAGS"] = "--xla_cpu_multi_thread_eigen=false --xla_backend_optimization_level=0"
    dist.init_process_group(timeout=60)


def collectives_of(rank: int, size: int) -> dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]]:
    """Return, by name, what a rank does with its array of shape (size, 3), and what that does to all ranks' arrays."""
    after, before = (rank + 1) % size, (rank - 1) % size
    average = dist.ReduceOp.AVG
    return {
        "all_reduce": (functional.all_reduce, lambda x: np.stack([x.sum(0)] * size)),
        "all_reduce AVG": (lambda x: functional.all_reduce(x, average), lambda x: np.stack([x.mean(0)] * size)),
        "all_gather": (functional.all_gather, lambda x: np.stack([x] * size)),
        "reduce_scatter": (functional.reduce_scatter, lambda x: x.sum(0)),
        "reduce_scatter AVG": (lambda x: functional.reduce_scatter(x, average), lambda x: x.mean(0)),
        "all_to_all": (functional.all_to_all, lambda x: x.swapaxes(0, 1)),
        "broadcast": (lambda x: functional.broadcast(x, size - 1), lambda x: np.stack([x[-1]] * size)),
        "sendrecv": (lambda x: functional.sendrecv(x, after, before), lambda x: np.roll(x, 1, 0)),
    }


def matrix_of(of_all: Callable[[Any], Any], size: int) -> Any:
    """Return the matrix of a collective: (elements of all results, elements of all arrays)."""
    basis = np.eye(size * size * 3).reshape(-1, size, size, 3)
    return np.stack([of_all(one).ravel() for one in basis], axis=1)


def expected_of(matrix: Any, x: Any, size: int) -> dict[str, Any]:
    """Return the values of all ranks for the losses below: ``x`` are the arrays of all ranks, one after the other."""
    factors = np.repeat(1.0 + np.arange(size), len(matrix) // size)
    y = matrix @ x**2
    cotangent = matrix.T @ (factors * np.sin(2 * y))
    curvature = matrix.T @ (2 * factors * np.cos(2 * y) * (matrix @ (8 * x**2 * cotangent)))
    return {
        "result": matrix @ x,
        "loss": (factors * np.sin(y) ** 2).reshape(size, -1).sum(1),
        "gradient": 2 * x * cotangent,
        "second": 8 * x * cotangent**2 + 2 * x * curvature,
    }


def play_derivatives(rank: int, size: int) -> None:
    start(rank, size)
    import jax
    import jax.numpy as jnp

    x = np.random.default_rng(5).normal(size=(size, size, 3))
    calls = collectives_of(rank, size)

    def loss(x: Any, name: str) -> Any:
        return (1.0 + rank) * jnp.sum(jnp.sin(calls[name][0](x * x)) ** 2)

    def of_one(x: Any, name: str) -> dict[str, Any]:
        value, gradient = jax.value_and_grad(loss)(x, name)
        result, change = jax.jvp(calls[name][0], (x,), (x,))
        second = jax.grad(lambda x: jnp.sum(jax.grad(loss)(x, name) ** 2))(x)
        return {"result": result, "change": change, "loss": value, "gradient": gradient, "second": second}

    @jax.jit
    def of_all_calls(x: Any, batch: Any) -> Any:
        alone = {name: of_one(x, name) for name in calls}
        members = {
            name: jax.vmap(jax.value_and_grad(loss), in_axes=(2, None), out_axes=(0, 2))(batch, name) for name in calls
        }
        return alone, members

    own = jnp.asarray(x[rank], jnp.float32)
    alone, members = of_all_calls(own, jnp.stack([own, 0.5 * own], axis=2))
    for name, (mine, of_all) in calls.items():
        matrix = matrix_of(of_all, size)
        expected = expected_of(matrix, x.ravel(), size)
        halved = expected_of(matrix, 0.5 * x.ravel(), size)

        def compare(got: Any, expected: Any, what: str) -> None:
            wanted = np.asarray(expected).reshape(size, -1)[rank]
            precision = 1e-5 * np.abs(wanted).max()
            np.testing.assert_allclose(np.ravel(got), wanted, rtol=1e-3, atol=precision, err_msg=f"{name} {what}")  # noqa: B023

        for what, got in alone[name].items():
            compare(got, expected["result" if what == "change" else what], what)
        values, gradients = members[name]
        compare(values[1], halved["loss"], "loss of a batch")
        compare(gradients[:, :, 1], halved["gradient"], "gradient of a batch")
        compare(mine(own), expected["result"], "outside of jit")
    # Differentiated, but not compiled.
    compare(jax.grad(loss)(own, "sendrecv"), expected["gradient"], "gradient outside of jit")
    dist.destroy_process_group()


@pytest.mark.parametrize("size", [pytest.param(2, marks=pytest.mark.slow), 4])
def test_values_derivatives_and_batches_are_those_of_one_process(size: int) -> None:
    run(play_derivatives, size, timeout=250)


def play_control_flow(rank: int, size: int) -> None:
    start(rank, size)
    import jax
    import jax.numpy as jnp

    x = np.random.default_rng(5).normal(size=(size, 3)).astype(np.float32)

    def steps(call: Any, start: Any) -> Any:
        def step(carry: Any, _: Any) -> Any:
            carry = jnp.tanh(call(carry) * 0.5)
            return carry, carry.sum()

        last, sums = jax.lax.scan(step, start, None, length=4)
        return (last**2).sum() + sums.sum()

    def sum_of_all(x: Any) -> Any:
        return jnp.broadcast_to(x.sum(0), x.shape)

    expected = jax.grad(lambda x: steps(sum_of_all, x))(x)[rank]
    gradient = jax.jit(jax.grad(lambda x: steps(functional.all_reduce, x)))(x[rank])
    np.testing.assert_allclose(gradient, expected, rtol=1e-4, atol=1e-6)

    # Both branches and the number of rounds depend on values that all ranks share.
    def branch(x: Any) -> Any:
        total = functional.all_reduce(x).sum()
        return jax.lax.cond(total > 0, lambda x: functional.all_reduce(x, dist.ReduceOp.AVG), lambda x: -x, x)

    positive, negative = jnp.ones(3) * (rank + 1), -jnp.ones(3)
    for given, result in ((positive, np.full(3, (size + 1) / 2)), (negative, np.ones(3))):
        np.testing.assert_allclose(jax.jit(branch)(given), result, rtol=1e-6)
    slope = jax.jit(jax.grad(lambda x: branch(x).sum()))(positive)
    np.testing.assert_allclose(slope, np.ones(3), rtol=1e-6)
    doubled = jax.jit(lambda x: jax.lax.while_loop(lambda x: x[0] < 100, functional.all_reduce, x))(jnp.ones(2))
    assert doubled[0] == next(size**power for power in range(20) if size**power >= 100)
    counted = jax.jit(lambda x: jax.lax.fori_loop(0, 3, lambda _, x: functional.all_gather(x).sum(0), x))(jnp.ones(2))
    assert counted.tolist() == [size**3] * 2

    # Neither dropped where nothing needs the result, nor merged where two calls are alike, nor repeated.
    @jax.jit
    def unused(x: Any) -> Any:
        functional.all_reduce(x)
        functional.barrier()
        functional.all_reduce(x)
        return x

    group = dist.group.WORLD
    assert group is not None
    before = len(group.records())
    jax.block_until_ready(unused(jnp.ones(3)))
    jax.effects_barrier()
    assert [record["op"] for record in group.records()[before:]] == ["all_reduce", "barrier", "all_reduce"]

    with pytest.raises(NotImplementedError, match="Effects not supported in partial-eval of `checkpoint`"):
        jax.jit(jax.grad(jax.checkpoint(lambda x: jnp.sin(functional.all_reduce(x)).sum())))(jnp.ones(3))
    # What is recomputed communicates nothing; what is communicated is outside.
    kept = jax.checkpoint(lambda x: jnp.sin(jnp.sin(x)))
    gradient = jax.jit(jax.grad(lambda x: functional.all_reduce(kept(x)).sum()))(jnp.ones(3))
    np.testing.assert_allclose(gradient, size * jax.grad(lambda x: jnp.sin(jnp.sin(x)))(1.0), rtol=1e-6)
    dist.destroy_process_group()


def test_loops_and_branches() -> None:
    run(play_control_flow, 3, timeout=250)


def play_types(rank: int, size: int) -> None:
    start(rank, size)
    import jax
    import jax.numpy as jnp

    @jax.jit
    def everything(tree: Any) -> Any:
        total = functional.all_reduce(tree)
        gathered = functional.all_gather(tree)
        part = functional.reduce_scatter(jax.tree.map(lambda x: jnp.stack([x] * size), tree))
        return total, gathered, part, functional.all_reduce(tree["int32"], dist.ReduceOp.MAX)

    dtypes = ("bfloat16", "float16", "float32", "int8", "int32", "uint32", "complex64", "bool")
    tree = {name: jnp.ones((2, 3), name) for name in dtypes} | {"none": None, "empty": [jnp.zeros((0, 2))]}
    shapes = jax.eval_shape(everything, tree)
    results = everything(tree)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), results) == jax.tree.map(lambda x: (x.shape, x.dtype), shapes)
    total, gathered, part, _ = results
    for name in dtypes:
        expected = 1 if name == "bool" else size
        assert total[name].dtype == name and bool((total[name] == expected).all()), name
        assert gathered[name].shape == (size, 2, 3) and bool((gathered[name] == 1).all()), name
        assert part[name].shape == (2, 3) and bool((part[name] == expected).all()), name
    assert total["empty"][0].shape == (0, 2) and total["none"] is None

    # 64 bits are off: what NumPy has in 64 bits is of 32 inside of jit, as everywhere in JAX.
    constant = np.arange(3.0)
    result = jax.jit(lambda x: functional.all_reduce([x, constant, 2]))(jnp.ones(3))
    assert [leaf.dtype.name for leaf in result] == ["float32", "float32", "int32"]
    assert result[1].tolist() == [0, size, 2 * size] and result[2] == 2 * size

    # What is constant in a compiled function is communicated each time, not once while it is traced.
    closed_over = jnp.ones(3)
    alike = jax.jit(lambda: functional.all_reduce(closed_over))
    assert isinstance(jax.make_jaxpr(alike)().out_avals, list) and alike().tolist() == [size] * 3 == alike().tolist()
    # Integers and arrays that nothing is differentiated by take part in a function that has a gradient.
    mixed = jax.jit(jax.grad(lambda x: functional.all_reduce({"x": x, "n": jnp.arange(3)})["x"].sum()))
    assert mixed(jnp.ones(3)).tolist() == [size] * 3
    # A donated array is read before its memory is used again.
    donated = jax.jit(lambda x: functional.all_reduce(x + 1) * 2, donate_argnums=0)
    large = 300_000
    assert bool((donated(jnp.ones(large)) == 4 * size).all())
    # A batch member that is the same for all stays one.
    shared = jax.jit(jax.vmap(lambda x, y: functional.all_reduce([x, y]), in_axes=(0, None), out_axes=[0, None]))
    batched, single = shared(jnp.ones((4, 2)), jnp.ones(5))
    assert batched.shape == (4, 2) and single.tolist() == [size] * 5

    for call, error, text in (
        (lambda x: functional.reduce_scatter(x), dist.ArgumentError, r"leaf 0 has shape \(7,\); expected a first"),
        (lambda x: functional.all_reduce([x, "text"]), TypeError, r"`tree\[1\]` is not an array that JAX can take"),
        (lambda x: dist.parallel.average_gradients(x), TypeError, "call the functions of procgroup.functional"),
    ):
        with pytest.raises(error, match=text):
            jax.jit(call)(jnp.ones(7))
    for call, text in (
        (lambda x: functional.all_reduce(x, dist.ReduceOp.MAX), r"functional.all_reduce\(MAX\) has no derivative"),
        (lambda x: functional.reduce_scatter(x, dist.ReduceOp.MIN), r"functional.reduce_scatter\(MIN\) has no"),
    ):
        with pytest.raises(TypeError, match=text):
            jax.jit(jax.grad(lambda x, call=call: call(x).sum()))(jnp.ones((size, 2)))
    largest = jax.grad(lambda x: (x - functional.all_reduce(jax.lax.stop_gradient(x), dist.ReduceOp.MAX)).sum())
    assert jax.jit(largest)(jnp.ones(2)).tolist() == [1, 1]
    dist.destroy_process_group()


def test_types_shapes_and_refusals() -> None:
    run(play_types, 2, timeout=250)


def play_order(rank: int, size: int) -> None:
    """Calls of several compiled functions, some of which still run, and calls outside of them, keep one order."""
    start(rank, size)
    import jax
    import jax.numpy as jnp

    slow = jax.jit(lambda x: jax.lax.fori_loop(0, 60, lambda _, y: jnp.tanh(y @ y), x).sum() * 0 + 1)
    inside = jax.jit(lambda x: functional.all_reduce(jnp.full(4, x)))
    after = jax.jit(lambda: functional.all_gather(jnp.float32(rank)))
    square = jnp.eye(200)
    for turn in range(5):
        # Rank 1 has its argument at once, rank 0 later: only one of them runs the callback after the call returned.
        first = inside(slow(square) if rank == 0 else jnp.float32(1))
        second = after()
        # The same dtype and count as the call inside: in the wrong order the ranks would exchange one for the other.
        outside = np.full(4, 100.0, np.float32)
        dist.all_reduce(outside)
        functional.barrier()
        eager = functional.all_reduce(jnp.full(4, 7.0))
        assert outside.tolist() == [100.0 * size] * 4, turn
        assert eager.tolist() == [7.0 * size] * 4, turn
        assert first.tolist() == [size] * 4 and second.tolist() == list(range(size)), turn
    for count in (1_000, 1_000_000):
        assert bool((jax.jit(functional.all_reduce)(jnp.ones(count)) == size).all())
    dist.destroy_process_group()


def test_calls_inside_and_outside_keep_one_order() -> None:
    run(play_order, 2, timeout=250)
