"""Train a classifier of handwritten digits with JAX on several processes together.

    python -m procgroup run --nproc-per-node 2 examples/train_jax.py

Each rank computes the gradients of its own part of a batch, in a compiled function; between that and the compiled
update, average_gradients makes them the same on every rank. It needs jax and scikit-learn, which brings the images.
"""

from __future__ import annotations

import argparse
import hashlib
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from sklearn.datasets import load_digits

import procgroup as dist
from procgroup.parallel import DistributedSampler, average_gradients, broadcast_parameters

LAYERS = (64, 128, 64, 10)
BATCH = 128
LEARNING_RATE, MOMENTUM = 0.1, 0.9


def initial_parameters(seed: int) -> list[dict[str, Any]]:
    random = np.random.default_rng(seed)
    return [
        {"weights": jnp.asarray(random.normal(0, np.sqrt(2 / n), (n, m)), jnp.float32), "bias": jnp.zeros(m)}
        for n, m in pairwise(LAYERS)
    ]


def scores(parameters: Any, images: Any) -> Any:
    *hidden, last = parameters
    for layer in hidden:
        images = jax.nn.relu(images @ layer["weights"] + layer["bias"])
    return images @ last["weights"] + last["bias"]


def loss(parameters: Any, images: Any, digits: Any) -> Any:
    return -jnp.take_along_axis(jax.nn.log_softmax(scores(parameters, images)), digits[:, None], axis=1).mean()


loss_and_gradients = jax.jit(jax.value_and_grad(loss))


@jax.jit
def update(parameters: Any, velocity: Any, gradients: Any) -> tuple[Any, Any]:
    velocity = jax.tree.map(lambda v, g: MOMENTUM * v - LEARNING_RATE * g, velocity, gradients)
    return jax.tree.map(jnp.add, parameters, velocity), velocity


def load_images() -> tuple[Any, Any, Any, Any]:
    """Return images (n x 64, 0 to 1) and digits: four fifths to train on, one fifth to test on."""
    data = load_digits()
    order = np.random.default_rng(1).permutation(len(data.target))
    images, digits = (data.data[order] / 16).astype(np.float32), data.target[order]
    cut = len(order) // 5
    return images[cut:], digits[cut:], images[:cut], digits[:cut]


def train(images: Any, digits: Any, epochs: int) -> Any:
    """Train on this rank's part of every batch; return the parameters, which are the same on all ranks."""
    parameters = broadcast_parameters(initial_parameters(seed=dist.get_rank()))  # rank 0's
    velocity = jax.tree.map(jnp.zeros_like, parameters)
    sampler = DistributedSampler(images)
    own_batch = BATCH // dist.get_world_size()
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        indices = np.array(list(sampler))
        losses = []
        for start in range(0, len(indices), own_batch):
            own = indices[start : start + own_batch]
            value, gradients = loss_and_gradients(parameters, images[own], digits[own])
            parameters, velocity = update(parameters, velocity, average_gradients(gradients))
            losses.append(float(value))
        if dist.get_rank() == 0:
            print(f"epoch {epoch + 1}: loss {np.mean(losses):.4f} on rank 0", flush=True)
    return parameters


def accuracy(parameters: Any, images: Any, digits: Any) -> float:
    """Count on each rank its own part, no image twice, and add up."""
    own = np.array(list(DistributedSampler(images, shuffle=False, mode="exact")), np.int64)
    right = np.array([np.sum(np.asarray(scores(parameters, images[own])).argmax(axis=1) == digits[own])])
    dist.all_reduce(right)
    return float(right[0]) / len(images)


def main() -> None:
    options = argparse.ArgumentParser(description="Train a classifier of handwritten digits with JAX.")
    options.add_argument("--epochs", type=int, default=15)
    arguments = options.parse_args()

    dist.init_process_group()
    images, digits, test_images, test_digits = load_images()
    parameters = train(images, digits, arguments.epochs)
    found = accuracy(parameters, test_images, test_digits)
    digest = hashlib.sha256(b"".join(np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(parameters))).hexdigest()
    print(f"rank {dist.get_rank()} of {dist.get_world_size()}: parameters {digest[:16]}, test accuracy {found:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
