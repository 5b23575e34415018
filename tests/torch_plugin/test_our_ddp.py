"""procgroup's DistributedDataParallel in a program that has initialised torch.distributed with backend "procgroup"."""

from __future__ import annotations

from typing import Any

import pytest

from world import run

pytestmark = pytest.mark.torch


def use_groups_of_torch(rank: int, size: int) -> None:
    import pickle

    import torch
    import torch.distributed as dist
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook as hook_of_torch
    from torch.distributed.device_mesh import init_device_mesh

    from procgroup import torch_plugin
    from procgroup.parallel import DistributedDataParallel, DistributedSampler, average_gradients, communication_hooks

    torch_plugin.register()
    dist.init_process_group("procgroup")
    world, pair = dist.group.WORLD, dist.new_group([0, 1], backend="procgroup")

    def gradient(state: Any = None, hook: Any = None, **options: Any) -> list[float]:
        model = DistributedDataParallel(torch.nn.Linear(2, 1, bias=False), **options)
        assert model.process_group is (options.get("process_group") or world)
        if hook is not None:
            model.register_comm_hook(state, hook)
        for _ in range(2):
            model.zero_grad()
            model(torch.full((1, 2), rank + 1.0)).sum().backward()
        return model.module.weight.grad[0].tolist()

    everybody = [2.0, 2.0]
    assert gradient() == everybody
    assert gradient(process_group=world) == everybody
    assert gradient(None, hook_of_torch) == everybody
    assert gradient(world, communication_hooks.bf16_compress_hook) == everybody
    assert gradient(None, communication_hooks.bf16_compress_hook) == everybody
    quantized = gradient(communication_hooks.BlockQuantizedState(world), communication_hooks.block_quantized_hook)
    assert quantized == pytest.approx(everybody, rel=1 / 127)
    assert average_gradients(torch.tensor([rank + 1.0]), group=world).item() == 2.0
    assert DistributedSampler(range(9), group=world, shuffle=False).rank == rank
    mesh = init_device_mesh("cpu", (size,))
    model = DistributedDataParallel(torch.nn.Linear(2, 1), device_mesh=mesh)
    assert model.process_group is mesh.get_group()
    if rank < 2:
        assert gradient(process_group=pair) == [1.5, 1.5]
    else:
        with pytest.raises(ValueError, match="does not belong to the process_group"):
            DistributedDataParallel(torch.nn.Linear(2, 1), process_group=pair)
    model = DistributedDataParallel(torch.nn.Linear(2, 1))
    assert pickle.loads(pickle.dumps(model)).process_group is world
    other = dist.new_group(backend="gloo")
    with pytest.raises(ValueError, match="another backend"):
        DistributedDataParallel(torch.nn.Linear(2, 1), process_group=other)
    dist.barrier()
    dist.destroy_process_group()


def test_groups_of_torch_are_taken_wherever_a_group_may_be_given() -> None:
    run(use_groups_of_torch, 3, timeout=250, torch=True)


def have_another_backend(rank: int, size: int) -> None:
    import torch
    import torch.distributed as dist

    from procgroup.parallel import DistributedDataParallel

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    with pytest.raises(ValueError, match="Default process group has not been initialized"):
        DistributedDataParallel(torch.nn.Linear(2, 1))
    dist.destroy_process_group()


def test_torch_s_default_group_of_another_backend_is_none_of_ours() -> None:
    run(have_another_backend, 1, timeout=60, torch=True)


def join_with_torch(rank: int, size: int) -> tuple[list[list[float]], int]:
    import torch
    import torch.distributed as dist
    from torch.distributed.algorithms.join import Join
    from torch.distributed.optim import ZeroRedundancyOptimizer

    from procgroup import torch_plugin
    from procgroup.parallel import DistributedDataParallel

    torch_plugin.register()
    dist.init_process_group("procgroup")
    model = DistributedDataParallel(
        torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 1))
    )
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
    generator = torch.Generator().manual_seed(rank)
    done = 0
    with Join([model, optimizer]):
        for step in range((4, 2, 5)[rank]):
            optimizer.zero_grad()
            if step == 1:
                with model.no_sync():
                    model(torch.randn(4, 2, generator=generator)).sum().backward()
                continue
            model(torch.randn(4, 2, generator=generator)).square().sum().backward()
            optimizer.step()
    model_after = [value.flatten().tolist() for value in model.state_dict().values()]
    try:
        with Join([model, optimizer], throw_on_early_termination=True):
            for _ in range((4, 2, 5)[rank]):
                model(torch.randn(4, 2, generator=generator)).square().sum().backward()
                done += 1
    except RuntimeError as error:
        assert "exhausted" in str(error)
    dist.barrier()
    dist.destroy_process_group()
    return model_after, done


def divide_in_the_join_of_torch(rank: int, size: int, by_all: bool) -> list[float]:
    import torch
    import torch.distributed as dist
    from torch.distributed.algorithms.join import Join

    from procgroup import torch_plugin
    from procgroup.parallel import DistributedDataParallel

    torch_plugin.register()
    dist.init_process_group("procgroup")
    model = DistributedDataParallel(torch.nn.Linear(1, 1, bias=False))
    found = []
    with Join([model], divide_by_initial_world_size=by_all):
        for _ in range(1 + 2 * rank):
            model.zero_grad()
            model(torch.full((1, 1), rank + 1.0)).sum().backward()
            found.append(model.module.weight.grad.item())
    dist.destroy_process_group()
    return found


@pytest.mark.parametrize(("by_all", "alone"), [(True, 1.0), (False, 2.0)])
def test_in_the_join_of_torch_gradients_are_divided_by_all_ranks_or_those_that_train(
    by_all: bool, alone: float
) -> None:
    found = run(divide_in_the_join_of_torch, 2, args=(by_all,), timeout=60, torch=True)
    assert found == [[1.5], [1.5, alone, alone]]


def test_the_join_of_torch_takes_our_models_beside_its_own_joinables() -> None:
    found = run(join_with_torch, 3, timeout=250, torch=True)
    assert [done for _, done in found] == [2, 2, 2]
    assert [model_after for model_after, _ in found] == [found[0][0]] * 3
