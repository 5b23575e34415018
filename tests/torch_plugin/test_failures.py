"""What a PyTorch program on backend "procgroup" sees when ranks disagree, are late, or are lost."""

from __future__ import annotations

import os
import random
import signal
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

import procgroup
from waiting import wait_until, wait_until_in_a_call
from world import Outcome, attempt, run, start, without_reports

pytestmark = pytest.mark.torch

SIZE = 3


def join(seconds: float = 30.0) -> Any:
    import torch.distributed as dist

    from procgroup import torch_plugin

    torch_plugin.register()
    dist.init_process_group("procgroup", timeout=timedelta(seconds=seconds))
    return dist


def seen(call: Any) -> dict[str, str]:
    """Make a call that must fail; return what it raised and how long that took."""
    started = time.monotonic()
    try:
        call()
    except RuntimeError as error:
        took = time.monotonic() - started
        return {"kind": type(error).__name__, "text": str(error), "took": f"{took:.3f}"}
    return {"kind": "nothing", "text": "", "took": ""}


def disagree(rank: int, size: int) -> dict[str, dict[str, str]]:
    import torch

    dist = join()
    from torch.distributed import _functional_collectives as functional

    world = dist.group.WORLD
    groups = [dist.new_group() for _ in range(5)]  # a group that failed stays failed
    tensor = torch.ones(2 + rank)

    def seen_by_all(call: Any) -> dict[str, str]:
        """Make the call when all ranks have come: it tells of those that come within a second."""
        dist.barrier(group=groups[4])
        return seen(call)

    dist.barrier(group=groups[4])
    failed = dist.all_reduce(tensor, group=groups[3], async_op=True)
    seen(failed.wait)
    found = {
        "blocking": seen_by_all(lambda: dist.all_reduce(tensor)),
        "asynchronous": seen_by_all(lambda: dist.all_reduce(tensor, group=groups[0], async_op=True).wait()),
        "future": seen_by_all(lambda: dist.all_reduce(tensor, group=groups[1], async_op=True).get_future().wait()),
        "result": seen(failed.result),
        "functional": seen_by_all(lambda: functional.all_reduce(tensor, "sum", groups[2]) + 0),
        "later": seen(lambda: dist.all_reduce(torch.ones(1))),
    }
    assert tensor.eq(1).all()
    assert world.group.is_usable()
    return found


def test_a_mismatch_is_told_on_every_rank_whichever_way_the_call_was_made() -> None:
    for outcome in attempt(disagree, SIZE, torch=True):
        assert outcome.error is None, outcome.traceback
        found = outcome.value
        for way in ("blocking", "asynchronous", "result", "functional"):
            assert found[way]["kind"] == "CollectiveMismatch", (way, found[way])
        assert found["future"]["kind"] == "RuntimeError"  # torch keeps the text of what a callback raised
        for way in ("blocking", "asynchronous", "result", "future", "functional"):
            assert "the ranks made different calls" in found[way]["text"], (way, found[way])
            assert all(f"all_reduce(SUM) of {count} float32" in found[way]["text"] for count in (2, 3, 4))
        assert found["later"]["kind"] == "GroupBroken"


def lose(rank: int, size: int, moment: str) -> dict[str, str]:
    import torch

    join()
    from torch.nn.parallel import DistributedDataParallel

    model = DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(300, 300), torch.nn.Linear(300, 2)))

    def step() -> None:
        model(torch.ones(3, 300)).sum().backward()

    step()
    if rank == 1 and moment == "before":
        os.kill(os.getpid(), signal.SIGKILL)
    if rank == 1 and moment == "backward":
        model.module[0].weight.register_hook(lambda _: os.kill(os.getpid(), signal.SIGKILL))
    return seen(step)


@pytest.mark.parametrize("moment", ["before", "backward"])
def test_stock_ddp_names_a_rank_that_is_killed(moment: str) -> None:
    outcomes = attempt(lose, SIZE, args=(moment,), torch=True)
    assert outcomes[1].exit_code == -signal.SIGKILL
    for outcome in (outcomes[0], outcomes[2]):
        assert outcome.error is None, outcome.traceback
        assert "lost rank 1" in outcome.value["text"], outcome.value
        assert "its process ended" in outcome.value["text"]
        assert float(outcome.value["took"]) < 15.0, "half of the timeout"


