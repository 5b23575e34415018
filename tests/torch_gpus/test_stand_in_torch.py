"""The stand-in for torch's device "cuda": what it computes, and that it shows what a program forgets to wait for."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

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


# --- CUDA graphs ---


def replay_a_step(rank: int, size: int) -> None:
    """Train two copies, one by a graph of a whole step: with targets, running statistics and momentum."""
    stand_in_torch.start()
    import torch

    torch.manual_seed(0)
    batches = [(torch.randn(5, 3, 8, 8), torch.randint(0, 2, (5,))) for _ in range(6)]

    def train(is_captured: bool) -> tuple[list[float], dict[str, Any]]:
        torch.manual_seed(0)
        layers = [torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4), torch.nn.ReLU(), torch.nn.Flatten()]
        model = torch.nn.Sequential(*layers, torch.nn.Linear(144, 2)).cuda()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        inputs, targets = (each.cuda() for each in batches[0])
        losses = []

        def step() -> Any:
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(model(inputs), targets)
            loss.backward()
            optimizer.step()
            return loss

        side, graph = torch.cuda.Stream(), None
        torch.cuda.synchronize()
        for number, batch in enumerate(batches):
            inputs.copy_(batch[0])
            targets.copy_(batch[1])
            torch.cuda.synchronize()
            if is_captured and number == 3:
                graph = torch.cuda.CUDAGraph()
                before = [parameter.tolist() for parameter in model.parameters()]
                with torch.cuda.graph(graph):
                    assert torch.cuda.is_current_stream_capturing()
                    loss = step()
                assert not torch.cuda.is_current_stream_capturing()
                assert [parameter.tolist() for parameter in model.parameters()] == before, "nothing runs in a capture"
            if graph is not None:
                graph.replay()
            else:
                with torch.cuda.stream(side):
                    loss = step()
                torch.cuda.current_stream().wait_stream(side)
            losses.append(loss.item())
        return losses, model.state_dict()

    losses, state = train(is_captured=False)
    replayed_losses, replayed_state = train(is_captured=True)
    assert replayed_losses == losses
    for name, value in state.items():
        assert torch.equal(replayed_state[name], value), name


def test_a_captured_step_computes_at_each_replay_as_an_eager_one() -> None:
    run(replay_a_step, 1, torch="gpus", environment={**SLOW, "PROCGROUP_STAND_IN_DELAY_US": "300"})


def graph_a_callable(rank: int, size: int) -> None:
    stand_in_torch.start()
    import torch

    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1)).cuda()
    given = torch.randn(2, 3).cuda()
    model(given).sum().backward()
    expected = [parameter.grad.tolist() for parameter in model.parameters()]
    model.zero_grad()
    graphed = torch.cuda.make_graphed_callables(model, (torch.zeros(2, 3, device="cuda"),))
    graphed(given).sum().backward()
    assert [parameter.grad.tolist() for parameter in model.parameters()] == expected


def test_graphed_callables_compute_forwards_and_backwards() -> None:
    run(graph_a_callable, 1, torch="gpus", environment={**SLOW, "PROCGROUP_STAND_IN_DELAY_US": "300"})


def read_in_a_capture(rank: int, size: int) -> None:
    stand_in_torch.start()
    import torch

    tensor, sparse = torch.ones(3, device="cuda"), torch.eye(2).to_sparse().cuda()
    reads: list[Any] = [tensor.sum().item, tensor.tolist, tensor.nonzero, tensor.cpu, torch.ones(3).cuda]
    reads += [lambda: torch.equal(tensor, tensor), torch.cuda.synchronize, lambda: sparse * 2]
    stream = torch.cuda.current_stream()
    for read in reads:
        with pytest.raises(RuntimeError, match="INVALIDATED") as caught, torch.cuda.graph(torch.cuda.CUDAGraph()):
            read()
        assert "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED" in str(caught.value.__context__)
        torch.cuda.set_stream(stream)  # as torch, it does not leave the stream of a capture that has failed
        assert (tensor * 2).tolist() == [2] * 3


def test_the_host_cannot_wait_in_a_capture() -> None:
    run(read_in_a_capture, 1, torch="gpus", environment=SLOW)


def drop_in_a_capture(rank: int, size: int) -> None:
    stand_in_torch.start()
    import torch

    graph, given = torch.cuda.CUDAGraph(), torch.ones(4, device="cuda")
    with torch.cuda.graph(graph):
        result = (given * 2 + 1) * 3  # with memory between, that nothing refers to any more
    assert result.tolist() != [9] * 4, "nothing has run"
    others = [torch.zeros(4, device="cuda") for _ in range(20)]
    for value in range(3):
        given.fill_(value)
        graph.replay()
        assert result.tolist() == [(value * 2 + 1) * 3] * 4
    assert all(other.tolist() == [0] * 4 for other in others)
    del graph
    assert result.tolist() == [15] * 4


def test_memory_of_a_graph_is_that_of_the_graph_alone() -> None:
    run(drop_in_a_capture, 1, torch="gpus", environment=SLOW)


def drop_what_a_graph_uses(rank: int, size: int) -> None:
    stand_in_torch.start()
    import torch

    graph, given = torch.cuda.CUDAGraph(), torch.ones(4, device="cuda")
    with torch.cuda.graph(graph):
        given * 2
    del given
    torch.cuda.synchronize()
    graph.replay()
    torch.cuda.synchronize()


def test_a_replay_with_inputs_that_the_program_has_dropped_is_a_fault() -> None:
    with pytest.raises(AssertionError, match="stand-in GPU: .* gives 700"):
        run(drop_what_a_graph_uses, 1, torch="gpus", environment=SLOW)


def join_the_legacy_stream(rank: int, size: int) -> None:
    stand_in_torch.start()
    import torch

    with pytest.raises(RuntimeError, match="INVALIDATED") as caught, torch.cuda.graph(torch.cuda.CUDAGraph()):
        torch.cuda.default_stream().wait_stream(torch.cuda.current_stream())
    assert "CUDA_ERROR_STREAM_CAPTURE_IMPLICIT" in str(caught.value.__context__)


def test_the_default_stream_takes_no_part_in_a_capture() -> None:
    run(join_the_legacy_stream, 1, torch="gpus", environment=SLOW)


def forget_a_wait(rank: int, size: int, waits: bool) -> float:
    stand_in_torch.start()
    import torch

    side, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    given, moved = torch.zeros(4, device="cuda"), torch.zeros(4, device="cuda")
    with torch.cuda.graph(graph):
        begin = torch.cuda.Event()
        begin.record()
        for _ in range(6):
            given += 1
        with torch.cuda.stream(side):
            side.wait_event(begin)
            if waits:
                side.wait_stream(torch.cuda.graph.default_capture_stream)
            moved.copy_(given)
        torch.cuda.current_stream().wait_stream(side)
    graph.replay()
    return float(moved[0].item())


def test_streams_of_a_graph_run_beside_each_other() -> None:
    assert run(forget_a_wait, 1, args=(True,), torch="gpus", environment=SLOW) == [6]
    assert run(forget_a_wait, 1, args=(False,), torch="gpus", environment=SLOW) != [6]
