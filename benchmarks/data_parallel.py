"""What data-parallel training costs beside the same model without communication: our DDP and torch's, in one run.

    python benchmarks/data_parallel.py [--ranks 2] [--rounds 12] [--steps 8] [--models mlp,cnn] [--bucket-mb 4]
    python benchmarks/data_parallel.py --device cuda --ranks 1 --models mlp,cnn,gpt

In the same processes, one torch thread each, these take turns in blocks of steps: `floor` (no communication), `gloo`
(torch's DistributedDataParallel on Gloo), `plugin` (the same on the backend "procgroup") and `procgroup` (ours). A step
is zero_grad, forward, backward and the optimizer's step, and takes as long as on the slowest rank. `of Gloo gone` is
how much of what Gloo adds to the floor is not there: by the medians, and by the fastest steps, which say more where
other programs keep the cores busy.

On GPUs `nccl` (torch's DistributedDataParallel on its NCCL) takes Gloo's place, and the last columns are the times in
parts of its times. A block of steps ends when the GPU has; its steps count alike. `apart` is how far the losses of the
first steps are from those of torch. Rank r uses GPU r; where there are fewer, all use GPU 0, which needs NCCL 2.30 and
NCCL_MULTI_RANK_GPU_ENABLE=1. The GPT computes in bfloat16 by autocast.
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

OURS = ("plugin", "procgroup")
Samples = dict[str, list[float]]
FIRST_STEPS = 10
"""Those whose losses are compared."""


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


class Gpt(nn.Module):
    """A decoder of 8 layers with 30 million parameters, which computes in bfloat16."""

    def __init__(self, width: int = 512, words: int = 8192) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, width)
        layer = nn.TransformerEncoderLayer(width, 8, 4 * width, 0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 8, enable_nested_tensor=False)
        self.words = nn.Linear(width, 512)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        with torch.autocast(tokens.device.type, torch.bfloat16):
            mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1], tokens.device)
            hidden = self.layers(self.embedding(tokens), mask, is_causal=True)
            result: torch.Tensor = self.words(hidden).float()
        return result


def gpt() -> tuple[nn.Module, torch.Tensor]:
    """Return a GPT, and a batch of tokens."""
    return Gpt(), torch.randint(8192, (8, 256))


MODELS: dict[str, Callable[[], tuple[nn.Module, torch.Tensor]]] = {"mlp": mlp, "cnn": cnn, "gpt": gpt}


def peer_of(device: torch.device) -> str:
    """Return the backend of torch's that the others are compared with."""
    return "nccl" if device.type == "cuda" else "gloo"


def wrapped(model: nn.Module, configuration: str, bucket_mb: float | None, device: torch.device) -> nn.Module | None:
    """Return the model as a configuration trains it; None where torch does not know the backend."""
    model = copy.deepcopy(model)
    if configuration == "floor":
        return model
    devices = [device.index] if device.type == "cuda" else None
    if configuration == "procgroup":
        return DistributedDataParallel(model, device_ids=devices, bucket_cap_mb=bucket_mb)
    backend = "procgroup" if configuration == "plugin" else configuration
    try:
        group = torch.distributed.new_group(backend=backend)
    except (ValueError, RuntimeError, AttributeError) as error:
        if dist.get_rank() == 0:
            print(f"{configuration} is left out: {error}", flush=True)
        return None
    return nn.parallel.DistributedDataParallel(model, device_ids=devices, process_group=group)


def step(model: nn.Module, batch: torch.Tensor, optimizer: Any) -> torch.Tensor:
    """Train a step; return the loss."""
    optimizer.zero_grad()
    loss: torch.Tensor = model(batch).square().mean()
    loss.backward()
    optimizer.step()
    return loss.detach()


