"""DistributedDataParallel on stand-in GPUs gives what one process on a CPU gives for the whole batch.

Each operation of a GPU takes a while there, so a wait that is missing shows as wrong numbers.
"""

from __future__ import annotations

from typing import Any

import pytest
from torch_gpus.on_gpus import play
from torch_gpus.plug_in_world import SLOW_GPUS, begin

from world import run

pytestmark = pytest.mark.torch


# --- Gradients ---


def train(gpu: Any, model: str, options: dict[str, Any]) -> None:
    gpu.train(*gpu.wrap(getattr(gpu.models, model), **options))


@pytest.mark.parametrize("backend", ["nccl", "gloo"])
@pytest.mark.parametrize("size", [1, 2])
def test_gradients_are_those_of_the_whole_batch(size: int, backend: str) -> None:
    play(train, "perceptron", {}, size=size, backend=backend)


OPTIONS: list[dict[str, Any]] = [
    {"bucket_cap_mb": 0.0001},
    {"static_graph": True, "gradient_as_bucket_view": True},
    {"forward_sync_buffers": False, "init_sync": False, "bucket_cap_mb_list": [0.0001, 0.0002]},
    {"on_lost_rank": "shrink"},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_options_of_torch_give_these_gradients(options: dict[str, Any]) -> None:
    play(train, "perceptron", options)


def train_single_gradients(gpu: Any) -> None:
    from procgroup.parallel.ddp import bucket_assignment

    bucket_assignment.SINGLE_BYTES_ON_GPU = 1
    gpu.train(*gpu.wrap(gpu.models.perceptron))


def test_large_gradients_are_averaged_where_autograd_has_put_them() -> None:
    play(train_single_gradients)


def use_branches(gpu: Any) -> None:
    import procgroup as dist

    models, size = gpu.models, dist.get_world_size()
    ours, alone = gpu.wrap(models.Branches, bucket_cap_mb=0.0001)
    for step in range(5):
        whole = models.batch(step)
        branches = [(rank * step) % (step % 3 + 1) for rank in range(size)]
        parts = [models.part(whole, rank) for rank in range(size)]
        models.mean_of_ranks(alone, [models.loss_of(alone(*pair)) for pair in zip(parts, branches, strict=True)])
        ours.zero_grad()
        models.loss_of(ours(models.part(whole).cuda(), branches[dist.get_rank()])).backward()
        gpu.assert_same_gradients(ours, alone, step)
        assert ours.module.never.weight.grad is None


def test_parameters_that_some_ranks_do_not_use_need_no_flag() -> None:
    play(use_branches)


def share(gpu: Any) -> None:
    for use_reentrant in (None, False, True):
        gpu.train(*gpu.wrap(lambda use=use_reentrant: gpu.models.Shared(use), bucket_cap_mb=0.0001))


def test_shared_and_checkpointed_modules_need_no_flag() -> None:
    play(share)


def train_channels_last(gpu: Any) -> None:
    import torch

    import procgroup as dist
    from procgroup.parallel import DistributedDataParallel

    torch.manual_seed(dist.get_rank())
    model = torch.nn.Sequential(torch.nn.Conv2d(2, 3, 2), torch.nn.Conv2d(3, 1, 2)).double()
    ours = DistributedDataParallel(model.to(memory_format=torch.channels_last).cuda())
    alone = gpu.to_cpu(ours)
    for step in range(3):
        whole = torch.randn(2, 2, 4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
        ours.zero_grad(), alone.zero_grad()
        ours(whole[dist.get_rank() :: 2].cuda()).square().mean().backward()
        alone(whole).square().mean().backward()
        gpu.assert_same_gradients(ours, alone, step)


def test_strided_parameters_are_sent_and_averaged() -> None:
    play(train_channels_last)


def use_two_streams(gpu: Any) -> None:
    import torch

    side = torch.cuda.Stream()

    class Copied(torch.autograd.Function):  # type: ignore[misc]
        """Its gradient comes late: only copies are queued on the stand-in's streams, and not awaited at once."""

        @staticmethod
        def forward(ctx: Any, inputs: Any) -> Any:
            return inputs.clone()

        @staticmethod
        def backward(ctx: Any, gradient: Any) -> Any:
            gradient = gradient.contiguous()
            for _ in range(20):
                gradient = gradient.clone()
            return gradient

    class Sides(torch.nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.first = gpu.models.perceptron()
            self.second = gpu.models.perceptron()

        def forward(self, inputs: Any) -> Any:
            if not inputs.is_cuda:
                return self.first(inputs) + self.second(inputs)
            current = torch.cuda.current_stream()
            one = self.first(inputs)  # the last one in the backward
            side.wait_stream(current)
            with torch.cuda.stream(side):
                inputs.record_stream(side)
                weights = {name: Copied.apply(each) for name, each in self.second.named_parameters()}
                other = torch.func.functional_call(self.second, weights, (inputs,))
            current.wait_stream(side)
            other.record_stream(current)
            return one + other

    for cap in (0.0001, None):
        ours, alone = gpu.wrap(Sides, bucket_cap_mb=cap)
        for step in range(4):
            whole = gpu.models.batch(step)
            ours.zero_grad(), alone.zero_grad()
            gpu.models.loss_of(ours(gpu.models.part(whole).cuda())).backward()
            gpu.models.loss_of(alone(whole)).backward()
            gpu.assert_same_gradients(ours, alone, step)


def test_a_bucket_waits_for_the_streams_of_all_its_gradients() -> None:
    play(use_two_streams)


def lag(gpu: Any) -> None:
    import torch

    import procgroup as dist

    for cap in (0.0001, None):
        ours, alone = gpu.wrap(gpu.models.perceptron, bucket_cap_mb=cap)
        for step in range(3):
            works = []

            def occupy(_: Any, works: list[Any] = works) -> None:
                works += [dist.all_reduce(torch.ones(1, device="cuda"), async_op=True) for _ in range(60)]

            whole = gpu.models.batch(step)
            ours.zero_grad(), alone.zero_grad()
            loss = gpu.models.loss_of(ours(gpu.models.part(whole).cuda()))
            loss.register_hook(occupy)
            loss.backward()
            gpu.models.loss_of(alone(whole)).backward()
            gpu.assert_same_gradients(ours, alone, step)


def test_the_backward_s_stream_waits_for_averages_that_come_late() -> None:
    play(lag)


def accumulate(gpu: Any) -> None:
    ours, alone = gpu.wrap(gpu.models.perceptron)
    for step in range(3):
        ours.zero_grad(), alone.zero_grad()
        with ours.no_sync():
            gpu.models.loss_of(ours(gpu.models.part(gpu.models.batch(2 * step)).cuda())).backward()
        gpu.models.loss_of(ours(gpu.models.part(gpu.models.batch(2 * step + 1)).cuda())).backward()
        for each in (2 * step, 2 * step + 1):
            gpu.models.loss_of(alone(gpu.models.batch(each))).backward()
        gpu.assert_same_gradients(ours, alone, step)


def test_no_sync_accumulates_on_each_rank() -> None:
    play(accumulate)


def fail_once(gpu: Any) -> Any:
    import procgroup as dist
    from procgroup.errors import BackwardFailed

    ours, alone = gpu.wrap(gpu.models.Fragile, bucket_cap_mb=0.0001)
    seen = []
    for step in range(4):
        whole = gpu.models.batch(step)
        ours.zero_grad(), alone.zero_grad()
        try:
            fails = step == 1 and dist.get_rank() == 1
            gpu.models.loss_of(ours(gpu.models.part(whole).cuda(), fails)).backward()
        except (BackwardFailed, KeyError) as error:
            seen.append((step, type(error).__name__))
            continue
        gpu.models.loss_of(alone(whole)).backward()
        gpu.assert_same_gradients(ours, alone, step)
    return seen


def test_a_backward_that_fails_on_one_rank_is_dropped_by_all() -> None:
    assert play(fail_once) == [[(1, "BackwardFailed")], [(1, "KeyError")]]


# --- Devices ---


def move_inputs(gpu: Any) -> None:
    import dataclasses
    from collections import OrderedDict, namedtuple

    import torch

    from procgroup.parallel import DistributedDataParallel

    here = torch.device("cuda", torch.cuda.current_device())
    Pair = namedtuple("Pair", "left right")

    @dataclasses.dataclass
    class Batch:
        values: Any
        name: str

    class Watching(torch.nn.Linear):  # type: ignore[misc]
        def forward(self, inputs: Any, *rest: Any, **named: Any) -> Any:
            self.seen = rest, named
            return super().forward(inputs)

    host = torch.ones(2, 3)
    packed = torch.nn.utils.rnn.pack_sequence([host])
    for device_ids in ([here.index], [f"cuda:{here.index}"], [here], [torch.device("cuda")]):
        ours = DistributedDataParallel(Watching(3, 1).cuda(), device_ids=device_ids, output_device=here)
        assert ours.device_ids == [here.index] and ours.output_device == here.index
        assert ours.device == here and ours.device_type == "cuda" and not ours.is_multi_device_module
        data = ours._get_ddp_logging_data()
        assert (data["device_ids"], data["output_device"]) == (str(here.index), here.index)
        nested = [host, (host, "text"), Pair(host, 1), OrderedDict(a=host), Batch(host, "b"), packed]
        output = ours(host, *nested, other={"deep": [host]})
        output.sum().backward()
        (moved, (also, text), pair, ordered, made, sequence), named = ours.module.seen
        tensors = [moved, also, pair.left, ordered["a"], made.values, sequence.data, named["other"]["deep"][0]]
        assert all(tensor.device == here for tensor in [output, *tensors])
        assert (text, pair.right, type(ordered), type(made)) == ("text", 1, OrderedDict, Batch)
        assert host.device.type == "cpu" and nested[4].values is host
    stays = DistributedDataParallel(Watching(3, 1).cuda())
    assert stays.device_ids is stays.output_device is None and stays.device == here
    stays(host.cuda(), host)
    assert stays.module.seen[0][0] is host
    other = DistributedDataParallel(Watching(3, 1).cuda(), device_ids=[here.index])
    assert other.output_device == here.index


def test_device_ids_move_inputs_to_the_gpu() -> None:
    play(move_inputs)


def refuse(gpu: Any) -> list[str]:
    import torch
    from torch import nn

    from procgroup.parallel import DistributedDataParallel

    mixed = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).cuda())
    several = nn.Sequential(nn.Linear(2, 2).cuda(0), nn.Linear(2, 2).cuda(1))
    calls: list[tuple[Any, dict[str, Any]]] = [
        (nn.Linear(2, 2), {"device_ids": [0]}),
        (nn.Linear(2, 2), {"output_device": 0}),
        (nn.Linear(2, 2).cuda(), {"output_device": 0}),
        (nn.Linear(2, 2).cuda(), {"device_ids": [0, 1]}),
        (nn.Linear(2, 2).cuda(0), {"device_ids": [1]}),
        (nn.Linear(2, 2).cuda(0), {"device_ids": ["cpu"]}),
        (mixed, {}),
        (several, {"device_ids": [0]}),
    ]
    texts = []
    for module, options in calls:
        try:
            DistributedDataParallel(module, **options)
        except ValueError as error:
            texts.append(str(error))
    gpu.train(*gpu.wrap(gpu.models.perceptron, device_ids=[torch.cuda.current_device()]))  # nothing was sent
    return texts


def test_wrong_devices_are_refused_in_words() -> None:
    texts = play(refuse)[0]
    words = [
        "on a single GPU.*but got device_ids .0., output_device None, and module parameters on cpu: leave both out",
        "output_device 0, and module parameters on cpu: leave both out",
        "output_device only with device_ids, .*parameters on cuda:0: pass device_ids too",
        "can only be None or contain a single element, but got .0, 1.",
        "device_ids means GPU 1, but the parameters of the module are on cuda:0",
        "Expected device_ids to be a GPU's number.*'cpu'",
        "must be on the same type of devices, but its parameters are on cpu, cuda:0",
        "parameters on cuda:0, cuda:1: leave both out",
    ]
    for text, word in zip(texts, words, strict=True):
        assert __import__("re").search(word, text), (word, text)


def train_on_several_gpus(gpu: Any, on_lost_rank: str) -> Any:
    import torch

    import procgroup as dist
    from procgroup.parallel import DistributedDataParallel

    class Divided(torch.nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.first = torch.nn.Linear(gpu.models.WIDTH, 5)
            self.last = torch.nn.Linear(5, 2)
            self.register_buffer("steps", torch.zeros(()))
            self.register_buffer("rank", torch.full((2,), dist.get_rank()))
            self.devices: Any = None

        def forward(self, inputs: Any) -> Any:
            hidden = self.first(inputs).tanh()
            self.steps = self.steps + 1
            assert self.rank.is_cpu and self.rank.tolist() == [0, 0]
            return self.last(hidden if self.devices is None else hidden.to(self.devices[1]))

    devices = [torch.device("cuda", torch.cuda.current_device() + each) for each in (0, 1)]
    for _ in range(2):  # wrapped again, it uses the same groups
        alone, model = gpu.models.make(Divided), gpu.models.make(Divided)
        alone.rank.zero_()
        model.first.to(devices[0]), model.last.to(devices[1])
        model.steps, model.devices = model.steps.to(devices[0]), devices
        try:
            ours = DistributedDataParallel(model, on_lost_rank=on_lost_rank)
        except ValueError as error:
            return str(error)
        assert ours.is_multi_device_module and ours.device == devices[0] and ours.device_ids is None
        for step in range(4):
            whole = gpu.models.batch(step)
            ours.zero_grad(), alone.zero_grad()
            gpu.models.loss_of(ours(gpu.models.part(whole).to(devices[0]))).backward()
            gpu.models.loss_of(alone(whole)).backward()
            gpu.assert_same_gradients(ours, alone, step)
        buckets = ours._reducer.buckets
        assert len(buckets) == 2 and all(len({slot.device for slot in bucket.slots}) == 1 for bucket in buckets)
    return dist.get_pg_count()


@pytest.mark.parametrize("backend", ["nccl", "gloo"])
def test_a_module_on_several_gpus_is_trained(backend: str) -> None:
    play(train_on_several_gpus, "raise", gpus=4, backend=backend)


def test_a_module_on_several_gpus_does_not_go_on_without_a_rank_over_nccl() -> None:
    assert "is for modules on one device" in play(train_on_several_gpus, "shrink", gpus=4)[0]


def differ(gpu: Any) -> str:
    import procgroup as dist
    from procgroup.errors import ModelMismatch
    from procgroup.parallel import DistributedDataParallel

    model = gpu.models.make(gpu.models.perceptron)
    with pytest.raises(ModelMismatch) as caught:
        DistributedDataParallel(model.cuda() if dist.get_rank() else model)
    return str(caught.value)


def test_a_model_on_a_gpu_and_one_on_a_cpu_are_not_the_same() -> None:
    for text in play(differ):
        assert "on cuda" in text and "rank 1" in text


def train_on_a_mesh(gpu: Any) -> None:
    import procgroup as dist

    mesh = dist.init_device_mesh("cuda", (2, 2), mesh_dim_names=("replicate", "shard"))
    column = mesh["replicate"]
    ours, alone = gpu.wrap(gpu.models.perceptron, device_mesh=column)
    whole = gpu.models.batch(0, 2)
    gpu.models.loss_of(ours(gpu.models.part(whole, column.get_local_rank()).cuda())).backward()
    gpu.models.loss_of(alone(whole)).backward()
    gpu.assert_same_gradients(ours, alone)


def test_a_mesh_of_gpus_gives_the_group() -> None:
    play(train_on_a_mesh, size=4, gpus=4, delay=0)


def train_elsewhere(gpu: Any) -> None:
    import torch

    import procgroup as dist
    from procgroup.parallel import DistributedDataParallel

    class Small(torch.nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.layers = torch.nn.ParameterList([torch.zeros(0), torch.ones(1), torch.zeros(3, 0)])

        def forward(self, inputs: Any) -> Any:
            return sum(each.sum() for each in self.layers) * inputs.mean()

    here = torch.device("cuda", dist.get_rank())
    torch.cuda.set_device(0)
    for build in (gpu.models.perceptron, Small):
        model, alone = gpu.models.make(build), gpu.models.make(build)
        ours = DistributedDataParallel(model.to(here), device_ids=[here], bucket_cap_mb=0.0001)
        for step in range(3):
            parts = [gpu.models.part(gpu.models.batch(step), rank) for rank in (0, 1)]
            ours.zero_grad()
            gpu.models.loss_of(ours(parts[dist.get_rank()])).backward()
            gpu.models.mean_of_ranks(alone, [gpu.models.loss_of(alone(each)) for each in parts])
            gpu.assert_same_gradients(ours, alone, step)
    assert torch.cuda.current_device() == 0


def test_the_current_gpu_may_be_another_one() -> None:
    play(train_elsewhere)


def train_in_torchs_group(rank: int, size: int) -> None:
    begin(rank)
    import torch
    from torch_gpus import gpu_training as gpu

    torch.set_num_threads(1)
    ours, alone = gpu.wrap(gpu.models.perceptron, device_ids=[rank])
    for step in range(3):
        whole = gpu.models.batch(step, size)
        ours.zero_grad(), alone.zero_grad()
        gpu.models.loss_of(ours(gpu.models.part(whole, rank))).backward()
        gpu.models.loss_of(alone(whole)).backward()
        gpu.assert_same_gradients(ours, alone, step)
    torch.distributed.destroy_process_group()


def test_a_group_of_torch_with_the_backend_procgroup_is_taken() -> None:
    run(train_in_torchs_group, 2, torch="gpus", environment=SLOW_GPUS)
