"""Tensors of a device, by way of the host's memory: with a stand-in for the device, and on CUDA where there is one."""

from __future__ import annotations

import importlib.util
import os
import random
import signal
import threading
import time
from datetime import timedelta
from typing import Any

import pytest

import procgroup
from world import attempt, run

pytestmark = [pytest.mark.torch, pytest.mark.timeout(120)]

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
PIECES = [4 << 20, 8]


def join(seconds: float = 30.0, piece_bytes: int = PIECES[0], backend: str = "procgroup") -> None:
    """Initialise with the stand-in, whose streams are late by other times on each rank."""
    from procgroup import torch_plugin
    from procgroup.torch_plugin import host_tensors

    stand_in.register()
    torch_plugin.register()
    host_tensors.PIECE_BYTES = piece_bytes
    dist.init_process_group(backend, timeout=timedelta(seconds=seconds))


def seen(call: Any) -> tuple[str, str, float]:
    """Make a call that must fail; return the kind and text of what it raised, and how long that took."""
    started = time.monotonic()
    try:
        call()
    except Exception as error:
        return type(error).__name__, str(error), time.monotonic() - started
    return "nothing", "", 0.0


def on_device(*values: float) -> Any:
    return stand_in.on_device(torch.tensor(values))


def make_the_calls(rank: int, size: int, kind: str, piece_bytes: int) -> dict[str, str]:
    join(piece_bytes=piece_bytes)
    if kind == "cuda":
        became = calls.make(rank, size, ON_HOST, lambda: torch.device("cuda", 0))
    else:
        became = calls.make(rank, size, ON_HOST | NOT_STANDING_IN, stand_in.NewTensorsOnDevice)
    assert not stand_in.unrecorded
    dist.destroy_process_group()
    return became


@pytest.fixture(scope="module", params=PIECES, ids=["whole", "in pieces"])
def of_ranks(request: pytest.FixtureRequest) -> list[dict[str, str]]:
    return run(make_the_calls, 3, args=("stand-in", request.param), timeout=100, torch=True)


@pytest.mark.parametrize("name", [name for name in NAMES if name not in ON_HOST | NOT_STANDING_IN])
def test_a_pytorch_program_on_a_stand_in_device(of_ranks: list[dict[str, str]], name: str) -> None:
    calls.require_success(name, of_ranks)


@pytest.mark.skipif(not HAS_CUDA, reason="there is no CUDA device here; the tests of the stand-in device ran")
@pytest.mark.parametrize("piece_bytes", PIECES, ids=["whole", "in pieces"])
def test_a_pytorch_program_on_cuda(piece_bytes: int) -> None:
    of_ranks = run(make_the_calls, 3, args=("cuda", piece_bytes), timeout=100, torch=True)
    for name in (name for name in NAMES if name not in ON_HOST):
        calls.require_success(name, of_ranks)


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


def mix(rank: int, size: int, piece_bytes: int) -> None:
    join(piece_bytes=piece_bytes)
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


@pytest.mark.parametrize("piece_bytes", PIECES, ids=["whole", "in pieces"])
@pytest.mark.parametrize("size", [2, 3])
def test_staged_calls_and_calls_on_the_host_keep_one_order(size: int, piece_bytes: int) -> None:
    run(mix, size, args=(piece_bytes,), timeout=60, torch=True)


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
    assert not stand_in.unrecorded
    dist.destroy_process_group()


def receive_into_a_tensor_in_use(rank: int, size: int) -> None:
    """What was received comes after what the program has given the device to do with the tensor before."""
    join()
    if rank == 0:
        dist.send(on_device(1.0, 2.0), 1)
    else:
        may_go_on = threading.Event()
        stand_in.current_stream().give(lambda: may_go_on.wait(20))
        tensor = on_device(5.0, 6.0)
        work = dist.irecv(tensor, 0)
        while not work.is_completed():
            time.sleep(0.001)
        time.sleep(20 * stand_in.LATEST)  # a copy that does not wait is over by now
        may_go_on.set()
        work.wait()
        assert tensor.tolist() == [1.0, 2.0]
    dist.destroy_process_group()


def test_what_is_received_waits_for_what_the_device_still_does_with_its_tensor() -> None:
    run(receive_into_a_tensor_in_use, 2, torch=True)


def test_results_can_be_used_on_the_stream_that_is_current_at_the_wait() -> None:
    run(use_streams, 2, torch=True)


