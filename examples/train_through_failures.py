"""Train a classifier of handwritten digits, and go on when a rank dies in the middle.

    procgroup run --nproc-per-node 4 --keep-going examples/train_through_failures.py --go-on shrink
    procgroup run --nproc-per-node 4 --replace --max-restarts 3 examples/train_through_failures.py --go-on replace

Rank 2 kills itself in step 100, as a machine that fails would. With "shrink" the three others make a smaller group and
go on with that; with "replace" the launcher starts rank 2 again. Then all continue from the state of the rank that has
come furthest: a new rank has none, and one rank may have completed the step in which another one failed. A step that
has failed is made again, from the images on.

The model and the data are those of train_digits.py. The picture has the loss of each step, beside that of a run in
which nobody dies.
"""

from __future__ import annotations

import argparse
import os
import signal
import time

import numpy as np
from numpy.typing import NDArray

import procgroup as dist
from digits_view import save_losses
from train_digits import BATCH, LEARNING_RATE, Perceptron, load_images

VICTIM, DIES_AT = 2, 100


class Training:
    """The model, and how far its training is: all that a new rank needs from another one."""

    def __init__(self, steps: int) -> None:
        self.images, self.digits, self.test_images, self.test_digits = load_images()
        self.model = Perceptron()
        self.steps = steps
        self.step = 0
        self.losses = np.zeros(steps)

    def make_step(self) -> None:
        """Make the next step together with the other ranks."""
        order = np.random.default_rng(self.step).permutation(len(self.images))  # the same on every rank
        batch = order[:BATCH]
        own = batch[dist.get_rank() :: dist.get_world_size()]
        loss = np.array([self.model.backward(self.images[own], self.digits[own], len(batch))])
        dist.all_reduce(self.model.gradient)
        dist.all_reduce(loss)
        self.model.step(LEARNING_RATE * (1 - self.step / self.steps))
        self.losses[self.step] = loss[0]
        self.step += 1

    def share(self) -> None:
        """Give all ranks the state of the one that has come furthest."""
        steps = [0] * dist.get_world_size()
        dist.all_gather_object(steps, self.step)
        if len(set(steps)) == 1:
            return
        sender = steps.index(max(steps))
        for array in (self.model.parameters, self.model.velocity, self.losses):
            dist.broadcast(array, sender)
        self.step = steps[sender]


def train(training: Training, go_on: str, dies: bool) -> list[str]:
    """Train to the end; return a line for each death that this rank has survived."""
    events = []
    lost: tuple[int, float] | None = None
    has_state = False
    while training.step < training.steps:
        if dies and training.step == DIES_AT:
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            if not has_state:
                training.share()
                has_state = True
            training.make_step()
        except (dist.PeerLost, dist.PeerFailed) as error:
            lost = lost or (error.peer, time.monotonic())
            dist.shrink_group() if go_on == "shrink" else dist.reconfigure()
            has_state = False
            continue
        if lost is not None:
            seconds = time.monotonic() - lost[1]
            size = dist.get_world_size()
            events.append(f"lost rank {lost[0]}; {size} ranks made step {training.step} {seconds:.3f} s later")
            lost = None
    return events


def train_undisturbed(steps: int) -> NDArray[np.float64]:
    """Return the losses of a run in which nobody dies, made by one rank: sums of the same numbers."""
    training = Training(steps)
    for step in range(steps):
        batch = np.random.default_rng(step).permutation(len(training.images))[:BATCH]
        training.losses[step] = training.model.backward(training.images[batch], training.digits[batch], len(batch))
        training.model.step(LEARNING_RATE * (1 - step / steps))
    return training.losses


def main() -> None:
    options = argparse.ArgumentParser(description="Train a classifier of digits through the death of a rank.")
    options.add_argument("--go-on", choices=("shrink", "replace"), default="shrink")
    options.add_argument("--steps", type=int, default=300)
    options.add_argument("--nobody-dies", action="store_true")
    options.add_argument("--curves", default="", help="where to save the losses as a picture")
    arguments = options.parse_args()

    dist.init_process_group()
    training = Training(arguments.steps)
    is_victim = dist.get_rank() == VICTIM and not dist.get_new_ranks()  # and not the one in its place
    events = train(training, arguments.go_on, dies=is_victim and not arguments.nobody_dies)
    if dist.get_rank() == 0:
        print("\n".join(events))
        undisturbed = train_undisturbed(arguments.steps)
        difference = float(np.abs(undisturbed - training.losses).max())
        if arguments.curves:
            save_losses({"nobody dies": undisturbed, "a rank dies": training.losses}, DIES_AT, arguments.curves)
        accuracy = training.model.accuracy(training.test_images, training.test_digits)
        print(f"largest difference of a step's loss from an undisturbed run: {difference:.1e}")
        print(f"test accuracy {accuracy:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
