"""The first failure is the one that the others follow from: by cause, and by the clock within one node only."""

from __future__ import annotations

import signal
import subprocess
import sys
from typing import Any

import pytest

from procgroup.launch.failures.failure import RankFailure
from procgroup.launch.failures.report import describe, first_failure
from procgroup.process.error_file import ErrorRecord
from procgroup.process.exit_reason import CALL, PEER, Origin

GLOO = (
    "RuntimeError: [/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer "
    "[127.0.0.1]:1670. This is typically caused by a remote worker crashing."
)
GLOO_READ = "RuntimeError: [/pytorch/gloo/transport/tcp/pair.cc:537] Read error [::1]:6555: Connection reset by peer."
NCCL = (
    "torch.distributed.DistBackendError: NCCL error in: /pytorch/ProcessGroupNCCL.cpp:1333, remote process exited or "
    "there was a network error, NCCL version 2.27.3\nncclRemoteError: A call failed possibly due to a network error"
)
STORE = (
    "torch.distributed.DistNetworkError: Failed to recv, got 0 bytes. Connection was likely closed. Did the remote "
    "server shutdown or crash?"
)
HEADER = 'Traceback (most recent call last):\n  File "train.py", line 1, in <module>\n    f()\n'
DURING = "\nDuring handling of the above exception, another exception occurred:\n\n"
BECAUSE = "\nThe above exception was the direct cause of the following exception:\n\n"


def traceback(*chain: str, by: str = BECAUSE) -> str:
    return by.join(f"{HEADER}{message}\n" for message in chain)


def failure(rank: int, stderr: str, time: float = 1.0, exit_code: int = 1, **more: Any) -> RankFailure:
    return RankFailure(rank=rank, pid=100 + rank, exit_code=exit_code, time=time, stderr=stderr, **more)


def lost(rank: int) -> str:
    return f"procgroup.errors.PeerLost: all_reduce #2 on group default (rank 0 of 4): lost rank {rank} (pid 7): gone"


def failed(rank: int) -> str:
    return f"PeerFailed: barrier #1 on group default (rank 0 of 4): rank {rank} failed: ValueError: x (a.py:3)"


def blaming(
    rank: int, message: str, peer: int | None, time: float = 1.0, exit_code: int = 1, **more: Any
) -> RankFailure:
    """Return the failure of a rank of procgroup, whose record says that it follows from the end of ``peer``."""
    record = ErrorRecord(message, traceback(message), origin=Origin(PEER, peer))
    return failure(rank, traceback(message), time, exit_code, record=record, **more)


def test_a_record_decides_and_not_the_words_of_the_exception() -> None:
    message = "RuntimeError: Got the following error when running the callback: PeerLost: lost rank 1"
    cause = failure(1, "", 9.0, -signal.SIGKILL)
    assert first_failure([blaming(0, message, 1), cause]) is cause
    assert blaming(0, message, 1).blamed_rank == 1
    own = failure(0, traceback(lost(1)), record=ErrorRecord(lost(1), traceback(lost(1)), origin=Origin()))
    assert not own.is_secondary and own.blamed_rank is None
    assert not failure(0, traceback(lost(1))).is_secondary


@pytest.mark.parametrize("message", [GLOO, GLOO_READ, NCCL, STORE])
def test_an_error_of_a_lost_connection_is_a_consequence(message: str) -> None:
    follows, cause = failure(0, traceback(message), 1.0), failure(1, "", 9.0, -signal.SIGKILL)
    assert first_failure([follows, cause]) is cause


@pytest.mark.parametrize(
    "message",
    [
        "ConnectionResetError: [Errno 104] Connection reset by peer",
        "ValueError: the remote process exited",
        "RuntimeError: CUDA out of memory",
        "CollectiveTimeout: all_reduce #1: not complete after 30 s; still waiting for rank 1",
    ],
)
def test_an_error_of_the_program_s_own_is_none(message: str) -> None:
    assert not failure(0, traceback(message)).is_secondary


