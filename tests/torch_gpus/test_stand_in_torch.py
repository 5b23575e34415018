"""The stand-in for torch's device "cuda": what it computes, and that it shows what a program forgets to wait for."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from nccl.gpu_arrays import held
from torch_gpus import stand_in_torch

from world import run, run_command

pytestmark = pytest.mark.torch
SLOW = {"PROCGROUP_STAND_IN_GPUS": "2", "PROCGROUP_STAND_IN_DELAY_US": "20000"}


def train(rank: int, size: int) -> list[float]:
    stand_in_torch.start()
    import torch

    torch.manual_seed(0)
    layers = [torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4), torch.nn.ReLU(), torch.nn.Flatten()]
    model = torch.nn.Sequential(*layers, torch.nn.Linear(144, 2))
    inputs = torch.randn(5, 3, 8, 8)
    losses = []
    for device in ("cpu", "cuda:1"):
        copy = torch.nn.Sequential(*model).to(device)
        state = {name: tensor.clone() for name, tensor in copy.state_dict().items()}
        optimizer = torch.optim.AdamW(copy.parameters(), lr=0.1)
        for _ in range(3):
            loss = copy(inputs.to(device)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        assert loss.device == torch.device(device)
        losses.append(loss.item())
        copy.load_state_dict(state)
    return losses


def test_it_trains_as_the_cpu_does() -> None:
    on_cpu, on_gpu = run(train, 1, torch="gpus", environment={"PROCGROUP_STAND_IN_GPUS": "2"})[0]
    assert on_gpu == pytest.approx(on_cpu, rel=1e-5)


def use_streams(rank: int, size: int) -> None:
    stand_in_torch.start()
    import torch

    source, target = torch.ones(4, device="cuda"), torch.zeros(4, device="cuda")
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side), held(side.cuda_stream):
        target.copy_(source)
        with torch.cuda.stream(torch.cuda.default_stream()):
            assert target.tolist() == [0] * 4, "an operation has waited for another stream"
    torch.cuda.current_stream().wait_stream(side)
    assert target.tolist() == [1] * 4

    with torch.cuda.stream(side):
        target.fill_(3)
        target.copy_(source * 5)
        event = torch.cuda.Event()
        event.record()
    future = torch.futures.Future(devices=[torch.device("cuda", 0)])
    with torch.cuda.stream(side):
        future.set_result([target])
    assert future.wait()[0].tolist() == [5] * 4
    assert event.query()


def test_an_operation_comes_after_the_current_stream_s_work_alone() -> None:
    run(use_streams, 1, torch="gpus", environment=SLOW)


def drop(rank: int, size: int, is_recorded: bool) -> None:
    stand_in_torch.start()
    import torch

    side = torch.cuda.Stream()
    tensor, target = torch.ones(4, device="cuda"), torch.zeros(4, device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        for _ in range(4):
            target.copy_(tensor)
    if is_recorded:
        tensor.record_stream(side)
    del tensor
    torch.cuda.synchronize()


def test_memory_that_is_dropped_in_use_on_another_stream_is_a_fault() -> None:
    run(drop, 1, args=(True,), torch="gpus", environment=SLOW)
    with pytest.raises(AssertionError, match="stand-in GPU: .* gives 700"):
        run(drop, 1, args=(False,), torch="gpus", environment=SLOW)


def test_a_program_finds_it_by_its_environment(tmp_path: Path) -> None:
    script = tmp_path / "program.py"
    script.write_text("import torch; print(torch.ones(2).cuda(1) + 1, torch.cuda.device_count())")
    done = run_command([sys.executable, str(script)], environment=stand_in_torch.environment(gpus=2))
    assert done.stdout == "tensor([2., 2.], device='cuda:1') 2\n"


def save_and_load(rank: int, size: int, path: Path) -> list[float]:
    stand_in_torch.start()
    import torch

    model = torch.nn.Linear(2, 1, device="cuda:0")
    model.weight.data.fill_(3)
    torch.save(model.state_dict(), path)
    model.weight.data.zero_()
    state = torch.load(path, map_location="cuda:1")
    assert {tensor.device for tensor in state.values()} == {torch.device("cuda:1")}
    model.load_state_dict(state)
    assert torch.load(path, map_location="cpu")["weight"].device.type == "cpu"
    weights: list[float] = model.weight.flatten().tolist()
    return weights


def test_checkpoints_are_saved_and_loaded_to_another_gpu(tmp_path: Path) -> None:
    gpus = {"PROCGROUP_STAND_IN_GPUS": "2"}
    assert run(save_and_load, 1, args=(tmp_path / "model.pt",), torch="gpus", environment=gpus) == [[3.0, 3.0]]
