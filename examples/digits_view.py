"""What the digits example shows: a progress bar with loss and accuracy while it trains, and the curves as a picture."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn


def terminal() -> Console:
    """Return the terminal itself, since a launcher reads its ranks' output through a pipe; else that output."""
    try:
        return Console(file=Path("/dev/tty").open("w"))
    except OSError:
        return Console(file=sys.stdout)


class TrainingView:
    """Loss and accuracy, epoch by epoch. Only the visible one, that of rank 0, shows anything."""

    def __init__(self, epochs: int, size: int, visible: bool) -> None:
        self.losses: list[float] = []
        self.accuracies: list[float] = []
        self._epochs = epochs
        self._visible = visible
        columns = (
            TextColumn("training on {task.fields[size]} ranks"),
            BarColumn(bar_width=30),
            TextColumn("epoch {task.completed}/{task.total}"),
            TextColumn("loss {task.fields[loss]}  accuracy {task.fields[accuracy]}"),
            TimeElapsedColumn(),
        )
        self._progress = Progress(*columns, console=terminal() if visible else None, disable=not visible)
        self._bar = self._progress.add_task("", total=epochs, size=size, loss="-", accuracy="-")

    def show(self, epoch: int, loss: float, accuracy: float) -> None:
        self.losses.append(loss)
        self.accuracies.append(accuracy)
        self._progress.update(self._bar, completed=epoch, loss=f"{loss:.4f}", accuracy=f"{accuracy:.4f}")
        if self._visible and not self._progress.console.is_terminal and (epoch % 10 == 0 or epoch == self._epochs):
            done = 30 * epoch // self._epochs
            bar = "━" * done + " " * (30 - done)
            print(f"{bar} epoch {epoch}/{self._epochs}  loss {loss:.4f}  accuracy {accuracy:.4f}", flush=True)

    def __enter__(self) -> TrainingView:
        if self._progress.console.is_terminal:
            self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._progress.console.is_terminal:
            self._progress.stop()


def save_curves(view: TrainingView, path: str) -> None:
    """Draw loss and accuracy over the epochs into a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(9, 3.2), layout="constrained")
    epochs = range(1, len(view.losses) + 1)
    left.semilogy(epochs, view.losses, color="#30638e")
    left.set(title="loss on the training images", xlabel="epoch")
    right.plot(epochs, view.accuracies, color="#d1495b")
    right.set(title=f"accuracy on the test images: {view.accuracies[-1]:.4f}", xlabel="epoch")
    for axes in (left, right):
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def save_losses(losses: Mapping[str, NDArray[np.float64]], event: int, path: str) -> None:
    """Draw the loss of each step of several runs into a PNG, with a line where something happened."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 3.2), layout="constrained")
    for (name, values), style in zip(losses.items(), (("#30638e", 3.0), ("#d1495b", 1.0)), strict=False):
        axes.semilogy(range(1, len(values) + 1), values, color=style[0], linewidth=style[1], label=name)
    axes.axvline(event, color="#888888", linestyle=":")
    axes.set(title="loss of each step", xlabel="step")
    axes.legend()
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)