def timed_steps(model: nn.Module, batch: torch.Tensor, optimizer: Any, steps: int) -> list[float]:
    """Return the time of each step, in seconds; on a GPU that of all steps, in equal parts."""
    is_on_gpu = batch.is_cuda
    times = []
    if is_on_gpu:
        torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(steps):
        started = time.perf_counter()
        step(model, batch, optimizer)
        times.append(time.perf_counter() - started)
    if is_on_gpu:
        torch.cuda.synchronize()
        times = [(time.perf_counter() - begin) / steps] * steps
    return times


def measure(name: str, options: argparse.Namespace, device: torch.device) -> tuple[Samples, dict[str, float]]:
    """Let the configurations take turns. Return the times of all steps of each, those of the slowest rank, and how far
    the first losses are from those of torch's DistributedDataParallel."""
    torch.manual_seed(dist.get_rank())
    model, batch = (made.to(device) for made in MODELS[name]())
    peer = peer_of(device)
    models = {each: wrapped(model, each, options.bucket_mb, device) for each in ("floor", peer, *OURS)}
    chosen = {each: made for each, made in models.items() if made is not None}
    optimizers = {each: torch.optim.SGD(made.parameters(), lr=1e-3) for each, made in chosen.items()}
    losses = {
        each: torch.stack([step(chosen[each], batch, optimizers[each]) for _ in range(FIRST_STEPS)]).cpu()
        for each in chosen
    }
    apart = {each: (losses[each] - losses[peer]).abs().max().item() for each in OURS if {each, peer} <= losses.keys()}
    samples: Samples = {each: [] for each in chosen}
    for turn in range(-1, options.rounds):
        order = list(chosen) if turn % 2 else list(reversed(chosen))
        for each in order:
            dist.barrier()
            timed_steps(chosen[each], batch, optimizers[each], 2)
            times = timed_steps(chosen[each], batch, optimizers[each], options.steps)
            seconds = torch.tensor(times, dtype=torch.float64)
            dist.all_reduce(seconds, dist.ReduceOp.MAX)
            if turn >= 0:
                samples[each] += seconds.tolist()
    return samples, apart


def report(name: str, samples: Samples, apart: dict[str, float], peer: str) -> None:
    """Print a table."""
    count = sum(parameter.numel() for parameter in MODELS[name]()[0].parameters())
    print(f"\n{name}: {count / 1e6:.1f} million parameters")
    compared = "of Gloo gone: median" if peer == "gloo" else "of NCCL's time: median"
    print(f"{'':12}{'median ms':>11}{'minimum ms':>12}{compared:>24}{'minimum':>9}{'apart':>10}")
    for each, times in samples.items():
        row = f"{each:12}{statistics.median(times) * 1e3:11.2f}{min(times) * 1e3:12.2f}"
        if each in OURS and peer in samples:
            shares = gone_of(samples, times) if peer == "gloo" else parts_of(samples[peer], times)
            row += "".join(f"{share:>{width}.1%}" for share, width in zip(shares, (24, 9), strict=True))
            row += f"{apart[each]:10.1e}"
        print(row, flush=True)


def parts_of(theirs: list[float], times: list[float]) -> list[float]:
    """Return the times in parts of other times, by medians and by minima."""
    return [statistic(times) / statistic(theirs) for statistic in (statistics.median, min)]


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
    device = torch.device("cpu")
    if options.device == "cuda":
        device = torch.device("cuda", rank if torch.cuda.device_count() >= options.ranks else 0)
        torch.cuda.set_device(device)
    store = dist.FileStore(f"{folder}/procgroup", options.ranks)
    backend = "nccl" if options.device == "cuda" else None
    dist.init_process_group(backend, store=store, rank=rank, world_size=options.ranks)
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/torch", rank=rank, world_size=options.ranks
    )
    for name in options.models.split(","):
        samples, apart = measure(name, options, device)
        if rank == 0:
            report(name, samples, apart, peer_of(device))
    dist.barrier()
    os._exit(0)  # groups of torch that still have threads may end otherwise than well


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--models", default="mlp,cnn")
    parser.add_argument("--bucket-mb", type=float, default=None)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
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
