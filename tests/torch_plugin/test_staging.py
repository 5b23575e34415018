"""Tensors of a device, by way of the host's memory: with a stand-in for the device, and on CUDA where there is one."""

from __future__ import annotations

import importlib.util
import random
import threading
import time
from functools import partial
from typing import Any

import pytest
from collectives.playing import nothing_went_wrong, play_programs
from torch_plugin.stand_in_world import CHUNKS, join, on_device

from waiting import wait_until
from world import run

pytestmark = pytest.mark.torch

NAMES: list[str] = []
HAS_CUDA = False
if importlib.util.find_spec("torch") is not None:
    import torch
    import torch.distributed as dist
    from torch_plugin import calls, stand_in

    HAS_CUDA = torch.cuda.is_available()
    NAMES = list(calls.CALLS)

# torch's functions on objects make their own tensors.
ON_HOST = frozenset({"objects_move_through_torch_s_own_functions"})
# A subclass of Tensor, as the stand-in's is, cannot be sparse, and torch.compile and AsyncCollectiveTensor take none.
NOT_STANDING_IN = frozenset(
    {
        "sparse_tensors_are_summed_where_indices_differ",
        "the_future_of_sparse_tensors_has_them",
        "functional_collectives_run",
        "a_compiled_model_trains_with_stock_ddp",
    }
)


def make_the_calls(rank: int, size: int, kind: str, chunk_bytes: int) -> dict[str, str]:
    join(chunk_bytes=chunk_bytes)
    left_out = ON_HOST if kind == "cuda" else ON_HOST | NOT_STANDING_IN
    programs = {name: function for name, function in calls.CALLS.items() if name not in left_out}
    surroundings = partial(torch.device, "cuda", 0) if kind == "cuda" else stand_in.NewTensorsOnDevice
    became = play_programs(programs, rank, size, surroundings)
    stand_in.require_recorded()
    dist.destroy_process_group()
    return became


@pytest.fixture(scope="module", params=CHUNKS, ids=["whole", "in chunks"])
def of_ranks(request: pytest.FixtureRequest) -> list[dict[str, str]]:
    return run(make_the_calls, 3, args=("stand-in", request.param), timeout=100, torch=True)


@pytest.mark.parametrize("name", [name for name in NAMES if name not in ON_HOST | NOT_STANDING_IN])
def test_a_pytorch_program_on_a_stand_in_device(of_ranks: list[dict[str, str]], name: str) -> None:
    nothing_went_wrong(name, of_ranks)


@pytest.mark.skipif(not HAS_CUDA, reason="there is no CUDA device here; the tests of the stand-in device ran")
@pytest.mark.parametrize("chunk_bytes", CHUNKS, ids=["whole", "in chunks"])
def test_a_pytorch_program_on_cuda(chunk_bytes: int) -> None:
    of_ranks = run(make_the_calls, 3, args=("cuda", chunk_bytes), timeout=100, torch=True)
    for name in (name for name in NAMES if name not in ON_HOST):
        nothing_went_wrong(name, of_ranks)


def name_backends(rank: int, size: int, backend: str) -> None:
    join(backend=backend)
    for group in (None, dist.new_group()):
        tensor = on_device(rank + 1.0)
        dist.all_reduce(tensor, group=group)
        dist.barrier(group=group)
        assert tensor.tolist() == [3.0]
    world = dist.group.WORLD
    assert world._get_backend(stand_in.device()) is world
    dist.destroy_process_group()


@pytest.mark.parametrize("backend", ["procgroup", "cpu:procgroup", "cpu:procgroup,privateuseone:procgroup", "gloo"])
def test_tensors_are_staged_where_no_other_backend_is_named_for_their_device(backend: str) -> None:
    replace = {"PROCGROUP_REPLACE_GLOO": "1"} if backend == "gloo" else {}
    run(name_backends, 2, args=(backend,), environment=replace, torch=True)