def receive_before_anything_is_copied_in(rank: int, size: int) -> list[float]:
    join(piece_bytes=8)
    from procgroup.torch_plugin.side_streams import SideStreams

    one_is_out = threading.Event()
    copy = SideStreams.copy

    def late(self: SideStreams, pairs: Any, stream: Any) -> None:
        if stream is self.into and rank == 0:
            stream.give(lambda: one_is_out.wait(10))
        copy(self, pairs, stream)
        if stream is self.out:
            stream.give(one_is_out.set)
            stream.give(lambda: time.sleep(0.05))

    SideStreams.copy = late  # type: ignore[method-assign]
    turned = stand_in.on_device(torch.arange(6.0).reshape(2, 3) + 10 * rank).t()
    dist.broadcast(turned, 1)
    found: list[float] = turned.flatten().tolist()
    assert not stand_in.unrecorded
    dist.destroy_process_group()
    return found


def test_what_a_strided_tensor_held_never_comes_after_what_it_receives_in_pieces() -> None:
    assert run(receive_before_anything_is_copied_in, 2, torch=True) == [[10.0, 13.0, 11.0, 14.0, 12.0, 15.0]] * 2


def overlap(rank: int, size: int) -> float:
    """Copy the last piece in only when the first one is out: without overlap this would never end."""
    join(piece_bytes=64)
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
    assert max(run(overlap, 2, torch=True)) < 10.0


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


def refuse(rank: int, size: int) -> list[tuple[str, str, float]]:
    join()
    elsewhere = on_device(1.0)
    elsewhere.index = 1
    found = [
        seen(lambda: dist.all_gather([on_device(0.0), elsewhere], on_device(1.0))),
        seen(lambda: dist.all_gather([torch.zeros(1), torch.zeros(1)], on_device(1.0))),
        seen(lambda: dist.all_to_all([on_device(0.0)] * size, [torch.zeros(1), on_device(1.0)])),
        seen(lambda: dist.all_reduce(torch.ones(1, device="meta"))),
        seen(lambda: dist.all_gather([on_device(0.0)], on_device(1.0))),
    ]
    tensor = on_device(1.0)
    dist.all_reduce(tensor)  # nothing was sent: the ranks are in step
    assert tensor.tolist() == [2.0]
    dist.destroy_process_group()
    return found


def test_tensors_of_several_devices_are_refused_before_anything_is_sent() -> None:
    for found in run(refuse, 2, torch=True):
        for kind, text, _ in found[:3]:
            assert kind == "ArgumentError", text
            assert "lie on several devices: " in text
        assert found[3][0] == "DistBackendError"
        assert found[4][0] == "ValueError", found[4]


def disagree(rank: int, size: int, piece_bytes: int) -> dict[str, Any]:
    join(piece_bytes=piece_bytes)
    groups = [dist.new_group() for _ in range(4)]
    # Nearly as long: in pieces of 2 the ranks differ in the second one only.
    nearly = stand_in.on_device(torch.ones(40 + rank))
    tensor = stand_in.on_device(torch.ones(40 * (rank + 1)))
    found = {
        "nearly": seen(lambda: dist.all_reduce(nearly, group=groups[3])),
        "blocking": seen(lambda: dist.all_reduce(tensor, group=groups[0])),
        "asynchronous": seen(lambda: dist.all_reduce(tensor, group=groups[1], async_op=True).wait()),
        "future": seen(lambda: dist.all_reduce(tensor, group=groups[2], async_op=True).get_future().wait()),
        "later": seen(lambda: dist.all_reduce(on_device(1.0), group=groups[0])),
    }
    assert tensor.eq(1).all() and nearly.eq(1).all()
    return found


@pytest.mark.parametrize("piece_bytes", PIECES, ids=["whole", "in pieces"])
def test_a_mismatch_is_told_on_every_rank_and_nothing_is_written(piece_bytes: int) -> None:
    for found in run(disagree, 3, args=(piece_bytes,), torch=True):
        assert found["blocking"][0] == found["asynchronous"][0] == "CollectiveMismatch", found
        assert found["future"][0] == "RuntimeError"
        for way in ("nearly", "blocking", "asynchronous", "future"):
            assert "the ranks made different calls" in found[way][1], found
            assert ("go in pieces; these are the sizes of one" in found[way][1]) == (piece_bytes == PIECES[1])
        assert found["later"][0] == "GroupBroken"


def tell_of_the_first_piece_last(rank: int, size: int) -> tuple[str, str, float]:
    join(piece_bytes=8)
    from procgroup.torch_plugin.work import TorchWork

    tell, held = TorchWork.on_completion, []
    store = dist.group.WORLD.get_group_store()

    def hold(self: Any, callback: Any) -> None:
        if held:
            tell(self, callback)
            store.set("two pieces are on their way", "")
        held.append(callback)

    if rank == 0:
        TorchWork.on_completion = hold  # type: ignore[method-assign]
    else:
        store.wait(["two pieces are on their way"])
    tensor = stand_in.on_device(torch.ones(40 * (rank + 1)))
    return seen(lambda: dist.all_reduce(tensor, async_op=True).wait())


