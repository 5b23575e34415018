"""``with rank_first():`` - who runs the block when, and what the others learn when it does not end well."""

from __future__ import annotations

import os
import signal
import threading
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from failures.waiting_calls import TRANSPORTS, allowance, on

import procgroup as dist
from procgroup.testing import RanksFailed, run_ranks
from world import placed, run, start, wait_until

transports = pytest.mark.parametrize("transport", TRANSPORTS)


@transports
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_the_others_run_the_block_after_the_first_rank(size: int, transport: str) -> None:
    prepared: list[int] = []

    def prepare(first: int) -> int:
        with dist.rank_first(first):
            if dist.get_rank() == first:
                time.sleep(0.05)  # most often the others have come by then
                prepared.append(first)
            return len(prepared)

    for first in range(size):
        assert run_ranks(prepare, size, first, **placed(transport, size)) == [first + 1] * size


def test_the_first_rank_is_the_groups_first_and_can_be_named_in_two_ways() -> None:
    order: list[tuple[str, int]] = []

    def prepare() -> None:
        rank = dist.get_rank()
        mine, _ = dist.new_subgroups(2)
        for name, how in {"default": {}, "global": {"rank": rank | 1}, "group": {"group_rank": 1}}.items():
            with dist.rank_first(group=mine, **how):
                order.append((name, rank))
        dist.barrier()

    run_ranks(prepare, 4)
    for name, firsts in {"default": (0, 2), "global": (1, 3), "group": (1, 3)}.items():
        ranks = [rank for called, rank in order if called == name]
        for first in firsts:
            assert ranks.index(first) < ranks.index(first ^ 1), name


def test_a_rank_that_is_not_in_the_group_runs_the_block_after_a_warning() -> None:
    def prepare() -> bool:
        made = dist.new_group([0])
        if dist.get_rank() == 0:
            with dist.rank_first(group=made):
                return True
        with pytest.warns(UserWarning, match="Running rank_first on global rank 1"), dist.rank_first(group=made):
            return True

    assert run_ranks(prepare, 2) == [True, True]


@pytest.mark.parametrize("how", [{"rank": 2}, {"group_rank": 2}, {"rank": 0, "group_rank": 0}])
def test_a_rank_that_is_not_there_is_refused(how: Any) -> None:
    def prepare() -> None:
        with pytest.raises(ValueError, match="rank"):
            dist.rank_first(**how).__enter__()

    run_ranks(prepare, 2)


def test_the_wait_has_no_deadline_while_the_first_rank_lives() -> None:
    def prepare() -> None:
        assert dist.group.WORLD is not None
        dist.group.WORLD.set_timeout(0.3)
        with dist.timeout(0.3), dist.rank_first():
            if dist.get_rank() == 0:
                time.sleep(1)
        dist.barrier()

    run_ranks(prepare, 3)


@pytest.mark.parametrize("where", ["argument", "context", "group"])
def test_the_first_rank_names_those_that_have_not_come_at_its_deadline(where: str) -> None:
    has_ended = threading.Event()

    def prepare() -> Any:
        assert dist.group.WORLD is not None
        if where == "group":
            dist.group.WORLD.set_timeout(0.2)
        if dist.get_rank():
            return has_ended.wait(20)
        block = dist.timeout(0.2) if where == "context" else nullcontext()
        with pytest.raises(dist.CollectiveTimeout) as caught, block:  # noqa: SIM117 - the error comes from the inner one
            with dist.rank_first(timeout=0.2 if where == "argument" else None):
                pass
        has_ended.set()
        return caught.value.op, caught.value.missing, caught.value.seconds

    assert run_ranks(prepare, 3)[0] == ("rank_first", (1, 2), 0.2)


@transports
def test_an_exception_of_the_first_rank_ends_the_wait_of_the_others(transport: str) -> None:
    def prepare() -> Any:
        try:
            with dist.rank_first():
                if dist.get_rank() == 0:
                    time.sleep(0.1)
                    raise OSError("no space left")
                raise AssertionError("no other rank runs the block")
        except OSError as error:
            with pytest.raises(dist.GroupBroken, match="OSError: no space left"):
                dist.barrier()
            return type(error)
        except dist.PeerFailed as error:
            return error.op, error.peer, error.reason

    first, *others = run_ranks(prepare, 3, **placed(transport, 3))
    assert first is OSError
    for op, peer, reason in others:
        assert (op, peer) == ("rank_first", 0)
        assert reason.startswith("OSError: no space left (test_rank_first.py:")


