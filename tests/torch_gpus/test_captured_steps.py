"""Training steps that are captured in a CUDA graph give what eager steps give, at each replay; or say why they cannot.

Each operation of a GPU begins late, so a wait that is missing in a graph shows as wrong numbers.
"""

from __future__ import annotations

import itertools
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from failures.waiting_calls import allowance
from torch_gpus import stand_in_torch
from torch_gpus.on_gpus import play
from torch_gpus.plug_in_world import SLOW_GPUS, begin

from documentation.page_programs import programs
from world import run, run_command, start

pytestmark = pytest.mark.torch


# --- DistributedDataParallel ---


def replay(gpu: Any, model: str, options: dict[str, Any], has_optimizer: bool) -> None:
    from torch_gpus import captured_training

    build = getattr(captured_training, model, None) or getattr(gpu.models, model)
    captured_training.replay_as_eager(lambda: gpu.wrap(build, **options)[0], has_optimizer=has_optimizer)


OPTIONS: list[dict[str, Any]] = [
    {},
    {"bucket_cap_mb": 0.0001},
    {"bucket_cap_mb": 0.0001, "gradient_as_bucket_view": True},
    {"static_graph": True, "bucket_cap_mb": 0.0001},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("has_optimizer", [False, True], ids=["", "with the optimizer's step"])
@pytest.mark.parametrize("size", [1, 2])
def test_replays_train_as_eager_steps(size: int, has_optimizer: bool, options: dict[str, Any]) -> None:
    play(replay, "perceptron", options, has_optimizer, size=size)


def test_each_replay_takes_the_buffers_of_rank_0() -> None:
    play(replay, "Buffered", {"bucket_cap_mb": 0.0001}, True)


def replay_large_gradients(gpu: Any) -> None:
    from torch_gpus import captured_training

    from procgroup.parallel.ddp import bucket_assignment

    bucket_assignment.SINGLE_BYTES_ON_GPU = 1
    captured_training.replay_as_eager(lambda: gpu.wrap(gpu.models.perceptron)[0])


def test_large_gradients_are_averaged_in_the_memory_of_the_graph() -> None:
    play(replay_large_gradients)


def accumulate(gpu: Any) -> None:
    from torch_gpus import captured_training

    def step(model: Any, inputs: Any) -> None:
        with model.no_sync():
            gpu.models.loss_of(model(inputs * 2)).backward()
        gpu.models.loss_of(model(inputs)).backward()

    make = lambda: gpu.wrap(gpu.models.perceptron, bucket_cap_mb=0.0001)[0]  # noqa: E731
    captured_training.replay_as_eager(make, step)


def test_a_step_accumulates_gradients_without_the_other_ranks_in_a_capture() -> None:
    play(accumulate)


def use_branches(gpu: Any) -> None:
    """Each rank uses another branch, and leaves others out."""
    from torch_gpus import captured_training

    import procgroup as dist

    rank = dist.get_rank()

    def step(model: Any, inputs: Any) -> None:
        gpu.models.loss_of(model(inputs, rank)).backward()

    options: dict[str, Any] = {"bucket_cap_mb": 0.0001, "find_unused_parameters": True}
    captured_training.replay_as_eager(lambda: gpu.wrap(gpu.models.Branches, **options)[0], step)


def test_parameters_that_some_ranks_do_not_use_need_no_flag_in_a_capture() -> None:
    play(use_branches)


def replay_features(gpu: Any, feature: str) -> None:
    import torch
    from torch.nn.parallel.distributed import _MixedPrecision
    from torch_gpus import captured_training

    from procgroup.parallel import communication_hooks as hooks

    def make() -> Any:
        if feature == "mixed precision":
            precision = _MixedPrecision(param_dtype=torch.float32, reduce_dtype=torch.float32)
            return gpu.wrap(gpu.models.perceptron, mixed_precision=precision)[0]
        if feature == "SyncBatchNorm":
            convert = torch.nn.SyncBatchNorm.convert_sync_batchnorm
            return gpu.wrap(lambda: convert(captured_training.Buffered()), bucket_cap_mb=0.0001)[0]
        model = gpu.wrap(gpu.models.perceptron, bucket_cap_mb=0.0001)[0]
        if feature == "an optimizer in the backward":
            model._register_fused_optim(torch.optim.SGD, lr=0.1)
        elif feature == "fp16":
            model.register_comm_hook(None, hooks.fp16_compress_hook)
        elif feature == "PowerSGD":
            model.register_comm_hook(hooks.PowerSGDState(start_powerSGD_iter=2), hooks.powerSGD_hook)
        elif feature == "top-k":
            model.register_comm_hook(hooks.TopKState(ratio=0.3), hooks.top_k_hook)
        else:
            model.register_comm_hook(hooks.BlockQuantizedState(block_size=8), hooks.block_quantized_hook)
        return model

    captured_training.replay_as_eager(make, has_optimizer=True, warm_ups=4)


FEATURES = [
    "mixed precision",
    "SyncBatchNorm",
    "an optimizer in the backward",
    "fp16",
    "PowerSGD",
    "top-k",
    "block-quantized",
]


@pytest.mark.parametrize("feature", FEATURES)
def test_features_work_in_a_capture_and_keep_their_state_from_replay_to_replay(feature: str) -> None:
    play(replay_features, feature, delay=50)


# --- What cannot be captured is said, and training goes on ---


def capture_too_early(gpu: Any, steps_before: int) -> tuple[str, str]:
    from torch_gpus.captured_training import Training, error_of, go_on_as_eager, on_side_stream

    make = lambda: gpu.wrap(gpu.models.perceptron, bucket_cap_mb=0.0001)[0]  # noqa: E731
    ours, eager = Training(on_side_stream(make)), Training(on_side_stream(make))
    for each in (ours, eager):
        each.train(range(steps_before))
    seen = error_of(lambda: ours.capture(has_optimizer=True))
    for each in (ours, eager):
        each.train(range(steps_before, 2))
    go_on_as_eager(ours, eager, ours.capture(has_optimizer=True), has_optimizer=True)
    return seen


@pytest.mark.parametrize("steps_before", [0, 1])
def test_the_first_two_steps_are_refused_because_buckets_change(steps_before: int) -> None:
    for kind, text in play(capture_too_early, steps_before):
        assert kind == "RuntimeError" and "Make two or more steps before the capture" in text


def refuse(gpu: Any, what: str) -> tuple[str, str]:
    import torch
    from torch_gpus.captured_training import Training, error_of, on_side_stream

    import procgroup as dist

    def reads(_: Any, bucket: Any) -> Any:
        assert bucket.buffer().sum().item() is not None
        work: Any = dist.all_reduce(bucket.buffer(), dist.ReduceOp.AVG, async_op=True)
        return work.get_future()

    def make() -> Any:
        if what == "sparse gradients":
            return gpu.wrap(lambda: torch.nn.Sequential(torch.nn.Embedding(5, 3, sparse=True)))[0]
        options: dict[str, Any] = {
            "on_lost_rank": {"on_lost_rank": "shrink"},
            "CPU inputs": {"device_ids": [dist.get_rank()]},
        }
        model = gpu.wrap(gpu.models.perceptron, bucket_cap_mb=0.0001, **options.get(what, {}))[0]
        if what == "a hook that reads":
            model.register_comm_hook(None, reads)
        return model

    ours = Training(on_side_stream(make))
    if what == "sparse gradients":
        ours.inputs = torch.ones(3, 6, dtype=torch.int64, device="cuda")
        ours.optimizer = torch.optim.SGD(ours.model.parameters(), lr=0.1)
    numbers = () if what == "sparse gradients" else (0, 1)
    ours.train(numbers)
    inputs = ours.inputs
    if what == "CPU inputs":
        ours.inputs = inputs.cpu()
    with ours.model.join() if what == "join" else nullcontext():
        seen = error_of(lambda: ours.capture(has_optimizer=True))
    ours.inputs = inputs
    ours.train(numbers)
    dist.barrier()
    return seen


@pytest.mark.parametrize(
    ("what", "kind", "advice"),
    [
        ("sparse gradients", "RuntimeError", "Make the Embedding with sparse=False"),
        ("on_lost_rank", "RuntimeError", 'Leave on_lost_rank at "raise", or train without graphs'),
        ("join", "RuntimeError", "Capture steps outside of it"),
        ("CPU inputs", "RuntimeError", "copy each batch into them before its replay"),
        ("a hook that reads", "RuntimeError", "there a hook must not let the host wait for the GPU"),
        ("host memory", "ArgumentError", "calls that go through host memory cannot be captured"),
    ],
)
def test_what_cannot_be_captured_is_refused_with_advice_and_eager_steps_go_on(
    what: str, kind: str, advice: str
) -> None:
    for seen in play(refuse, what, backend="gloo" if what == "host memory" else "nccl"):
        assert seen[0] == kind and advice in seen[1], seen


def fail_in_a_capture(gpu: Any, failing: tuple[int, ...]) -> list[tuple[str, str]]:
    from torch_gpus.captured_training import Training, error_of, go_on_as_eager, on_side_stream

    import procgroup as dist

    make = lambda: gpu.wrap(gpu.models.Fragile, bucket_cap_mb=0.0001)[0]  # noqa: E731
    ours, eager = Training(on_side_stream(make)), Training(on_side_stream(make))
    for each in (ours, eager):
        each.train(range(2))
    plain = ours._step
    ours._step = lambda model, inputs: gpu.models.loss_of(model(inputs, dist.get_rank() in failing)).backward()
    seen = [error_of(lambda: ours.capture(has_optimizer=True))]
    ours._step = plain
    if dist.get_rank() in failing:
        seen.append(error_of(lambda: ours.capture(has_optimizer=True)))
    go_on_as_eager(ours, eager, ours.capture(has_optimizer=True), has_optimizer=True)
    return seen


@pytest.mark.parametrize("failing", [(0,), (0, 1)])
def test_a_backward_that_fails_in_a_capture_is_ended_in_a_graph_that_is_refused(failing: tuple[int, ...]) -> None:
    for rank, seen in enumerate(play(fail_in_a_capture, failing)):
        if rank in failing:
            assert seen[0][0] == "KeyError"
            assert seen[1][0] == "RuntimeError" and "Drop this graph, and capture the step again" in seen[1][1]
        else:
            assert seen[0][0] == "BackwardFailed" and "backward failed on rank 0" in seen[0][1]


# --- Ranks that do something else ---


def capture_something_else(gpu: Any, what: str) -> tuple[str, str]:
    import torch
    from torch_gpus.captured_training import Training, error_of, go_on_as_eager, on_side_stream

    import procgroup as dist

    def make() -> Any:
        return gpu.wrap(gpu.models.perceptron, bucket_cap_mb=0.0001)[0]

    def capture() -> None:
        if dist.get_rank() == 0 or what == "another step":
            ours.capture(has_optimizer=True)
        else:
            ours.train([2])
            dist.barrier()  # where a mismatch on the stream shows, if it has not before

    def step(model: Any, inputs: Any) -> None:
        if what == "another step" and torch.cuda.is_current_stream_capturing() and dist.get_rank() == 1:
            dist.all_reduce(inputs)
        gpu.models.loss_of(model(inputs)).backward()

    ours = Training(on_side_stream(make), step)
    ours.train([0, 1])
    seen = error_of(capture)
    dist.destroy_process_group()
    dist.init_process_group("nccl")
    ours, eager = Training(on_side_stream(make)), Training(on_side_stream(make))
    for each in (ours, eager):
        each.train([0, 1])
    go_on_as_eager(ours, eager, ours.capture(has_optimizer=True), has_optimizer=True)
    return seen


@pytest.mark.parametrize("what", ["another step", "no capture"])
def test_ranks_that_capture_different_steps_raise_then_and_can_begin_anew(what: str) -> None:
    for kind, text in play(capture_something_else, what):
        assert kind == "CollectiveMismatch", (kind, text)
        assert ("(captured in a CUDA graph)" in text) == (what == "no capture"), text


def replay_until_a_rank_dies(rank: int, size: int) -> str:
    stand_in_torch.start()
    import torch
    from torch_gpus import captured_training, gpu_training

    import procgroup as dist
    from procgroup.errors import PeerLost

    torch.set_num_threads(1)
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", timeout=60.0)
    build = gpu_training.models.perceptron
    ours = captured_training.Training(captured_training.on_side_stream(lambda: gpu_training.wrap(build)[0]))
    ours.train([0, 1])
    graph = ours.capture(has_optimizer=True)
    with pytest.raises(PeerLost) as caught:
        for number in itertools.count():
            graph.replay()
            dist.barrier()
            if number == 3:
                print("replayed", flush=True)
            if number == 3 and rank == 1:
                time.sleep(60)
    torch.cuda.synchronize()
    assert (torch.ones(2, device="cuda") * 2).tolist() == [2, 2]
    del graph
    dist.destroy_process_group()
    return str(caught.value)


def test_a_rank_that_dies_between_replays_is_named_by_the_next_call() -> None:
    with start(replay_until_a_rank_dies, 2, torch="gpus", environment=SLOW_GPUS) as world:
        world.wait_for_output(1, "replayed")
        world.kill(1)
        outcomes = world.wait(allowance(20.0))
    assert outcomes[0].value is not None, f"{outcomes[0].output}{outcomes[0].traceback}"
    assert "rank 1" in outcomes[0].value


# --- torch's own class, on the plug-in ---


def replay_stock(rank: int, size: int, backend: str, options: dict[str, Any]) -> None:
    dist = begin(rank, backend)
    import torch
    from parallel import models
    from torch_gpus import captured_training

    torch.set_num_threads(1)

    def make() -> Any:
        model = models.make(captured_training.Buffered).cuda()
        return torch.nn.parallel.DistributedDataParallel(model, device_ids=[rank], bucket_cap_mb=0.0001, **options)

    captured_training.replay_as_eager(make, has_optimizer=True)
    dist.destroy_process_group()


@pytest.mark.parametrize("options", [{}, {"gradient_as_bucket_view": True}, {"static_graph": True}], ids=str)
@pytest.mark.parametrize("backend", ["procgroup", "nccl"])
def test_replays_train_torch_s_class_as_eager_steps(backend: str, options: dict[str, Any]) -> None:
    environment = {**SLOW_GPUS, "PROCGROUP_REPLACE_NCCL": "1"}
    run(replay_stock, 2, args=(backend, options), torch="gpus", environment=environment)


def refuse_stock(rank: int, size: int, what: str) -> tuple[str, str]:
    dist = begin(rank, "nccl")
    import torch
    from parallel import models
    from torch_gpus.captured_training import Training, error_of, on_side_stream

    torch.set_num_threads(1)
    build = models.Branches if what == "unused" else models.perceptron

    def make() -> Any:
        options = {"bucket_cap_mb": 0.0001, "find_unused_parameters": what == "unused"}
        return torch.nn.parallel.DistributedDataParallel(models.make(build).cuda(), device_ids=[rank], **options)

    def step(model: Any, inputs: Any) -> None:
        if what == "another step" and torch.cuda.is_current_stream_capturing() and rank == 1:
            dist.all_reduce(inputs)
        models.loss_of(model(inputs, 0) if what == "unused" else model(inputs)).backward()

    ours = Training(on_side_stream(make), step)
    ours.train(range(11))
    seen = error_of(lambda: ours.capture(has_optimizer=True))
    if what == "unused":
        ours.train([11, 12])
    dist.destroy_process_group()
    return seen


@pytest.mark.parametrize(
    ("what", "text"),
    [("unused", "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED"), ("another step", "the ranks made different calls")],
)
def test_torch_s_class_fails_in_the_capture_on_all_ranks(what: str, text: str) -> None:
    """It reads on the host which parameters were used."""
    environment = {**SLOW_GPUS, "PROCGROUP_REPLACE_NCCL": "1"}
    for seen in run(refuse_stock, 2, args=(what,), torch="gpus", environment=environment):
        assert text in seen[1], seen


# --- The programs of the documentation ---


@pytest.mark.parametrize("name", ["train_graph.py", "graph.py"])
def test_programs_of_the_documentation_run(name: str, tmp_path: Path) -> None:
    (text,) = (block.text for block in programs() if block.text.startswith(f"# {name}\n"))
    (tmp_path / name).write_text(text)
    command = [sys.executable, "-m", "procgroup.launch", "--nproc-per-node", "2", str(tmp_path / name)]
    done = run_command(command, environment=stand_in_torch.environment(gpus=2))
    assert done.returncode == 0, done.stdout + done.stderr
    expected = "the same parameters: True" if name == "train_graph.py" else str([2.0**11] * 4)
    assert done.stdout.count(expected) == 2, done.stdout