def mix(rank: int, size: int, chunk_bytes: int) -> None:
    join(chunk_bytes=chunk_bytes)
    choices = random.Random(1)  # the same on all ranks
    pending = []
    for step in range(60):
        count, is_staged, is_asynchronous = choices.choice([1, 7, 40]), choices.random() < 0.6, choices.random() < 0.7
        given = torch.full((count,), float(step + rank))
        tensor = stand_in.on_device(given) if is_staged else given
        total = [float(step * size + sum(range(size)))] * count
        work = dist.all_reduce(tensor, async_op=is_asynchronous)
        pending.append((work, tensor, total))
        if choices.random() < 0.2:
            choices.shuffle(pending)
            for work, tensor, total in pending:
                assert work is None or work.wait()
                assert tensor.tolist() == total, step
            pending.clear()
    dist.destroy_process_group()


@pytest.mark.parametrize("chunk_bytes", CHUNKS, ids=["whole", "in chunks"])
@pytest.mark.parametrize("size", [2, 3])
def test_staged_calls_and_calls_on_the_host_keep_one_order(size: int, chunk_bytes: int) -> None:
    run(mix, size, args=(chunk_bytes,), timeout=60, torch=True)


def use_streams(rank: int, size: int) -> None:
    join()
    tensor = on_device(1.0, 2.0)
    tensor.mul_(rank + 1)
    work = dist.all_reduce(tensor, async_op=True)
    other = stand_in.Stream()
    with stand_in.stream(other):  # the results are for the stream that is current where wait() is called
        work.wait()
        tensor.add_(1)
        tensor.record_stream(other)
        assert tensor.tolist() == [4.0, 7.0]
    turned = stand_in.on_device(torch.arange(6.0).reshape(2, 3)).t()
    dist.all_reduce(turned)
    turned.mul_(2)
    dist.broadcast(turned, 1)
    assert turned.tolist() == [[0.0, 12.0], [4.0, 16.0], [8.0, 20.0]]
    dist.all_reduce(tensor, async_op=True)  # nobody waits
    dist.barrier()
    stand_in.require_recorded()
    dist.destroy_process_group()


def receive_into_a_tensor_in_use(rank: int, size: int) -> None:
    """What was received comes after what the program has given the device to do with the tensor before."""
    join()
    if rank == 0:
        dist.send(on_device(1.0, 2.0), 1)
    else:
        may_go_on = threading.Event()
        stand_in.current_stream().give(lambda: may_go_on.wait(60))
        tensor = on_device(5.0, 6.0)
        work = dist.irecv(tensor, 0)
        wait_until(work.is_completed, otherwise="nothing was received")
        time.sleep(20 * stand_in.LATEST)  # a copy that does not wait has completed by now
        may_go_on.set()
        work.wait()
        assert tensor.tolist() == [1.0, 2.0]
    dist.destroy_process_group()


def test_what_is_received_waits_for_what_the_device_still_does_with_its_tensor() -> None:
    run(receive_into_a_tensor_in_use, 2, torch=True)


def test_results_can_be_used_on_the_stream_that_is_current_at_the_wait() -> None:
    run(use_streams, 2, torch=True)


def receive_before_anything_is_copied_in(rank: int, size: int) -> list[float]:
    join(chunk_bytes=8)
    from procgroup.torch_plugin.side_streams import SideStreams

    one_is_out = threading.Event()
    copy = SideStreams.copy

    def late(self: SideStreams, pairs: Any, stream: Any) -> None:
        if stream is self.into and rank == 0:
            stream.give(lambda: one_is_out.wait(20))
        copy(self, pairs, stream)
        if stream is self.out:
            stream.give(one_is_out.set)
            stream.give(lambda: time.sleep(0.05))

    SideStreams.copy = late  # type: ignore[method-assign]
    turned = stand_in.on_device(torch.arange(6.0).reshape(2, 3) + 10 * rank).t()
    dist.broadcast(turned, 1)
    found: list[float] = turned.flatten().tolist()
    stand_in.require_recorded()
    dist.destroy_process_group()
    return found


