"""What data-parallel training costs beside the same model without communication: our DDP and torch's, in one run.

python benchmarks/data_parallel.py [--ranks 2] [--rounds 12] [--steps 8] [--models mlp,cnn] [--bucket-mb 4] [--no-pin]

In the same processes, one torch thread each, these take turns in blocks of steps: `floor` (no communication), `gloo`
(torch's DistributedDataParallel on Gloo), `plugin` (the same on the backend "procgroup") and `procgroup` (ours). A step
is zero_grad, forward, backward and the optimizer's step, and takes as long as on the slowest rank. `of Gloo gone` is
how much of what Gloo adds to the floor is not there: by the medians, and by the fastest steps, which say more where
other programs keep the cores busy.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed
from torch import nn

import procgroup as dist
from procgroup.parallel import DistributedDataParallel

CONFIGURATIONS = ("floor", "gloo", "plugin", "procgroup")
Samples = dict[str, list[float]]


def mlp() -> tuple[nn.Module, torch.Tensor]:
    """Return a perceptron of 10 million parameters, and a batch."""
    sizes = [784, 2304, 2304, 1280, 10]
    layers = [layer for pair in itertools.pairwise(sizes) for layer in (nn.Linear(*pair), nn.ReLU())]
    return nn.Sequential(*layers[:-1]), torch.randn(32, 784)


def cnn() -> tuple[nn.Module, torch.Tensor]:
    """Return a convolutional network of 1 million parameters, and a batch."""
    widths = [3, 32, 64, 128, 256, 256]
    layers: list[nn.Module] = []
    for before, after in itertools.pairwise(widths):
        layers += [nn.Conv2d(before, after, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(256, 10)), torch.randn(8, 3, 32, 32)


MODELS: dict[str, Callable[[], tuple[nn.Module, torch.Tensor]]] = {"mlp": mlp, "cnn": cnn}


def wrapped(model: nn.Module, configuration: str, bucket_mb: float | None) -> nn.Module | None:
    """Return the model as a configuration trains it; None where torch does not know the backend."""
    model = copy.deepcopy(model)
    if configuration == "floor":
        return model
    if configuration == "procgroup":
        return DistributedDataParallel(model, bucket_cap_mb=bucket_mb)
    backend = "gloo" if configuration == "gloo" else "procgroup"
    try:
        group = torch.distributed.new_group(backend=backend)
    except (ValueError, RuntimeError, AttributeError) as error:
        if dist.get_rank() == 0:
            print(f"{configuration} is left out: {error}", flush=True)
        return None
    return nn.parallel.DistributedDataParallel(model, process_group=group)


def timed_steps(model: nn.Module, batch: torch.Tensor, optimizer: Any, steps: int) -> list[float]:
    """Return the time of each step, in seconds."""
    times = []
    for _ in range(steps):
        started = time.perf_counter()
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()
        times.append(time.perf_counter() - started)
    return times


def measure(name: str, rounds: int, steps: int, bucket_mb: float | None) -> Samples:
    """Let the configurations take turns; return the times of all steps of each: those of the slowest rank."""
    torch.manual_seed(dist.get_rank())
    model, batch = MODELS[name]()
    models = {each: wrapped(model, each, bucket_mb) for each in CONFIGURATIONS}
    chosen = {each: made for each, made in models.items() if made is not None}
    optimizers = {each: torch.optim.SGD(made.parameters(), lr=1e-3) for each, made in chosen.items()}
    samples: Samples = {each: [] for each in chosen}
    for turn in range(-1, rounds):
        order = list(chosen) if turn % 2 else list(reversed(chosen))
        for each in order:
            dist.barrier()
            timed_steps(chosen[each], batch, optimizers[each], 2)
            seconds = torch.tensor(timed_steps(chosen[each], batch, optimizers[each], steps), dtype=torch.float64)
            dist.all_reduce(seconds, dist.ReduceOp.MAX)
            if turn >= 0:
                samples[each] += seconds.tolist()
    return samples


def report(name: str, samples: Samples) -> None:
    """Print a table."""
    count = sum(parameter.numel() for parameter in MODELS[name]()[0].parameters())
    print(f"\n{name}: {count / 1e6:.1f} million parameters")
    print(f"{'':12}{'median ms':>11}{'minimum ms':>12}{'of Gloo gone: median':>22}{'minimum':>9}")
    for each, times in samples.items():
        gone = "".join(f"{share:>{width}.0%}" for share, width in zip(gone_of(samples, times), (22, 9), strict=True))
        row = f"{each:12}{statistics.median(times) * 1e3:11.2f}{min(times) * 1e3:12.2f}"
        print(row if each in ("floor", "gloo") else row + gone, flush=True)


def gone_of(samples: Samples, times: list[float]) -> list[float]:
    """Return which part of what Gloo adds to the floor is not there, by medians and by minima."""
    shares = []
    for statistic in (statistics.median, min):
        floor, gloo, mine = statistic(samples["floor"]), statistic(samples["gloo"]), statistic(times)
        shares.append(1 - (mine - floor) / (gloo - floor))
    return shares


def be_rank(rank: int, options: argparse.Namespace, folder: str) -> None:
    """Measure as one of the ranks."""
    if options.pin:
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[rank % len(cores)]})
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    store = dist.FileStore(f"{folder}/procgroup", options.ranks)
    dist.init_process_group(store=store, rank=rank, world_size=options.ranks)
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/torch", rank=rank, world_size=options.ranks
    )
    for name in options.models.split(","):
        samples = measure(name, options.rounds, options.steps, options.bucket_mb)
        if rank == 0:
            report(name, samples)
    dist.barrier()
    os._exit(0)  # groups of torch that still have threads may end otherwise than well


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--models", default="mlp,cnn")
    parser.add_argument("--bucket-mb", type=float, default=None)
    parser.add_argument("--no-pin", dest="pin", action="store_false")
    options = parser.parse_args()
    with TemporaryDirectory() as folder:
        context = multiprocessing.get_context("spawn")
        ranks = [context.Process(target=be_rank, args=(rank, options, folder)) for rank in range(options.ranks)]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()
    if failed := [rank for rank, process in enumerate(ranks) if process.exitcode]:
        raise SystemExit(f"these ranks failed: {failed}")


if __name__ == "__main__":
    main()
