"""Collectives inside of jax.jit that go wrong: the error is in reach, ranks are named, nobody hangs."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import numpy as np
import pytest

import procgroup as dist
from procgroup import functional
from procgroup.testing import run_ranks
from world import attempt, run, start

pytest.importorskip("jax")

FAST = {"XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false --xla_backend_optimization_level=0"}


def play_mismatch(rank: int, size: int) -> None:
    import jax
    import jax.numpy as jnp

    dist.init_process_group(timeout=30)
    groups = [dist.new_group(timeout=20) for _ in range(4)]

    def branch_sizes(x: Any) -> Any:
        def larger(x: Any) -> Any:
            return functional.all_reduce(x, group=groups[0])

        def smaller(x: Any) -> Any:
            return jnp.concatenate([functional.all_reduce(x[:2], group=groups[0]), x[2:]])

        return jax.lax.cond(x[0] > 0, larger, smaller, x)

    # The ranks take different branches: both learn of it, with what each called, and no result is made.
    text = r"rank 1 called all_reduce\(SUM\) of 2 float32" if rank == 0 else r"rank 0 called all_reduce\(SUM\) of 4"
    with pytest.raises(dist.CollectiveMismatch, match=text) as caught, functional.jit_errors():
        jax.block_until_ready(jax.jit(branch_sizes)(jnp.full(4, 1.0 - 2 * rank)))
    assert isinstance(caught.value.__cause__, jax.errors.JaxRuntimeError)

    # Without the context manager, JAX's own error quotes ours.
    with pytest.raises(jax.errors.JaxRuntimeError, match="CollectiveMismatch: functional.all_reduce #1 on group"):
        jax.block_until_ready(jax.jit(lambda x: functional.all_reduce(x, group=groups[1]))(jnp.ones(2 + rank)))

    # Outside of jit the error is raised as it is, and so it is by functions that are only differentiated.
    with pytest.raises(dist.CollectiveMismatch):
        jax.grad(lambda x: functional.all_reduce(x, group=groups[2]).sum())(jnp.ones(2 + rank))

    # A decorator, which leaves other errors alone.
    @functional.jit_errors()
    def raises_other() -> None:
        raise RuntimeError("mine")

    with pytest.raises(RuntimeError, match="^mine$"):
        raises_other()

    # The group has ended, the default one has not: the next step of a program can go on.
    with pytest.raises(dist.DistError), functional.jit_errors():
        jax.block_until_ready(jax.jit(lambda x: functional.all_reduce(x, group=groups[1]))(jnp.ones(2)))
    total = jax.jit(functional.all_reduce)(jnp.ones(3))
    assert total.tolist() == [size] * 3
    compiled = jax.jit(lambda x: functional.all_reduce(x, group=groups[3]))
    compiled(jnp.ones(3))
    dist.destroy_process_group(groups[3])
    with pytest.raises(dist.GroupDestroyed), functional.jit_errors():
        jax.block_until_ready(compiled(jnp.ones(3)))
    dist.destroy_process_group()


def test_a_mismatch_is_raised_on_all_ranks_and_names_both_calls() -> None:
    run(play_mismatch, 2, timeout=80, environment=FAST)


def play_death(rank: int, size: int) -> str:
    import jax
    import jax.numpy as jnp

    dist.init_process_group(timeout=60)
    step = jax.jit(lambda x: functional.all_reduce(jnp.tanh(functional.all_reduce(x))))
    jax.block_until_ready(step(jnp.ones(4)))
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    began = time.monotonic()
    try:
        with functional.jit_errors():
            jax.block_until_ready(step(jnp.ones(4)))
    except dist.PeerLost as error:
        return f"lost {error.peer} {time.monotonic() - began < 5}"
    return "not raised"


def test_a_lost_rank_is_named() -> None:
    outcomes = attempt(play_death, 3, timeout=80, environment=FAST)
    assert [outcomes[rank].value for rank in (0, 2)] == ["lost 1 True"] * 2, outcomes


def play_interrupt(rank: int, size: int, inputs_are_there: bool) -> Any:
    import jax
    import jax.numpy as jnp

    signal.signal(signal.SIGINT, signal.default_int_handler)
    dist.init_process_group(timeout=60)
    step = jax.jit(functional.all_reduce)
    slow = jax.jit(lambda x: jax.lax.fori_loop(0, 40, lambda _, y: jnp.tanh(y @ y), x))
    given = jnp.ones((100, 100))
    jax.block_until_ready([step(given), slow(given)])
    if rank == 1:
        time.sleep(60)
    if not inputs_are_there:  # then a thread of XLA makes the call
        given = slow(given)
    try:
        print("waiting", flush=True)
        with functional.jit_errors():
            jax.block_until_ready(step(given))
    except KeyboardInterrupt:
        moment = time.monotonic()
    print("over", flush=True)
    return moment


@pytest.mark.parametrize("inputs_are_there", [True, False])
def test_ctrl_c_is_heard_at_once(inputs_are_there: bool) -> None:
    with start(play_interrupt, 2, args=(inputs_are_there,), environment=FAST) as world:
        world.wait_for_output(0, "waiting", 60)
        world.wait_until_asleep(0)  # most often inside of the call, and rightly interrupted if not
        sent = time.monotonic()
        world.kill(0, signal.SIGINT)
        world.wait_for_output(0, "over", 20)
        world.kill(1)
        outcomes = world.wait(20)
    assert outcomes[0].value is not None and outcomes[0].value - sent < 5, outcomes[0]


def test_ranks_that_are_threads_are_refused_inside_of_jit_only() -> None:
    import jax
    import jax.numpy as jnp

    def play() -> None:
        with pytest.raises(
            dist.DistBackendError, match=r"all_reduce\(SUM\) inside of jax.jit: these ranks are threads"
        ):
            jax.jit(functional.all_reduce)(jnp.ones(2))
        assert functional.all_reduce(jnp.ones(2)).tolist() == [2, 2]
        assert jax.grad(lambda x: functional.all_reduce(x).sum())(jnp.ones(2)).tolist() == [2, 2]

    run_ranks(play, 2)


def play_devices(rank: int, size: int) -> None:
    import jax
    import jax.numpy as jnp
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    dist.init_process_group(timeout=30)
    assert jax.device_count() == 2
    mesh = Mesh(np.array(jax.devices()), ("device",))
    split = PartitionSpec("device")
    whole = jnp.arange(4.0)
    for device in jax.devices():
        assert jax.jit(functional.all_reduce)(jax.device_put(whole, device)).tolist() == (size * whole).tolist()
    # Sharded by jit: one call, on the whole array. Divided among devices by hand: refused, in words.
    sharded = jax.device_put(whole, NamedSharding(mesh, split))
    assert jax.jit(lambda x: functional.all_reduce(x + 1))(sharded).tolist() == (size * (whole + 1)).tolist()
    with pytest.raises(TypeError, match="expected an array on one device"):
        dist.send(sharded, 1 - rank)
    divided = jax.shard_map(functional.all_reduce, mesh=mesh, in_specs=split, out_specs=split)
    for call in (divided, jax.jit(divided), jax.pmap(functional.all_reduce)):
        with pytest.raises(NotImplementedError, match="shard_map or jax.pmap over 2 devices of one process"):
            call(whole.reshape(2, 2))
    dist.destroy_process_group()


def test_several_devices_of_one_process() -> None:
    run(play_devices, 2, timeout=80, environment={"XLA_FLAGS": "--xla_force_host_platform_device_count=2"})
