"""Which failure of a spawned process is reported, and that Ctrl-C leaves no process behind."""

from __future__ import annotations

import os
import resource
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from procgroup.errors import PeerLost
from procgroup.launch import LaunchConfig, elastic_launch
from procgroup.launch.spawning import process_context
from procgroup.launch.spawning.lasting_starter import DeferredInterrupt
from procgroup.launch.spawning.spawn import ProcessExitedException, ProcessRaisedException, spawn, start_processes
from waiting import Meeting
from world import run_command

GLOO = "[../third_party/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:1670"
SIGNAL_WITHOUT_A_NAME = 40


def lost(peer: int, rank: int) -> PeerLost:
    return PeerLost(peer=peer, pid=7, how="gone", op="barrier", sequence=1, group="world", rank=rank, size=3)


def raise_as_gloo_does() -> None:
    raise RuntimeError(GLOO)


def raise_because_a_peer_is_lost() -> None:
    try:
        raise lost(1, rank=0)
    except PeerLost as error:
        raise KeyError("cleanup") from error


def raise_consequence_before_cause(index: int, directory: str, raise_consequence: Callable[[], None]) -> None:
    meeting = Meeting(directory)
    if index == 0:
        meeting.reach("raises")
        raise_consequence()
    meeting.wait_until_collected("raises")  # the consequence is seen first
    raise ValueError("the cause")


def lose_a_peer_while_an_error_is_handled(index: int, directory: str) -> None:
    meeting = Meeting(directory)
    if index == 1:
        meeting.wait_for("raises")
        raise lost(0, rank=1)
    try:
        raise ValueError("the cause")
    except ValueError as error:
        meeting.reach("raises")
        raise lost(1, rank=0) from error


def blame_each_other(index: int, directory: str) -> None:
    meeting = Meeting(directory)
    if index == 0:
        meeting.reach("raises")
        raise lost(2, rank=0)
    meeting.wait_for("raises")
    raise RuntimeError(f"{GLOO}, on {index}") if index == 2 else lost(0, rank=index)


def use_up_the_descriptors(index: int) -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
    held = []
    while True:
        held.append(os.open(os.devnull, os.O_RDONLY))


def end_by_a_signal_without_a_name(*_: object) -> None:
    os.kill(os.getpid(), SIGNAL_WITHOUT_A_NAME)


def end_before_a_forked_child(index: int, directory: str) -> None:
    meeting = Meeting(directory)
    if os.fork() == 0:
        try:
            meeting.reach("forked")
            meeting.wait_for("reported")
        finally:
            meeting.reach("ended")
            os._exit(0)
    meeting.wait_for("forked")
    os.kill(os.getpid(), signal.SIGKILL)


def require_the_handler(index: int, handler: object) -> None:
    assert signal.getsignal(signal.SIGINT) is handler


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a cause be reported late, too, on a busy machine."""
    monkeypatch.setattr(process_context, "CAUSE_SECONDS", 30.0)


@pytest.mark.parametrize("raise_consequence", [raise_as_gloo_does, raise_because_a_peer_is_lost])
def test_the_cause_is_reported_also_when_a_consequence_was_raised_before(
    tmp_path: Path, patient: None, raise_consequence: Any
) -> None:
    with pytest.raises(ProcessRaisedException, match="the cause") as raised:
        start_processes(raise_consequence_before_cause, (str(tmp_path), raise_consequence), 2, start_method="fork")
    assert raised.value.error_index == 1


def test_the_first_exception_of_a_process_decides_whether_it_is_a_consequence(tmp_path: Path, patient: None) -> None:
    with pytest.raises(ProcessRaisedException, match="the cause") as raised:
        start_processes(lose_a_peer_while_an_error_is_handled, (str(tmp_path),), 2, start_method="fork")
    assert raised.value.error_index == 0


def test_of_processes_that_blame_others_the_one_at_the_end_is_reported(tmp_path: Path, patient: None) -> None:
    with pytest.raises(ProcessRaisedException, match="on 2") as raised:
        start_processes(blame_each_other, (str(tmp_path),), 3, start_method="fork")
    assert raised.value.error_index == 2


def test_a_process_without_a_free_descriptor_can_report_its_exception() -> None:
    with pytest.raises(ProcessRaisedException, match="Too many open files"):
        spawn(use_up_the_descriptors)


@pytest.mark.parametrize("method", ["spawn", "fork", "forkserver"])
def test_an_end_is_seen_while_children_of_the_process_live(tmp_path: Path, method: str) -> None:
    with pytest.raises(ProcessExitedException, match="SIGKILL"):
        start_processes(end_before_a_forked_child, (str(tmp_path),), start_method=method)
    assert not (tmp_path / "ended").exists()
    Meeting(str(tmp_path)).reach("reported")


def test_a_signal_without_a_name_is_told_in_torch_s_words() -> None:
    with pytest.raises(ProcessExitedException, match="process 0 terminated with signal <Unknown signal 40>") as raised:
        start_processes(end_by_a_signal_without_a_name, start_method="fork")
    assert (raised.value.exit_code, raised.value.signal_name) == (-40, "<Unknown signal 40>")
    with pytest.raises(ProcessExitedException, match="killed by <Unknown signal 40>"):
        elastic_launch(LaunchConfig(max_restarts=0), end_by_a_signal_without_a_name)()


def test_a_child_imports_none_of_what_its_parent_needs(launcher: Any) -> None:
    source = """
        import procgroup, sys
        def work(index):
            print([name for name in sys.modules if name.startswith(("procgroup.launch.nodes", "procgroup.stores"))])
        if __name__ == "__main__":
            procgroup.spawn(work)
    """
    assert run_command([sys.executable, str(launcher.script(source))]).stdout == "[]\n"


def test_an_interrupt_between_a_child_s_start_and_the_parent_s_knowledge_of_it_leaves_no_child(launcher: Any) -> None:
    source = """
        import ctypes, functools, os, signal, time
        from procgroup.launch.spawning.spawn import start_processes

        def work(index):
            time.sleep(60)

        if __name__ == "__main__":
            # A function in C, in which Python cannot raise the interrupt already: it does so behind the fork.
            interrupt = functools.partial(getattr(ctypes.CDLL(None), "raise"), signal.SIGINT)
            os.register_at_fork(after_in_parent=interrupt)
            try:
                start_processes(work, nprocs=2, start_method="fork")
            except KeyboardInterrupt:
                print("interrupted")
            try:
                print("left:", os.waitpid(-1, os.WNOHANG))
            except ChildProcessError:
                print("no child is left")
    """
    done = run_command([sys.executable, str(launcher.script(source))])
    assert done.stdout == "interrupted\nno child is left\n", done.stderr


def test_a_second_interrupt_is_not_deferred() -> None:
    reached = []
    with pytest.raises(KeyboardInterrupt), DeferredInterrupt():
        signal.raise_signal(signal.SIGINT)
        reached.append("the first")
        signal.raise_signal(signal.SIGINT)
        reached.append("the second")
    assert reached == ["the first"]


def test_a_forked_child_has_the_handler_that_its_parent_had_before() -> None:
    handler = signal.getsignal(signal.SIGINT)
    start_processes(require_the_handler, (handler,), start_method="fork")
    assert signal.getsignal(signal.SIGINT) is handler