def test_what_a_strided_tensor_held_never_comes_after_what_it_receives_in_pieces() -> None:
    assert run(receive_before_anything_is_copied_in, 2, torch=True) == [[10.0, 13.0, 11.0, 14.0, 12.0, 15.0]] * 2


def overlap(rank: int, size: int) -> float:
    """Copy the last chunk in only when the first one is out: without overlap this would never end."""
    join(chunk_bytes=64)
    from procgroup.torch_plugin.side_streams import SideStreams

    tensor = stand_in.on_device(torch.arange(100.0))
    one_is_out = threading.Event()
    copy = SideStreams.copy

    def hold(self: Any, pairs: Any, stream: Any) -> None:
        is_last = pairs[0][0].storage_offset() == 100 - 16
        if stream is self.into and is_last:
            stream.give(lambda: one_is_out.wait(20))
        copy(self, pairs, stream)
        if stream is self.out:
            stream.give(one_is_out.set)

    SideStreams.copy = hold  # type: ignore[method-assign]
    started = time.monotonic()
    dist.all_reduce(tensor)
    assert torch.equal(tensor.cpu(), 2 * torch.arange(100.0))
    took = time.monotonic() - started
    dist.destroy_process_group()
    return took


def test_pieces_are_copied_while_others_are_on_their_way() -> None:
    assert max(run(overlap, 2, torch=True, timeout=60)) < 20.0


def keep_autograd_s_rules(rank: int, size: int) -> None:
    join()
    parameter = on_device(1.0, 2.0).requires_grad_()
    dist.broadcast(parameter, 1)
    dist.all_reduce(parameter)
    assert parameter.tolist() == [2.0, 4.0] and parameter.requires_grad and parameter.is_leaf
    with torch.inference_mode():
        tensor = on_device(3.0)
        dist.all_reduce(tensor)
    work = dist.all_reduce(tensor, async_op=True)
    work.wait()
    assert tensor.tolist() == [12.0]
    dist.destroy_process_group()


def test_parameters_and_inference_tensors_are_written_in_place() -> None:
    run(keep_autograd_s_rules, 2, torch=True)


def wait_for_futures(rank: int, size: int) -> None:
    join()
    for _ in range(10):
        works = [dist.all_reduce(on_device(float(rank)), async_op=True) for _ in range(3)]
        halves = [work.get_future().then(lambda done: done.value()[0] / 2) for work in works]
        assert [half.wait().tolist() for half in halves] == [[0.5]] * 3
        gathered = [on_device(0.0) for _ in range(size)]
        (result,) = dist.all_gather(gathered, on_device(float(rank)), async_op=True).get_future().wait()
        assert [tensor.tolist() for tensor in result] == [[0.0], [1.0]]
    dist.destroy_process_group()


def test_the_future_s_value_can_be_used() -> None:
    run(wait_for_futures, 2, torch=True)


def leave_out_a_wait(rank: int, size: int, which: str) -> int:
    join()
    from procgroup.torch_plugin import side_streams, staging

    if which == "ready":
        stand_in.Stream.wait_event = lambda *_: None  # type: ignore[method-assign]
    elif which == "copied":
        staging.wait_on_host = lambda *_: True  # type: ignore[assignment]
    else:
        side_streams.SideStreams.let_current_wait = lambda *_: None  # type: ignore[method-assign, assignment]
    wrong = 0
    for _ in range(20):
        tensor = on_device(1.0)
        dist.all_reduce(tensor)
        wrong += tensor.tolist() != [2.0]
    dist.destroy_process_group()
    return wrong


@pytest.mark.parametrize("which", ["ready", "copied", "back"])
def test_the_stand_in_shows_a_wait_that_is_missing(which: str) -> None:
    assert sum(run(leave_out_a_wait, 2, args=(which,), torch=True)) > 0
