"""Training with whole steps in a CUDA graph, as torch's documentation has it, beside eager training.

Import it where torch has the stand-in GPUs already.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import torch
from parallel import models
from torch import nn

WARM_UPS = 11
"""As many as torch asks for with its DistributedDataParallel."""


class Buffered(nn.Module):
    """With running statistics, and a buffer of its own that it changes in place."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(models.WIDTH, 4), nn.Linear(4, 2)
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("total", torch.zeros(4))

    def forward(self, inputs: Any) -> Any:
        hidden = self.norm(self.first(inputs))
        self.total.add_(hidden.detach().sum(0))  # of this rank's inputs: rank 0's is broadcast
        return self.last(torch.tanh(hidden))


def inputs_of(number: int) -> Any:
    """Return this rank's part of a batch, for a launched world of procgroup's groups or of torch's."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    return models.part(models.batch(number, size), rank)


def on_side_stream(call: Callable[[], Any]) -> Any:
    """Call on another stream than the default one, which takes no part in captures."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        result = call()
    torch.cuda.current_stream().wait_stream(side)
    return result


class Training:
    """A model, an optimizer, and inputs whose memory stays; ``step`` does not step the optimizer."""

    def __init__(self, model: Any, step: Callable[[Any, Any], Any] | None = None) -> None:
        self.model = model
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        self.inputs = inputs_of(0).cuda()
        self._step = step or (lambda model, inputs: models.loss_of(model(inputs)).backward())

    def load(self, number: int) -> None:
        self.inputs.copy_(inputs_of(number))

    def step(self) -> None:
        self._step(self.model, self.inputs)

    def train(self, numbers: Sequence[int]) -> None:
        """Train eagerly."""

        def all_steps() -> None:
            for number in numbers:
                self.load(number)
                self.optimizer.zero_grad()
                self.step()
                self.optimizer.step()

        on_side_stream(all_steps)

    def capture(self, has_optimizer: bool) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        self.optimizer.zero_grad()
        with torch.cuda.graph(graph):
            self.step()
            if has_optimizer:
                self.optimizer.step()
        return graph

    def state(self) -> dict[str, Any]:
        """Return what training has changed, on the host, with the gradients."""
        found = {name: value.cpu() for name, value in self.model.state_dict().items()}
        for name, parameter in self.model.named_parameters():
            found[f"{name}.grad"] = None if parameter.grad is None else parameter.grad.cpu()
        return found


def assert_same(ours: Training, eager: Training) -> None:
    """Compare two models bit by bit."""
    mine, expected = ours.state(), eager.state()
    assert mine.keys() == expected.keys()
    for name, value in expected.items():
        same = mine[name] is None if value is None else torch.equal(mine[name], value)
        assert same, f"{name}: {mine[name]} instead of {value}"


def replay_as_eager(
    make: Callable[[], Any],
    step: Callable[[Any, Any], Any] | None = None,
    has_optimizer: bool = False,
    warm_ups: int = WARM_UPS,
) -> None:
    """Train two models of ``make``, one eagerly and one by replays; require the same gradients and weights."""
    ours, eager = Training(on_side_stream(make), step), Training(on_side_stream(make), step)
    for each in (ours, eager):
        each.train(range(warm_ups))
    go_on_as_eager(ours, eager, ours.capture(has_optimizer), has_optimizer)


def go_on_as_eager(ours: Training, eager: Training, graph: torch.cuda.CUDAGraph, has_optimizer: bool) -> None:
    """Train both from here, ours by replays."""
    for number in range(100, 104):
        ours.load(number)
        graph.replay()
        if not has_optimizer:
            ours.optimizer.step()
        eager.train([number])
        assert_same(ours, eager)


def error_of(call: Callable[[], Any]) -> tuple[str, str]:
    """Return the kind and text of the first error of a capture, with its notes.

    The end of a capture may raise another one. torch leaves its stream current then.
    """
    stream = torch.cuda.current_stream()
    try:
        call()
    except Exception as error:
        first: BaseException = error
        while first.__context__ is not None:
            first = first.__context__
        return type(first).__name__, "\n".join([str(first), *getattr(first, "__notes__", ())])
    finally:
        torch.cuda.set_stream(stream)
    return "nothing", ""
