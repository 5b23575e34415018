"""A training step of JAX in one compiled function, whose all_reduce goes by NCCL where JAX has GPUs.

    procgroup run --nproc-per-node gpu examples/jax_gpu.py
    JAX_PLATFORMS=cpu python -m procgroup run --nproc-per-node 2 examples/jax_gpu.py

Each rank has rows of its own, and all end with the same weights. It needs jax; on GPUs jax[cuda13] and NCCL, too
(pip install 'procgroup[nccl-cu13]').
"""

from __future__ import annotations

import os

import jax
import jax.numpy as jnp
import numpy as np

import procgroup as dist
from procgroup import functional


def loss(weights: jax.Array, inputs: jax.Array, targets: jax.Array) -> jax.Array:
    return jnp.mean((inputs @ weights - targets) ** 2)


@jax.jit
def step(weights: jax.Array, inputs: jax.Array, targets: jax.Array) -> tuple[jax.Array, jax.Array]:
    value, gradient = jax.value_and_grad(loss)(weights, inputs, targets)
    value, gradient = functional.all_reduce((value, gradient), dist.ReduceOp.AVG)
    return weights - 0.1 * gradient, value


def main() -> None:
    # Before JAX looks for devices: each rank uses one GPU of its host.
    jax.config.update("jax_cuda_visible_devices", os.environ["LOCAL_RANK"])
    on_gpu = jax.default_backend() == "gpu"
    dist.init_process_group("nccl" if on_gpu else "gloo")
    random = np.random.default_rng(dist.get_rank())
    inputs = jnp.asarray(random.normal(size=(64, 3)), jnp.float32)
    targets = inputs @ jnp.array([1.0, -2.0, 0.5])
    weights, value = jnp.zeros(3), jnp.zeros(())
    with functional.jit_errors():
        for _ in range(100):
            weights, value = step(weights, inputs, targets)
        found, last = np.asarray(weights).round(2).tolist(), float(value)
    where = "a GPU" if on_gpu else "a CPU"
    print(f"rank {dist.get_rank()} on {where}: weights {found}, loss below 1e-3: {last < 1e-3}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