def test_what_the_first_piece_that_fails_says_is_told() -> None:
    for kind, text, _ in run(tell_of_the_first_piece_last, 2, torch=True):
        assert kind == "CollectiveMismatch", text


def lose(rank: int, size: int, piece_bytes: int) -> tuple[str, str, float]:
    join(piece_bytes=piece_bytes)
    dist.all_reduce(on_device(1.0))
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    works = [dist.all_reduce(stand_in.on_device(torch.ones(100)), async_op=True) for _ in range(3)]
    found = [seen(work.wait) for work in works]
    assert {kind for kind, _, _ in found[1:]} <= {"GroupBroken", "PeerLost"}, found
    return found[0]


@pytest.mark.parametrize("piece_bytes", PIECES, ids=["whole", "in pieces"])
def test_a_killed_rank_is_named_and_pending_calls_fail(piece_bytes: int) -> None:
    outcomes = attempt(lose, 3, args=(piece_bytes,), torch=True)
    for outcome in (outcomes[0], outcomes[2]):
        assert outcome.error is None, outcome.traceback
        kind, text, took = outcome.value
        assert kind == "PeerLost" and "lost rank 1" in text, outcome.value
        assert took < 5.0


def hang_on_device(rank: int, size: int, how: str) -> dict[str, Any]:
    """Let the device of rank 0 hang: what it is to copy for a call is never there."""
    join(2.0 if how == "deadline" else 30.0)
    if rank == 0:
        stuck = stand_in.Event()
        stuck.record(stream := stand_in.Stream())
        stream.give(lambda: time.sleep(600))
        stuck.record(stream)
        stand_in.current_stream().wait_event(stuck)
    tensor = on_device(1.0)
    work = dist.all_reduce(tensor, async_op=True)
    if rank == 0 and how == "abort":
        time.sleep(0.3)
        dist.group.WORLD.abort()
    return {"staged": seen(work.wait), "behind": seen(lambda: dist.all_reduce(torch.ones(1)))}


@pytest.mark.parametrize("how", ["deadline", "abort"])
def test_a_device_that_hangs_ends_the_group_at_the_deadline_or_by_abort(how: str) -> None:
    first, second = run(hang_on_device, 2, args=(how,), torch=True)
    assert first["staged"][2] < 10.0 and second["staged"][2] < 10.0
    assert first["staged"][0] == ("DistBackendError" if how == "deadline" else "GroupBroken"), first
    assert how != "deadline" or "the device did not copy its tensors by the call's deadline" in first["staged"][1]
    assert second["staged"][0] in ("PeerFailed", "PeerLost"), second  # over TCP it hears of it when rank 0 leaves
    assert first["behind"][0] == second["behind"][0] == "GroupBroken", (first, second)


def wait_briefly(rank: int, size: int) -> None:
    join()
    store = dist.group.WORLD.get_group_store()
    if rank == 1:
        store.wait(["rank 0 has waited in vain"])
    work = dist.all_reduce(on_device(1.0), async_op=True)
    if rank == 0:
        with pytest.raises(procgroup.errors.WaitTimeout):
            work.wait(timedelta(seconds=0.05))
        assert not work.is_completed() and not work.is_success() and work.exception() is None
        with pytest.raises(RuntimeError, match="not over yet"):
            work.result()
        store.set("rank 0 has waited in vain", "")
    assert work.wait() and work.is_success()
    dist.destroy_process_group()


def test_a_wait_with_a_timeout_ends_and_the_call_goes_on() -> None:
    run(wait_briefly, 2, torch=True)


def end(rank: int, size: int, how: str) -> None:
    join()
    dist.all_reduce(on_device(1.0))
    work = dist.all_reduce(on_device(1.0), async_op=True)
    if how == "destroy":
        dist.destroy_process_group()
        work.wait()
    if how == "fork":
        if os.fork() == 0:
            for call in (work.wait, lambda: dist.all_reduce(on_device(1.0))):
                assert seen(call)[0] == "ForkedProcessError"
            print("refused in the child", flush=True)
            os._exit(0)
        os.wait()
        work.wait()


@pytest.mark.parametrize("how", ["in flight", "destroy", "fork"])
def test_a_program_ends_in_silence_with_a_staged_call_in_flight(how: str) -> None:
    for outcome in attempt(end, 2, args=(how,), torch=True):
        assert outcome.ok, outcome.traceback
        assert outcome.output == ("refused in the child\n" if how == "fork" else "")


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
