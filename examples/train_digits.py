"""Train a classifier of handwritten digits on several processes together.

    python -m procgroup run --nproc-per-node 4 examples/train_digits.py

Every rank holds the same parameters and works on its own part of each batch. One all_reduce per step adds
the ranks' gradients, so that all of them take the same step, bit by bit. The model is a perceptron with two
hidden layers in NumPy; the data are scikit-learn's 1,797 images of 8 x 8 pixels, which it brings along.
"""

from __future__ import annotations

import argparse
import hashlib
from collections.abc import Iterator
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray
from sklearn.datasets import load_digits

import procgroup as dist
from digits_view import TrainingView, save_curves

Array = NDArray[np.float64]
LAYERS = (64, 256, 128, 10)
BATCH = 128
LEARNING_RATE, MOMENTUM = 0.08, 0.9


class Perceptron:
    """Layers of weights and biases that are views of one vector, so that one all_reduce serves them all."""

    def __init__(self, seed: int = 0) -> None:
        sizes = [(n + 1) * m for n, m in pairwise(LAYERS)]
        self.parameters = np.zeros(sum(sizes))
        self.gradient = np.zeros_like(self.parameters)
        self.velocity = np.zeros_like(self.parameters)
        self.layers = list(self._split(self.parameters))
        self.layer_gradients = list(self._split(self.gradient))
        random = np.random.default_rng(seed)
        for weights, _ in self.layers:
            weights[:] = random.normal(0, np.sqrt(2 / len(weights)), weights.shape)

    def _split(self, vector: Array) -> Iterator[tuple[Array, Array]]:
        start = 0
        for n, m in pairwise(LAYERS):
            block = vector[start : start + (n + 1) * m].reshape(n + 1, m)
            yield block[:n], block[n]
            start += (n + 1) * m

    def forward(self, images: Array) -> list[Array]:
        """Return the activations of every layer; the last are the probabilities of the ten digits."""
        activations = [images]
        for weights, bias in self.layers[:-1]:
            activations.append(np.maximum(activations[-1] @ weights + bias, 0))
        weights, bias = self.layers[-1]
        scores = activations[-1] @ weights + bias
        scores = np.exp(scores - scores.max(axis=1, keepdims=True))
        activations.append(scores / scores.sum(axis=1, keepdims=True))
        return activations

    def backward(self, images: Array, digits: NDArray[np.int64], batch: int) -> float:
        """Write these images' part of the gradient of the batch's mean loss; return their part of that loss."""
        *hidden, probabilities = self.forward(images)
        own = np.arange(len(digits))
        loss = -np.log(probabilities[own, digits] + 1e-12).sum() / batch
        error = probabilities
        error[own, digits] -= 1
        error /= batch
        for (weights, _), gradient, inputs in zip(
            reversed(self.layers), reversed(self.layer_gradients), reversed(hidden), strict=True
        ):
            gradient[0][:] = inputs.T @ error
            gradient[1][:] = error.sum(axis=0)
            error = (error @ weights.T) * (inputs > 0)
        return float(loss)

    def step(self, learning_rate: float) -> None:
        self.velocity *= MOMENTUM
        self.velocity -= learning_rate * self.gradient
        self.parameters += self.velocity

    def accuracy(self, images: Array, digits: NDArray[np.int64]) -> float:
        return float((self.forward(images)[-1].argmax(axis=1) == digits).mean())


def load_images() -> tuple[Array, NDArray[np.int64], Array, NDArray[np.int64]]:
    """Return images (n x 64, 0 to 1) and digits: four fifths to train on, one fifth to test on."""
    data = load_digits()
    order = np.random.default_rng(1).permutation(len(data.target))
    images, digits = data.data[order] / 16, data.target[order]
    cut = len(order) // 5
    return images[cut:], digits[cut:], images[:cut], digits[:cut]


def train(rank: int, size: int, epochs: int, view: TrainingView) -> tuple[Perceptron, float]:
    """Train on this rank's part of every batch, together with the other ranks; return the model and its accuracy."""
    images, digits, test_images, test_digits = load_images()
    model = Perceptron()
    random = np.random.default_rng(2)  # the same on every rank: all agree on each batch
    accuracy = 0.0
    for epoch in range(epochs):
        order = random.permutation(len(images))
        losses = []
        for start in range(0, len(order), BATCH):
            batch = order[start : start + BATCH]
            own = batch[rank::size]
            losses.append(model.backward(images[own], digits[own], len(batch)))
            if size > 1:
                dist.all_reduce(model.gradient)
            model.step(LEARNING_RATE * (1 - epoch / epochs))
        total = np.array([np.mean(losses)])
        if size > 1:
            dist.all_reduce(total)
        accuracy = model.accuracy(test_images, test_digits)
        view.show(epoch + 1, float(total[0]), accuracy)
    return model, accuracy


def assert_identical_on_all_ranks(parameters: Array) -> str:
    """Compare the hashes of all ranks' parameters; return the hash."""
    digest = np.frombuffer(hashlib.sha256(parameters.tobytes()).digest(), np.uint8).copy()
    digests = [np.empty_like(digest) for _ in range(dist.get_world_size())]
    dist.all_gather(digests, digest)
    for rank, other in enumerate(digests):
        assert np.array_equal(other, digest), f"rank {rank} ended with other parameters than rank {dist.get_rank()}"
    return digest.tobytes().hex()[:16]


def main() -> None:
    options = argparse.ArgumentParser(description="Train a classifier of handwritten digits on several processes.")
    options.add_argument("--epochs", type=int, default=40)
    options.add_argument("--curves", default="digits.png", help="where to save loss and accuracy as a picture")
    options.add_argument("--compare-single", action="store_true", help="train again on rank 0 alone, and compare")
    arguments = options.parse_args()

    dist.init_process_group()
    rank, size = dist.get_rank(), dist.get_world_size()
    with TrainingView(arguments.epochs, size, visible=rank == 0) as view:
        model, accuracy = train(rank, size, arguments.epochs, view)
    digest = assert_identical_on_all_ranks(model.parameters)

    if rank == 0:
        save_curves(view, arguments.curves)
        print(f"parameters identical on {size} ranks ({digest}); curves in {arguments.curves}")
        if arguments.compare_single:
            with TrainingView(arguments.epochs, 1, visible=False) as hidden:
                alone, _ = train(0, 1, arguments.epochs, hidden)
            difference = np.abs(alone.parameters - model.parameters).max()
            assert difference < 1e-5, f"expected the parameters of one rank alone, got a difference of {difference}"
            print(f"largest difference from training on one rank: {difference:.1e}")
        print(f"test accuracy {accuracy:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
