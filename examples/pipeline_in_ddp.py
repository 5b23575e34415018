"""Model parallelism inside DistributedDataParallel: a model in two halves on two ranks, and two such pairs.

    python -m procgroup run --nproc-per-node 4 examples/pipeline_in_ddp.py

The ranks are a mesh. Along "stage" is one model: the first rank sends activations to the second, which returns their
gradients. Along "data" are the copies of a half, which DistributedDataParallel trains on different parts of the batch.
Each part is divided into micro-batches, so that both halves compute at the same time. At the end the
parameters are those of one process with the whole model and the whole batch.
"""

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import nn

import procgroup as dist
from procgroup.parallel import DistributedDataParallel

STEPS, BATCH, PIECES, WIDTH = 5, 32, 4, 16


def make_halves() -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, WIDTH), nn.Tanh()), nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1))


def batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    random = torch.Generator().manual_seed(1)
    return [(torch.randn(BATCH, 8, generator=random), torch.randn(BATCH, 1, generator=random)) for _ in range(STEPS)]


def averaging(half: DistributedDataParallel, piece: int) -> AbstractContextManager[None]:
    """Return a context for the forward of a piece: gradients add up on this rank, and the last averages them all."""
    return nullcontext() if piece == PIECES - 1 else half.no_sync()


def first_stage(half: DistributedDataParallel, inputs: torch.Tensor, other: int) -> None:
    """Send the activations of each piece as soon as they are there; go back through each when its gradient comes."""
    activations, sent = [], []
    for number, piece in enumerate(inputs.chunk(PIECES)):
        with averaging(half, number):
            activations.append(half(piece))
        sent.append(dist.isend(activations[-1].detach(), dst=other))
    for piece in activations:
        gradient = torch.empty_like(piece)
        dist.recv(gradient, src=other)
        piece.backward(gradient)
    for work in sent:
        work.wait()


def second_stage(half: DistributedDataParallel, targets: torch.Tensor, other: int) -> None:
    """Go forward and back with each piece as it comes, and send the gradient of what came."""
    sent = []
    for number, target in enumerate(targets.chunk(PIECES)):
        piece = torch.empty(len(target), WIDTH)
        dist.recv(piece, src=other)
        piece.requires_grad_()
        with averaging(half, number):
            loss = nn.functional.mse_loss(half(piece), target) / PIECES
        loss.backward()
        assert piece.grad is not None
        sent.append(dist.isend(piece.grad, dst=other))
    for work in sent:
        work.wait()


def train_alone() -> list[torch.Tensor]:
    model = nn.Sequential(*make_halves())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for inputs, targets in batches():
        optimizer.zero_grad()
        nn.functional.mse_loss(model(inputs), targets).backward()
        optimizer.step()
    return [parameter.detach() for parameter in model.parameters()]


mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "stage"))
part, stage = mesh.get_local_rank("data"), mesh.get_local_rank("stage")
other = dist.get_process_group_ranks(mesh.get_group("stage"))[1 - stage]
half = DistributedDataParallel(make_halves()[stage], device_mesh=mesh["data"])
optimizer = torch.optim.SGD(half.parameters(), lr=0.1)
for inputs, targets in batches():
    optimizer.zero_grad()
    if stage == 0:
        first_stage(half, inputs.chunk(2)[part], other)
    else:
        second_stage(half, targets.chunk(2)[part], other)
    optimizer.step()

expected = train_alone()
mine = expected[:2] if stage == 0 else expected[2:]
difference = max((a - b).abs().max().item() for a, b in zip(half.parameters(), mine, strict=True))
assert difference < 1e-6, f"expected the parameters of one process, got a difference of {difference}"
print(f"rank {dist.get_rank()}: half {stage} trained on part {part}; difference from one process {difference:.0e}")
dist.destroy_process_group()
