"""Every communication hook on real processes: all ranks come to the same bits, over shared memory and over TCP."""

from __future__ import annotations

import hashlib

import pytest

from world import run

pytestmark = pytest.mark.torch


def train_with_every_hook(rank: int, size: int) -> list[tuple[str, str, float]]:
    """Return for each hook its name, a digest of the parameters after some steps, and the loss."""
    import torch
    from parallel import hooks as problem

    import procgroup as dist
    from procgroup.parallel import DistributedDataParallel
    from procgroup.parallel import communication_hooks as hooks

    torch.set_num_threads(1)
    dist.init_process_group()
    inputs, labels = problem.classified()
    found = []
    for name, state, hook in [
        ("fp16", None, hooks.fp16_compress_hook),
        ("int8", hooks.BlockQuantizedState(), hooks.block_quantized_hook),
        ("top-k", hooks.TopKState(ratio=0.1), hooks.top_k_hook),
        ("PowerSGD", hooks.PowerSGDState(None, 2, 0, 1.1), hooks.powerSGD_hook),
    ]:
        torch.manual_seed(0)
        model = problem.classifier()
        ours = DistributedDataParallel(model)
        ours.register_comm_hook(state, hook)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
        for _ in range(20):
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(ours(inputs[rank::size]), labels[rank::size])
            loss.backward()
            optimizer.step()
        digest = hashlib.sha256(b"".join(problem.bits(parameter) for parameter in model.parameters())).hexdigest()
        found.append((name, digest, float(loss.detach())))
    dist.destroy_process_group()
    return found


@pytest.mark.parametrize("transport", ["shm", "tcp", "spanning"])
def test_all_ranks_come_to_the_same_bits(transport: str) -> None:
    ranks = run(train_with_every_hook, 3, environment={"PROCGROUP_TRANSPORT": transport}, torch=True)
    assert len(ranks[0]) == 4
    for found in ranks:
        assert [entry[:2] for entry in found] == [entry[:2] for entry in ranks[0]]
        assert all(loss < 1.2 for _, _, loss in found)  # from 1.5 at first
