"""Calls with tensors of a device that are refused, fail, wait in vain, or are under way when the program ends."""

from __future__ import annotations

import importlib.util
import os
import signal
import time
from datetime import timedelta
from typing import Any

import pytest
from torch_plugin.stand_in_world import CHUNKS, join, on_device

import procgroup
from world import attempt, run, without_reports

pytestmark = pytest.mark.torch

if importlib.util.find_spec("torch") is not None:
    import torch
    import torch.distributed as dist
    from torch_plugin import stand_in


def seen(call: Any) -> tuple[str, str, float]:
    """Make a call that must fail; return the kind and text of what it raised, and how long that took."""
    started = time.monotonic()
    try:
        call()
    except Exception as error:
        return type(error).__name__, str(error), time.monotonic() - started
    return "nothing", "", 0.0


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
            assert "are on several devices: " in text
        assert found[3][0] == "DistBackendError"
        assert found[4][0] == "ValueError", found[4]


def disagree(rank: int, size: int, chunk_bytes: int) -> dict[str, Any]:
    join(chunk_bytes=chunk_bytes)
    groups = [dist.new_group() for _ in range(4)]
    # Nearly as long: in chunks of 2 the ranks differ in the second one only.
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


@pytest.mark.parametrize("chunk_bytes", CHUNKS, ids=["whole", "in chunks"])
def test_a_mismatch_is_told_on_every_rank_and_nothing_is_written(chunk_bytes: int) -> None:
    for found in run(disagree, 3, args=(chunk_bytes,), torch=True):
        assert found["blocking"][0] == found["asynchronous"][0] == "CollectiveMismatch", found
        assert found["future"][0] == "RuntimeError"
        for way in ("nearly", "blocking", "asynchronous", "future"):
            assert "the ranks made different calls" in found[way][1], found
            assert ("are sent in chunks; these are the sizes of one" in found[way][1]) == (chunk_bytes == CHUNKS[1])
        assert found["later"][0] == "GroupBroken"


def tell_of_the_first_piece_last(rank: int, size: int) -> tuple[str, str, float]:
    join(chunk_bytes=8)
    from procgroup.torch_plugin.work import TorchWork

    tell, held = TorchWork.on_completion, []
    store = dist.group.WORLD.get_group_store()

    def hold(self: Any, callback: Any) -> None:
        if held:
            tell(self, callback)
            store.set("two chunks are in flight", "")
        held.append(callback)

    if rank == 0:
        TorchWork.on_completion = hold  # type: ignore[method-assign]
    else:
        store.wait(["two chunks are in flight"])
    tensor = stand_in.on_device(torch.ones(40 * (rank + 1)))
    return seen(lambda: dist.all_reduce(tensor, async_op=True).wait())


def test_what_the_first_piece_that_fails_says_is_told() -> None:
    for kind, text, _ in run(tell_of_the_first_piece_last, 2, torch=True):
        assert kind == "CollectiveMismatch", text


def lose(rank: int, size: int, chunk_bytes: int) -> tuple[str, str, float]:
    join(chunk_bytes=chunk_bytes)
    dist.all_reduce(on_device(1.0))
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    works = [dist.all_reduce(stand_in.on_device(torch.ones(100)), async_op=True) for _ in range(3)]
    found = [seen(work.wait) for work in works]
    assert {kind for kind, _, _ in found[1:]} <= {"GroupBroken", "PeerLost"}, found
    return found[0]


@pytest.mark.parametrize("chunk_bytes", CHUNKS, ids=["whole", "in chunks"])
def test_a_killed_rank_is_named_and_pending_calls_fail(chunk_bytes: int) -> None:
    outcomes = attempt(lose, 3, args=(chunk_bytes,), torch=True)
    for outcome in (outcomes[0], outcomes[2]):
        assert outcome.error is None, outcome.traceback
        kind, text, took = outcome.value
        assert kind == "PeerLost" and "lost rank 1" in text, outcome.value
        assert took < 15.0, "half of the timeout"


def hang_on_device(rank: int, size: int, how: str) -> dict[str, Any]:
    """Let the device of rank 0 hang: what it is to copy for a call is never there."""
    join()
    if rank == 0 and how == "deadline":
        dist.group.WORLD.set_timeout(timedelta(seconds=2))
    if rank == 0:
        stuck = stand_in.Event()
        stuck.record(stream := stand_in.Stream())
        stream.give(lambda: time.sleep(600))
        stuck.record(stream)
        stand_in.current_stream().wait_event(stuck)
    tensor = on_device(1.0)
    work = dist.all_reduce(tensor, async_op=True)
    if rank == 0 and how == "abort":
        time.sleep(0.1)  # most likely it waits for the device by then; both are right
        dist.group.WORLD.abort()
    return {"staged": seen(work.wait), "behind": seen(lambda: dist.all_reduce(torch.ones(1)))}


@pytest.mark.parametrize("how", ["deadline", "abort"])
def test_a_device_that_hangs_ends_the_group_at_the_deadline_or_by_abort(how: str) -> None:
    first, second = run(hang_on_device, 2, args=(how,), torch=True)
    assert first["staged"][2] < 20.0 and second["staged"][2] < 20.0
    assert first["staged"][0] == ("DistBackendError" if how == "deadline" else "GroupBroken"), first
    assert how != "deadline" or "the device did not copy its tensors by the call's deadline" in first["staged"][1]
    assert second["staged"][0] in ("PeerFailed", "PeerLost"), second  # over TCP it learns that when rank 0 leaves
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
        with pytest.raises(RuntimeError, match="not completed"):
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
        assert without_reports(outcome.output) == ("refused in the child\n" if how == "fork" else "")