def test_an_exception_of_another_rank_is_its_own() -> None:
    def prepare() -> bool:
        with pytest.raises(OSError, match="mine") if dist.get_rank() == 1 else dist.timeout(5), dist.rank_first():
            if dist.get_rank() == 1:
                raise OSError("mine")
        dist.barrier()
        return True

    assert run_ranks(prepare, 3) == [True] * 3


def test_an_exception_does_not_end_an_earlier_call_of_a_slower_rank() -> None:
    def prepare() -> Any:
        array = np.ones(1)
        if dist.get_rank() == 1:
            time.sleep(0.3)
        dist.all_reduce(array)
        with pytest.raises(ValueError if dist.get_rank() == 0 else dist.PeerFailed), dist.rank_first():
            raise ValueError("x")
        return array[0]

    assert run_ranks(prepare, 2) == [2, 2]


@pytest.mark.parametrize("call", ["all_reduce", "barrier", "rank_first"])
def test_a_call_of_the_same_group_in_the_block_is_reported(call: str) -> None:
    calls = {"all_reduce": lambda: dist.all_reduce(np.ones(1)), "barrier": dist.barrier}

    def prepare() -> None:
        with dist.rank_first():
            if call == "rank_first":
                with dist.rank_first(1):
                    pass
            else:
                calls[call]()

    with pytest.raises(RanksFailed) as caught:
        run_ranks(prepare, 2)
    for error in caught.value.errors.values():
        assert isinstance(error, dist.CollectiveMismatch)
        assert error.calls[1] == "rank_first(rank 0)"


def call_another_group(rank: int, size: int) -> str:
    dist.init_process_group(timeout=30)
    other = dist.new_group()
    with pytest.raises(dist.Deadlock) as caught, dist.rank_first():
        dist.barrier(other)
    return str(caught.value)


@transports
def test_a_call_of_another_group_in_the_block_is_a_deadlock(transport: str) -> None:
    for text in run(call_another_group, 2, environment=on(transport)):
        assert "rank_first #1, waiting for rank 0" in text and "barrier #1, waiting for rank 1" in text, text


def wait_for_the_first(rank: int, size: int, how: str) -> Any:
    dist.init_process_group(timeout=30)
    try:
        with dist.rank_first():
            print("waiting", flush=True)
            if rank == 0:
                time.sleep(0.3)
                if how == "killed":
                    os.kill(os.getpid(), signal.SIGKILL)
                elif how == "exits":
                    os._exit(3)
                else:
                    raise RuntimeError("cannot prepare")
    except dist.DistError as error:
        return type(error).__name__, getattr(error, "peer", None), str(error)


@transports
@pytest.mark.parametrize("how", ["killed", "exits", "raises"])
def test_the_end_of_the_first_rank_is_reported_by_the_others(transport: str, how: str) -> None:
    started = time.monotonic()
    with start(wait_for_the_first, 3, args=(how,), environment=on(transport)) as world:
        outcomes = world.wait()
    assert time.monotonic() - started < allowance(10)
    for outcome in outcomes[1:]:
        assert outcome.ok, outcome.traceback
        name, peer, text = outcome.value
        assert (name, peer) == ("PeerFailed" if how == "raises" else "PeerLost", 0)
        assert "rank_first #1" in text
        assert how != "raises" or "RuntimeError: cannot prepare" in text


def prepare_a_file(rank: int, size: int, path: Path) -> str:
    dist.init_process_group(timeout=30)
    with dist.rank_first():
        if not path.exists():
            time.sleep(0.2)
            path.write_text(f"by rank {rank}")
        return path.read_text()


@transports
def test_processes_find_what_the_first_rank_has_prepared(transport: str, tmp_path: Path) -> None:
    found = run(prepare_a_file, 3, args=(tmp_path / "prepared",), environment=on(transport))
    assert found == ["by rank 0"] * 3


def wait_for_a_report(rank: int, size: int, has_reported: Path) -> None:
    dist.init_process_group(timeout=30)
    with dist.rank_first():
        if rank == 0:
            wait_until(has_reported.exists)


def test_a_long_wait_is_reported(tmp_path: Path) -> None:
    environment = {"PROCGROUP_WAIT_REPORT_SECONDS": "0.5"}
    has_reported = tmp_path / "has reported"
    with start(wait_for_a_report, 2, args=(has_reported,), environment=environment) as world:
        world.wait_for_output(1, "for rank 0 in rank_first #1 on group 0")
        has_reported.touch()
        outcomes = world.wait()
    assert "rank 1 has waited" in outcomes[1].output
    assert "has waited" not in outcomes[0].output
