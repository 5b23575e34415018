"""Compressed communication: DistributedDataParallel sends bfloat16, half as many bytes; the model stays in float32.

    python -m procgroup run --nproc-per-node 2 examples/compressed_gradients.py

A communication hook averages the gradients bucket by bucket, while backward still computes the others. There are hooks
for bfloat16 and float16; one of your own takes a bucket and returns something to wait for.
"""

import torch
from torch import nn

import procgroup as dist
from procgroup.parallel import DistributedDataParallel, GradBucket, Hook, Waitable
from procgroup.parallel.communication_hooks import bf16_compress_hook


def clip_and_compress(limit: float, bucket: GradBucket) -> Waitable:
    """Shorten the gradients of a bucket that are longer than ``limit`` before they are averaged, in bfloat16."""
    gradients = bucket.buffer()
    short = (gradients * (limit / gradients.norm().clamp(min=limit))).to(torch.bfloat16)
    work = dist.all_reduce(short, op=dist.ReduceOp.AVG, async_op=True)
    return work.get_future().then(lambda future: future.value()[0].to(gradients.dtype))


def train(state: object, hook: Hook | None) -> float:
    """Return the loss after some steps, in the mean over the ranks."""
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 1)))
    if hook:
        model.register_comm_hook(state, hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    random = torch.Generator().manual_seed(dist.get_rank())
    inputs = torch.randn(256, 20, generator=random)
    loss = torch.zeros(())
    for _ in range(50):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(inputs), inputs.sum(dim=1, keepdim=True))
        loss.backward()
        optimizer.step()
    mean = loss.detach()
    dist.all_reduce(mean, op=dist.ReduceOp.AVG)
    return mean.item()


dist.init_process_group()
whole, compressed, clipped = train(None, None), train(None, bf16_compress_hook), train(1.0, clip_and_compress)
print(f"rank {dist.get_rank()}: loss {whole:.4f} in float32, {compressed:.4f} in bfloat16, {clipped:.4f} clipped too")
dist.destroy_process_group()