@pytest.mark.parametrize("by", [DURING, BECAUSE])
def test_what_is_raised_while_a_lost_peer_is_handled_is_a_consequence_too(by: str) -> None:
    assert failure(0, traceback(GLOO, "KeyError: 'cleanup'", by=by)).is_secondary
    assert not failure(0, traceback("KeyError: 'mine'", GLOO, by=by)).is_secondary
    assert failure(0, traceback("ConnectionResetError: [Errno 104]", GLOO, by=by)).is_secondary


def test_nccl_s_watchdog_aborts_as_a_consequence() -> None:
    text = f"terminate called after throwing an instance of 'c10::DistBackendError'\n  what():  [PG ID 0] {NCCL}\n"
    aborted = failure(0, text, exit_code=-signal.SIGABRT)
    assert aborted.is_secondary
    assert "killed by SIGABRT: [PG ID 0] torch.distributed.DistBackendError: NCCL error" in aborted.reason
    assert not failure(0, text, exit_code=-signal.SIGKILL).is_secondary


def test_a_program_that_handles_a_lost_peer_and_exits_with_a_code_of_its_own_fails_after_it() -> None:
    handled, cause = blaming(0, "lost rank 1 (pid 7): gone", 1, 1.0, 3), failure(1, "", 2.0, 4)
    assert first_failure([handled, cause]) is cause


def test_ranks_that_blame_each_other_lead_to_the_one_at_the_end() -> None:
    chain = [blaming(0, failed(2), 2, 1.0), blaming(2, lost(3), 3, 2.0), failure(1, traceback(GLOO))]
    assert first_failure(chain).rank == 2


def test_a_cycle_of_blame_is_left_at_the_earliest() -> None:
    cycle = [blaming(0, lost(1), 1, 2.0), blaming(1, lost(0), 0, 1.0)]
    assert first_failure(cycle).rank == 1


def test_between_nodes_the_order_of_posting_decides_and_clocks_do_not() -> None:
    posted_first = failure(4, traceback("ValueError: a"), time=900.0, node_rank=1)
    earlier_there = failure(5, traceback("ValueError: b"), time=800.0, node_rank=1)
    other_clock = failure(0, traceback("ValueError: c"), time=1.0, node_rank=0)
    assert first_failure([posted_first, other_clock, earlier_there]) is earlier_there


def test_between_nodes_the_rank_that_another_rank_names_goes_before_the_order_of_posting() -> None:
    unrelated = failure(0, traceback("OSError: at the end"), node_rank=0)
    cause = failure(4, traceback("ValueError: x"), time=500.0, node_rank=1)
    witness = blaming(1, failed(4), 4, node_rank=0)
    assert first_failure([unrelated, witness, cause]) is cause


def test_the_report_names_hosts_where_they_differ() -> None:
    cause = failure(4, traceback("ValueError: x"), node_rank=1, host="beta")
    witness, neighbour = (blaming(0, failed(4), 4, host="alpha"), failure(5, "", 2.0, 3, node_rank=1, host="beta"))
    lines = describe([witness, cause, neighbour], [1, 2, 3, 6], [], "alpha").splitlines()
    assert lines[0].startswith("rank 0 (alpha, pid 100) failed after that: PeerFailed: ")
    assert lines[1:4] == [
        "rank 5 (pid 105) failed after that: exit code 3",
        "ranks 1-3, 6 were ended by the launcher",
        "rank 4 (beta, pid 104) failed first: ValueError: x",
    ]


def test_what_many_ranks_say_is_reported_once() -> None:
    cause = failure(1, traceback("ValueError: x"))
    lines = describe([*(blaming(rank, failed(1), 1) for rank in (0, 2, 3)), cause], [], [], "alpha").splitlines()
    assert lines[0] == f"ranks 0, 2, 3 failed after that, having lost rank 1: {failed(1)}"
    assert lines[1] == "rank 1 (alpha, pid 101) failed first: ValueError: x"


