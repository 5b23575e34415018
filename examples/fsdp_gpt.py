"""A small GPT on stock PyTorch, sharded in two ways at once, with the backend "procgroup".

    python -m procgroup run --nproc-per-node 4 examples/fsdp_gpt.py
    python -m procgroup run --nproc-per-node 2 examples/fsdp_gpt.py

The ranks, an even number, are a mesh. Along "tensor", two of them share the work of each layer: each has half of
the heads of attention and half of the perceptron (DTensor). Along "data", FSDP2 shards the rest of each
parameter, and the batch. The model learns to write the digits of 1/7 from any place; its loss goes down, and is that of
one process with the whole model and the whole batch. PyTorch's own functions do all that: only the backend's name says
procgroup.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

TEXT = "142857" * 8
LETTERS, LENGTH, WIDTH, HEADS, LAYERS = 10, 16, 32, 4, 2
STEPS, BATCH = 20, 16


class Attention(nn.Module):
    """Each place looks at the places before it. How many heads there are here follows from the projections' width."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.project = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = (
            layer(x).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for layer in (self.query, self.key, self.value)
        )
        seen = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.project(seen.transpose(1, 2).flatten(-2))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention, self.before_attention = Attention(), nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.before_up = nn.LayerNorm(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.before_attention(x))
        return x + self.down(nn.functional.gelu(self.up(self.before_up(x))))


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.letters, self.places = nn.Embedding(LETTERS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.scores = nn.Linear(WIDTH, LETTERS)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        """Return how badly each letter but the first was foreseen, in the mean."""
        scores = self.scores(self.blocks(self.letters(text[:, :-1]) + self.places.weight))
        return nn.functional.cross_entropy(scores.flatten(0, 1), text[:, 1:].flatten())


PLAN = {
    **{f"attention.{name}": ColwiseParallel() for name in ("query", "key", "value")},
    "attention.project": RowwiseParallel(),
    "up": ColwiseParallel(),
    "down": RowwiseParallel(),
}


def make_model() -> GPT:
    torch.manual_seed(0)
    return GPT()


def shard(model: GPT, mesh: DeviceMesh) -> GPT:
    """Split the layers over the ranks along "tensor", and every parameter over those along "data"."""
    for block in model.blocks:
        parallelize_module(block, mesh["tensor"], PLAN)
        fully_shard(block, mesh=mesh["data"])
    fully_shard(model, mesh=mesh["data"])
    return model


def train(model: nn.Module, part: int, parts: int) -> list[torch.Tensor]:
    """Train on one part of each batch, and return the losses of that part."""
    random = torch.Generator().manual_seed(1)
    text = torch.tensor([int(letter) for letter in TEXT])
    optimizer = torch.optim.Adam(model.parameters(), lr=0.003)
    losses = []
    for _ in range(STEPS):
        starts = torch.randint(len(text) - LENGTH, (BATCH,), generator=random)[part::parts]
        optimizer.zero_grad()
        loss = model(torch.stack([text[start : start + LENGTH + 1] for start in starts]))
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return losses


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("procgroup")
    rank, size = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (size // 2, 2), mesh_dim_names=("data", "tensor"))
    model = shard(make_model(), mesh)
    here = sum(parameter.to_local().numel() for parameter in model.parameters() if isinstance(parameter, DTensor))
    losses = torch.stack(train(model, mesh.get_local_rank("data"), mesh.size(0)))
    dist.all_reduce(losses, op=dist.ReduceOp.AVG)  # ranks along "tensor" have the same loss

    whole = make_model()
    everything = sum(parameter.numel() for parameter in whole.parameters())
    print(f"rank {rank} at {mesh.get_coordinate()} holds {here} of {everything} parameters", flush=True)
    if rank == 0:
        alone = torch.stack(train(whole, 0, 1))
        torch.testing.assert_close(losses, alone, rtol=1e-3, atol=1e-4)
        print(f"loss of {size} ranks: {losses[0]:.4f} at first, {losses[-1]:.4f} after {STEPS} steps")
        print(f"one process: {alone[0]:.4f} at first, {alone[-1]:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
