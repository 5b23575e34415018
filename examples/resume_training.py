"""Train with checkpoints, and go on after a restart, also with another number of processes.

    python -m procgroup run --nproc-per-node 4 examples/resume_training.py --checkpoint digits.npz --stop-after 20
    python -m procgroup run --nproc-per-node 3 examples/resume_training.py --checkpoint digits.npz

The first command ends in the middle of an epoch, as if the machine had failed; the second goes on from the last
checkpoint. Every step is made of the same 120 images, whatever the number of ranks, so the result is that of a training
which was never interrupted. The model is one layer in NumPy; the images are scikit-learn's.
"""

from __future__ import annotations

import argparse
import json
import os
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from sklearn.datasets import load_digits

import procgroup as dist
from procgroup.parallel import DistributedSampler, average_gradients, broadcast_parameters

IMAGES, BATCH = 1440, 120  # of all ranks together; the number of ranks has to divide the batch
LEARNING_RATE, MOMENTUM = 0.5, 0.9
Arrays = dict[str, Any]


def save(path: Path, arrays: Arrays, state: dict[str, Any]) -> None:
    """Write a checkpoint in full or not at all: under another name first, which then takes the place of the old."""
    partial = path.with_name(path.name + ".partial")
    with partial.open("wb") as file:
        np.savez(file, sampler=np.array(json.dumps(state)), **arrays)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)


def load(path: Path) -> tuple[Arrays, dict[str, Any]] | None:
    """Return what rank 0 finds on its disk, on every rank; None when there is no checkpoint."""
    found: list[Any] = [None]
    if dist.get_rank() == 0 and path.exists():
        with np.load(path) as file:
            arrays = {name: file[name] for name in file.files if name != "sampler"}
            found = [(arrays, json.loads(str(file["sampler"])))]
    dist.broadcast_object_list(found)
    return found[0]


def gradient(arrays: Arrays, images: Any, digits: Any) -> Arrays:
    """Return the gradient of the mean loss of these images."""
    scores = images @ arrays["weights"] + arrays["bias"]
    error = np.exp(scores - scores.max(axis=1, keepdims=True))
    error /= error.sum(axis=1, keepdims=True)
    error[np.arange(len(digits)), digits] -= 1
    error /= len(digits)
    return {"weights": images.T @ error, "bias": error.sum(axis=0)}


def step(arrays: Arrays, mean: Arrays) -> Arrays:
    moved = {}
    for name in mean:
        moved[f"{name}_velocity"] = MOMENTUM * arrays[f"{name}_velocity"] - LEARNING_RATE * mean[name]
        moved[name] = arrays[name] + moved[f"{name}_velocity"]
    return moved


def begin() -> Arrays:
    random = np.random.default_rng(seed=dist.get_rank())
    parameters = broadcast_parameters({"weights": random.normal(0, 0.1, (64, 10)), "bias": np.zeros(10)})  # of rank 0
    return {**parameters, **{f"{name}_velocity": np.zeros_like(array) for name, array in parameters.items()}}


def train(images: Any, digits: Any, options: argparse.Namespace) -> Arrays:
    rank, size = dist.get_rank(), dist.get_world_size()
    sampler = DistributedSampler(images)
    found = load(options.checkpoint)
    if found is None:
        arrays = begin()
    else:
        arrays, state = found
        sampler.load_state_dict(state)
        print(f"rank {rank} of {size} goes on in epoch {state['epoch']} after {state['position']} images")

    steps = 0
    for epoch in range(sampler.epoch, options.epochs):
        sampler.set_epoch(epoch)
        indices = iter(sampler)
        # Nothing is drawn ahead of its use here. After a DataLoader's batches: sampler.advance(len(batch)).
        while own := list(islice(indices, BATCH // size)):
            arrays = step(arrays, average_gradients(gradient(arrays, images[own], digits[own])))
            steps += 1
            if rank == 0 and steps % options.every == 0:
                save(options.checkpoint, arrays, sampler.state_dict())
            if steps == options.stop_after:
                dist.barrier()
                os._exit(3)
    if rank == 0:
        save(options.checkpoint, arrays, sampler.state_dict())
    return arrays


def main() -> None:
    parser = argparse.ArgumentParser(description="Train with checkpoints, and go on from the last one.")
    parser.add_argument("--checkpoint", type=Path, required=True)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--every", type=int, default=8, help="steps from one checkpoint to the next")
    parser.add_argument("--stop-after", type=int, default=-1, help="end after so many steps, as if the machine failed")
    options = parser.parse_args()

    dist.init_process_group()
    if BATCH % dist.get_world_size():
        raise SystemExit(f"expected a number of ranks that divides {BATCH}, got {dist.get_world_size()}")
    data = load_digits()
    images, digits = data.data / 16, data.target
    arrays = train(images[:IMAGES], digits[:IMAGES], options)
    right = (images[IMAGES:] @ arrays["weights"] + arrays["bias"]).argmax(axis=1) == digits[IMAGES:]
    if dist.get_rank() == 0:
        print(f"test accuracy {right.mean():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