def wait_in_vain(rank: int, size: int, form: str) -> dict[str, str]:
    dist = join()
    store = dist.group.WORLD.get_group_store()
    if rank == 1:
        store.wait(["rank 0 has given up", "rank 2 has given up"])
        return {}
    import torch.distributed as torch_dist

    options = torch_dist.BarrierOptions()
    options.timeout = timedelta(seconds=1)
    options.asyncOp = False
    given = {"opts": options} if form == "options" else {"timeout": timedelta(seconds=1)}
    found = seen(lambda: dist.group.WORLD.barrier(**given).wait())
    store.set(f"rank {rank} has given up", "")
    return found


@pytest.mark.parametrize("form", ["options", "argument"])
def test_a_timeout_of_a_call_is_kept_and_names_who_is_late(form: str) -> None:
    outcomes = attempt(wait_in_vain, SIZE, args=(form,), torch=True)
    found = [outcomes[0].value, outcomes[2].value]
    kinds = {entry["kind"] for entry in found}
    assert kinds <= {"CollectiveTimeout", "PeerFailed"} and "CollectiveTimeout" in kinds, found
    assert all("rank 1" in entry["text"] and float(entry["took"]) < 10.0 for entry in found), found
    # One that came later than the other is notified by it before its own second has passed.
    assert all(float(entry["took"]) >= 1.0 for entry in found if entry["kind"] == "CollectiveTimeout"), found


def never_come(rank: int, size: int, meeting_place: str) -> None:
    from procgroup import torch_plugin

    if rank != 1:
        torch_plugin.register()
        import torch.distributed as dist

        Path(f"{meeting_place}.{rank}").touch()
        wait_until(Path(f"{meeting_place}.{2 - rank}").exists, otherwise="the other rank has not come")
        limit = timedelta(seconds=2)
        dist.init_process_group("procgroup", f"file://{meeting_place}", limit, size, rank)


def test_ranks_that_never_come_are_named_at_the_start(tmp_path: Path) -> None:
    outcomes = attempt(never_come, SIZE, args=(str(tmp_path / "meet"),), torch=True)
    for outcome in (outcomes[0], outcomes[2]):
        assert isinstance(outcome.error, procgroup.RendezvousTimeout), outcome.traceback
        assert isinstance(outcome.error, RuntimeError)
        assert outcome.error.missing == (1,)
        assert "still missing rank 1 of 3" in str(outcome.error)


def come_late_to_a_group(rank: int, size: int) -> dict[str, str]:
    dist = join()
    store = dist.group.WORLD.get_group_store()
    if rank != 0:
        store.wait(["rank 0 has given up"])
        return {}
    found = seen(lambda: dist.new_group([0, 1], timeout=timedelta(seconds=1)))
    store.set("rank 0 has given up", "")
    return found


def test_a_member_that_does_not_come_to_a_new_group_is_named() -> None:
    found = attempt(come_late_to_a_group, SIZE, torch=True)[0].value
    assert found["kind"] == "CollectiveTimeout", found
    assert "still waiting for rank 1" in found["text"]


def end(rank: int, size: int, how: str) -> None:
    import torch

    dist = join()
    work = dist.all_reduce(torch.ones(1000), async_op=True)
    if how == "wait":
        work.wait()
    if how == "fork":
        if (child := os.fork()) == 0:
            try:
                dist.all_reduce(torch.ones(1))
            except procgroup.ForkedProcessError:
                print("refused in the child", flush=True)
            os._exit(0)
        os.waitpid(child, 0)
    if how == "twice":
        work.wait()
        dist.destroy_process_group()
        join()
        dist.all_reduce(torch.ones(1))
        dist.destroy_process_group()


@pytest.mark.parametrize("how", ["wait", "in flight", "fork", "twice"])
def test_a_program_that_ends_without_destroying_the_group_ends_in_silence(how: str) -> None:
    for outcome in attempt(end, SIZE, args=(how,), torch=True):
        assert outcome.ok, outcome.traceback
        assert without_reports(outcome.output) == ("refused in the child\n" if how == "fork" else "")


def initialise_again_and_again(rank: int, size: int) -> None:
    import torch

    pauses = random.Random(rank)
    for _ in range(8):
        dist = join()
        total = torch.ones(1)
        dist.all_reduce(total)
        assert total.item() == size
        dist.destroy_process_group()
        time.sleep(pauses.choice([0, 0, 0.01]))


