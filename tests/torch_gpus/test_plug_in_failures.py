"""Calls of the plug-in on GPUs that are refused, that fail, or that wait in vain."""

from __future__ import annotations

import importlib.util
import os
import re
import signal
import time
from datetime import timedelta
from typing import Any

import pytest
from torch_gpus.plug_in_world import GPUS, begin, seen

from world import attempt, run, start, without_reports

pytestmark = pytest.mark.torch
if importlib.util.find_spec("torch") is not None:
    import torch

Seen = tuple[str, str, float]


def refuse(rank: int, size: int) -> list[Seen]:
    dist = begin(rank)
    on_gpu = torch.ones(4, device="cuda")
    found = [
        seen(lambda: dist.all_gather([torch.zeros(4, device="cuda"), torch.zeros(4)], on_gpu)),
        seen(lambda: dist.all_gather([torch.zeros(4), torch.zeros(4)], on_gpu)),
        seen(lambda: dist.all_reduce(torch.ones(4, 4, device="cuda")[:, ::2])),
        seen(lambda: dist.all_reduce(torch.ones(1, device="meta"))),
        seen(lambda: dist.all_reduce(torch.eye(2, device="cuda").to_sparse_csr())),
    ]
    dist.all_reduce(on_gpu)  # nothing was sent: the ranks are in step
    assert on_gpu.tolist() == [2.0] * 4
    dist.destroy_process_group()
    return found


def test_what_cannot_be_moved_is_refused_before_anything_is_sent() -> None:
    for apart, elsewhere, strided, meta, sparse in run(refuse, 2, torch="gpus", environment=GPUS):
        assert apart[0] == elsewhere[0] == "ArgumentError", (apart, elsewhere)
        assert strided[0] == "ArgumentError" and "is not contiguous" in strided[1]
        assert meta[0] == "DistBackendError" and "It has no elements" in meta[1]
        assert sparse[0] == "TypeError" and "layout" in sparse[1]


def disagree(rank: int, size: int, what: str) -> dict[str, Seen]:
    dist = begin(rank)
    first = torch.ones(4, device="cuda")
    dist.all_reduce(first)  # connects the ranks
    if what == "order":
        tensor = torch.ones(2, 3, device="cuda")
        tensor = tensor.t().contiguous().t() if rank == 1 else tensor
    else:
        tensor = torch.ones(4 + rank, device="cuda")
    found = {"wait": seen(lambda: dist.all_reduce(tensor, async_op=True).wait())}
    found["later"] = seen(lambda: dist.all_reduce(first))
    return found


@pytest.mark.parametrize("what", ["size", "order"])
def test_a_mismatch_is_told_on_every_rank(what: str) -> None:
    for found in run(disagree, 3, args=(what,), torch="gpus", environment=GPUS):
        assert found["wait"][0] == "CollectiveMismatch" and "the ranks made different calls" in found["wait"][1], found
        assert found["later"][0] == "GroupBroken"


def disagree_in_ddp(rank: int, size: int) -> Seen:
    dist = begin(rank)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4).cuda(), device_ids=[rank])
    model(torch.ones(2, 4)).sum().backward()
    calls = [lambda: model(torch.ones(2, 4)).sum().backward() for _ in range(2)]
    if rank == 1:
        calls.insert(0, lambda: dist.all_reduce(torch.ones(7, device="cuda")))  # which the other does not make
    return next(found for found in map(seen, calls) if found[0] != "nothing")


def test_a_call_beside_stock_ddp_is_named() -> None:
    for found in run(disagree_in_ddp, 2, torch="gpus", environment=GPUS):
        assert "the ranks made different calls" in found[1], found
        assert "all_reduce(SUM) of 7 float32" in found[1]


def lose(rank: int, size: int) -> Seen:
    dist = begin(rank)
    tensor = torch.ones(100, device="cuda")
    dist.all_reduce(tensor)
    dist.barrier()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)

    def call_twice() -> None:  # also the second call may raise what has become of the first
        for work in [dist.all_reduce(tensor, async_op=True) for _ in range(2)]:
            work.wait()

    return seen(call_twice)


def test_a_killed_rank_is_named() -> None:
    outcomes = attempt(lose, 3, torch="gpus", environment=GPUS)
    for outcome in (outcomes[0], outcomes[2]):
        assert outcome.error is None, outcome.traceback
        kind, text, took = outcome.value
        assert kind == "PeerLost" and "lost rank 1" in text, outcome.value
        assert took < 15.0, "half of the timeout"


def leave_others_alone(rank: int, size: int, destroys: bool) -> Seen | None:
    """Rank 1 does not come to a backward of stock DDP; that of the others returns, because their hosts do not wait."""
    dist = begin(rank)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4).cuda(), device_ids=[rank])
    for _ in range(2):  # the second one forms the buckets anew
        model(torch.ones(2, 4)).sum().backward()
    dist.group.WORLD.set_timeout(timedelta(seconds=1))
    if rank == 1:
        time.sleep(60)
    model(torch.ones(2, 4)).sum().backward()
    return seen(dist.destroy_process_group) if destroys else None


@pytest.mark.parametrize("destroys", [True, False])
def test_a_failure_that_nobody_has_waited_for_is_told_at_the_end(destroys: bool) -> None:
    with start(leave_others_alone, 3, args=(destroys,), torch="gpus", environment=GPUS) as world:
        world.wait_for_end([0, 2], 60)
        for outcome in (world.outcomes()[0], world.outcomes()[2]):
            assert outcome.error is None, outcome.traceback
            text = outcome.value[1] if destroys else outcome.output
            assert re.search("all_reduce.*(its time limit of 1 s passed|not complete after 1 s)", text), text
            assert destroys or "ERROR: no call has raised this" in text


def end(rank: int, size: int, how: str) -> None:
    dist = begin(rank)
    tensor = torch.ones(4, device="cuda")
    dist.all_reduce(tensor)
    work = dist.all_reduce(tensor, async_op=True)
    future = work.get_future()
    if how == "destroy":
        dist.destroy_process_group()
        work.wait()
        assert future.wait()[0].tolist() == [4.0] * 4
    if how == "fork":
        if os.fork() == 0:
            for call in (work.wait, lambda: dist.all_reduce(tensor)):
                assert seen(call)[0] == "ForkedProcessError"
            print("refused in the child", flush=True)
            os._exit(0)
        os.wait()
        work.wait()


@pytest.mark.parametrize("how", ["in flight", "destroy", "fork"])
def test_a_program_ends_in_silence_with_a_call_in_flight(how: str) -> None:
    for outcome in attempt(end, 2, args=(how,), torch="gpus", environment=GPUS):
        assert outcome.ok, outcome.traceback
        assert without_reports(outcome.output) == ("refused in the child\n" if how == "fork" else "")


def share_a_gpu(rank: int, size: int) -> Any:
    dist = begin(0)  # both
    found = seen(lambda: dist.all_reduce(torch.ones(1, device="cuda")))
    store = dist.distributed_c10d._get_default_store()
    if rank == 1:
        store.set("seen by 1", "")
    else:  # with it the store ends, by which they find out
        store.wait(["seen by 1"])
    return found


def test_ranks_that_share_a_gpu_are_told_what_to_do() -> None:
    for kind, text, _ in run(share_a_gpu, 2, torch="gpus", environment=GPUS):
        assert kind in ("DistBackendError", "GroupBroken", "PeerFailed"), text
        assert "NCCL needs a GPU for each rank" in text