def test_an_error_of_its_own_while_a_rank_handles_a_loss_has_its_own_line() -> None:
    cause = failure(1, traceback("ValueError: x"))
    others = [blaming(0, failed(1), 1), blaming(2, "OSError: disk full", 1), blaming(3, failed(1), 1)]
    others += [blaming(4, "OSError: no route", 1)]
    lines = describe([*others, cause], [], [], "alpha").splitlines()
    assert lines[:3] == [
        f"ranks 0, 3 failed after that, having lost rank 1: {failed(1)}",
        "rank 2 (pid 102) failed after that: OSError: disk full",
        "rank 4 (pid 104) failed after that: OSError: no route",
    ]


def test_an_error_that_all_ranks_of_a_call_raise_is_reported_once_whatever_its_type() -> None:
    message = "RuntimeError: Got the following error when running the callback: CollectiveMismatch: ..."
    record = ErrorRecord(message, traceback(message), origin=Origin(CALL))
    failures = [failure(rank, "", float(rank), record=record) for rank in range(4)]
    text = describe(failures, [], [], "alpha")
    assert text.splitlines()[:2] == [
        "ranks 1-3 failed after that: the same RuntimeError",
        "rank 0 (alpha, pid 100) failed first: RuntimeError",
    ]
    assert text.endswith(f"{message}\n") and text.count(message) == 1


def test_a_reason_is_one_line_of_bounded_length() -> None:
    assert len(failure(0, traceback("ValueError: " + "x" * 10_000 + "\nmore")).reason) == 400


def test_the_stack_of_the_crashed_thread_is_shown_and_not_the_modules() -> None:
    stderr = (
        "noise\nFatal Python error: Segmentation fault\n\n"
        'Thread 0x00007f01 (most recent call first):\n  File "other.py", line 9 in wait\n\n'
        'Current thread 0x00007f02 (most recent call first):\n  File "a.py", line 2 in crash\n\n'
        "Extension modules: numpy._core (total: 1)\n"
    )
    assert failure(0, stderr, exit_code=-signal.SIGSEGV).evidence == (
        "Fatal Python error: Segmentation fault\n\n"
        'Current thread 0x00007f02 (most recent call first):\n  File "a.py", line 2 in crash\n'
    )


def test_the_original_traceback_of_a_dataloader_s_worker_is_a_part_of_the_message() -> None:
    message = "ValueError: Caught ValueError in DataLoader worker process 0.\nOriginal " + HEADER + "ValueError: bad"
    found = failure(0, "warning\n" + traceback(message))
    assert found.evidence == traceback(message)
    assert found.reason == "ValueError: Caught ValueError in DataLoader worker process 0."


def test_an_exception_group_is_shown_whole() -> None:
    source = "raise ExceptionGroup('two of them', [ValueError('a'), OSError('b')])"
    stderr = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True).stderr
    found = failure(0, "before\n" + stderr)
    assert found.evidence == stderr
    assert found.reason == "ExceptionGroup: two of them (2 sub-exceptions)"


GLOO_PROGRAM = """
    import os, signal
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    numbers = torch.ones(4)
    dist.all_reduce(numbers)
    if dist.get_rank() == 1:
        {end}
    while True:
        dist.all_reduce(numbers)
"""


@pytest.mark.torch
@pytest.mark.parametrize(
    ("end", "reason"), [("os._exit(3)", "exit code 3"), ("os.kill(os.getpid(), signal.SIGKILL)", "killed by SIGKILL")]
)
def test_of_stock_gloo_the_rank_that_ended_is_named_and_not_those_that_lost_it(
    launcher: Any, end: str, reason: str
) -> None:
    done = launcher.run(GLOO_PROGRAM.format(end=end), "--nproc-per-node", "3")
    report = [line for line in done.stderr.splitlines() if "failed first" in line]
    assert len(report) == 1, done.stderr
    assert report[0].startswith("rank 1 (")
    assert f"failed first: {reason}" in report[0]
    for line in done.stderr.splitlines():
        assert "failed after that" not in line or "peer" in line, line