def test_ranks_that_are_quicker_to_initialise_again_find_the_store() -> None:
    for outcome in attempt(initialise_again_and_again, SIZE, torch=True):
        assert outcome.ok, outcome.traceback


def hang(rank: int, size: int) -> None:
    import torch

    dist = join()
    print("ready", flush=True)
    if rank != 1:
        dist.all_reduce(torch.ones(1))
    else:
        time.sleep(60)


def test_ctrl_c_ends_a_blocking_call() -> None:
    with start(hang, SIZE, torch=True) as world:
        for rank in range(SIZE):
            world.wait_for_output(rank, "ready")
        wait_until_in_a_call([world.pids[0], world.pids[2]])
        world.kill(0, signal.SIGINT)
        wait_until(lambda: not world.is_alive(0), otherwise="rank 0 goes on after Ctrl-C")
        world.kill(1)
        outcomes: list[Outcome] = world.wait()
    assert isinstance(outcomes[0].error, KeyboardInterrupt)
    assert isinstance(outcomes[2].error, procgroup.DistError)


def use_groups_in_a_child(rank: int, size: int) -> list[str]:
    import torch

    dist = join()
    other = dist.new_group()
    if rank == 0:
        work = dist.irecv(torch.ones(1), 1)
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            calls = [
                lambda: dist.all_reduce(torch.ones(1)),
                lambda: dist.barrier(group=other),
                dist.new_group,
                work.wait,
                work.get_future().wait,
            ]
            os.write(writing, "|".join(seen(call)["text"] for call in calls).encode())
            dist.destroy_process_group()
            os._exit(7 if work.is_completed() else 8)
        os.close(writing)
        found = os.fdopen(reading).read().split("|")
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        assert not work.is_completed()
    dist.barrier(group=other)
    if rank == 1:
        dist.send(torch.ones(1), 0)
    elif rank == 0:
        work.wait()
    dist.all_reduce(torch.ones(1))
    return found if rank == 0 else []


def test_a_forked_child_is_refused_at_once_whatever_it_calls_and_its_parent_goes_on() -> None:
    found = run(use_groups_in_a_child, SIZE, torch=True)[0]
    assert len(found) == 5 and all("cannot be used in a forked child" in text for text in found), found


def abort(rank: int, size: int) -> dict[str, str]:
    import torch

    dist = join()
    store = dist.group.WORLD.get_group_store()
    if rank == 1:
        wait_until_in_a_call([int(store.get(f"pid of rank {other}")) for other in (0, 2)])
        dist.group.WORLD.abort()
        dist.group.WORLD.abort()
        return {}
    store.set(f"pid of rank {rank}", str(os.getpid()))
    return seen(lambda: dist.all_reduce(torch.ones(1)))


def outlive_the_default_group(rank: int, size: int) -> list[bool]:
    dist = join()
    groups = [dist.new_group([0, 1]), dist.group.WORLD.split_group([0, 1])]
    dist.group.WORLD.shutdown()
    return [group.group.is_usable() for group in groups]


def test_groups_of_some_ranks_end_with_the_default_group() -> None:
    assert run(outlive_the_default_group, 2, torch=True) == [[False, False]] * 2


def test_abort_on_one_rank_ends_the_calls_of_the_others() -> None:
    outcomes = attempt(abort, SIZE, torch=True)
    for outcome in (outcomes[0], outcomes[2]):
        assert outcome.error is None, outcome.traceback
        assert "rank 1" in outcome.value["text"]
        assert float(outcome.value["took"]) < 15.0, "half of the timeout"


def wait_for_each_other_after_a_step(rank: int, size: int) -> str:
    import torch

    dist = join(60)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))
    store = dist.group.WORLD.get_group_store()
    if rank == 1:
        wait_until_in_a_call([int(store.get("pid of rank 0"))])
    else:
        store.set("pid of rank 0", str(os.getpid()))
    model(torch.ones(1, 2)).sum().backward()
    return seen(lambda: dist.recv(torch.ones(1), 1 - rank))["kind"]


def test_a_deadlock_is_found_also_after_a_step_of_stock_ddp() -> None:
    assert run(wait_for_each_other_after_a_step, 2) == ["Deadlock", "Deadlock"]
