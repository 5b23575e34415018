"""spawn and start_processes: torch.multiprocessing's contract, the first failure, no orphans, a store without ports."""

from __future__ import annotations

import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from procgroup.errors import PeerLost
from procgroup.launch.spawning import process_context
from procgroup.launch.spawning import spawn as spawning
from procgroup.launch.spawning.child import MAX_TEXT_BYTES
from procgroup.launch.spawning.spawn import (
    ProcessContext,
    ProcessException,
    ProcessExitedException,
    ProcessRaisedException,
    SpawnContext,
    spawn,
    start_processes,
)
from waiting import Meeting

METHODS = ["spawn", "fork", "forkserver"]
Gone = Callable[[list[int]], None]


def write_rank(index: int, directory: str, *more: object) -> None:
    Path(directory, str(index)).write_text(repr(more))


def raise_on_one(index: int, text: str = "boom") -> None:
    if index == 1:
        raise ValueError(text)
    time.sleep(30)


def exit_on_one(index: int, code: object) -> None:
    if index == 1:
        sys.exit(code)  # type: ignore[arg-type]
    time.sleep(30)


def kill_one(index: int, number: int) -> None:
    if index == 1:
        os.kill(os.getpid(), number)
    time.sleep(30)


def sleep(index: int, seconds: float = 30) -> None:
    time.sleep(seconds)


def wait_for_a_word(index: int, directory: str, word: str) -> None:
    Meeting(directory).wait_for(word)


class Unpicklable(Exception):
    def __init__(self) -> None:
        super().__init__("cannot travel")
        self.lock = threading.Lock()


def raise_unpicklable(index: int) -> None:
    raise Unpicklable


def raise_base_exception(index: int) -> None:
    raise BaseException("unusual")


def raise_keyboard_interrupt(index: int) -> None:
    raise KeyboardInterrupt


def resist_after_failure(index: int, directory: str) -> None:
    if index == 1:
        Meeting(directory).wait_for("resists")
        raise ValueError("boom")
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    Meeting(directory).reach("resists")
    time.sleep(30)


def end_late(meeting: Meeting) -> None:
    threading.main_thread().join()
    meeting.reach("raised")
    meeting.wait_until_collected("raises, too")


def raise_first_and_end_last(index: int, directory: str) -> None:
    meeting = Meeting(directory)
    if index == 0:
        threading.Thread(target=end_late, args=(meeting,)).start()
        raise ValueError("the cause")
    meeting.wait_for("raised")
    meeting.reach("raises, too")
    raise OSError("the consequence")


def lose_peer_before_it_raises(index: int, directory: str) -> None:
    meeting = Meeting(directory)
    if index == 0:
        meeting.wait_for("started")
        meeting.reach("raises")
        raise PeerLost(peer=1, pid=7, how="gone", op="barrier", sequence=1, group="world", rank=0, size=2)
    meeting.reach("started")
    meeting.wait_until_collected("raises")
    raise ValueError("the cause")


def show_environment(index: int, directory: str) -> None:
    names = ("MASTER_ADDR", "MASTER_PORT", "PROCGROUP_STORE", "PROCGROUP_STORE_KEY", "PROCGROUP_JOB_KEY")
    if "PROCGROUP_STORE" in os.environ:
        host, _, port = os.environ["PROCGROUP_STORE"].partition(":")
        socket.create_connection((host, int(port)), timeout=5).close()
    Path(directory, str(index)).write_text(" ".join(os.environ.get(name, "-") for name in names))


@pytest.mark.parametrize("method", METHODS)
def test_the_function_gets_its_index_and_the_arguments(tmp_path: Path, method: str) -> None:
    assert start_processes(write_rank, (str(tmp_path), 5, "x"), nprocs=3, start_method=method) is None
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == dict.fromkeys("012", "(5, 'x')")


@pytest.mark.parametrize("method", METHODS)
def test_an_exception_brings_the_child_s_traceback_and_no_frame_of_ours(method: str) -> None:
    with pytest.raises(ProcessRaisedException) as raised:
        start_processes(raise_on_one, nprocs=3, start_method=method)
    text = str(raised.value)
    assert text.startswith("\n\n-- Process 1 terminated with the following error:\nTraceback (most recent")
    assert text.endswith("ValueError: boom\n")
    assert "procgroup/launch" not in text
    assert raised.value.error_index == 1
    assert raised.value.error_pid > 0


def test_an_exit_code_is_told() -> None:
    with pytest.raises(ProcessExitedException, match=r"^process 1 terminated with exit code 5$") as raised:
        spawn(exit_on_one, (5,), nprocs=2)
    assert (raised.value.exit_code, raised.value.signal_name, raised.value.error_index) == (5, None, 1)


def test_a_signal_is_told_by_name() -> None:
    with pytest.raises(
        ProcessExitedException, match=r"^process 1 terminated with signal SIGKILL(; the kernel|$)"
    ) as raised:
        spawn(kill_one, (9,), nprocs=2)
    assert (raised.value.exit_code, raised.value.signal_name) == (-9, "SIGKILL")


@pytest.mark.parametrize("code", [0, None])
def test_leaving_with_status_0_is_no_failure(code: object) -> None:
    context = spawn(exit_on_one, (code,), nprocs=2, join=False)
    assert context is not None
    assert context.join(timeout=40) is False
    context.end(1)


def test_an_exception_that_cannot_be_pickled_is_told_as_any_other() -> None:
    with pytest.raises(ProcessRaisedException, match="Unpicklable: cannot travel"):
        spawn(raise_unpicklable)


def test_an_exception_outside_of_exception_is_told_too() -> None:
    with pytest.raises(ProcessRaisedException, match="BaseException: unusual"):
        spawn(raise_base_exception)


def test_an_interrupt_in_a_child_counts_as_a_clean_end() -> None:
    assert spawn(raise_keyboard_interrupt) is None


def test_a_very_long_message_is_cut_in_the_middle() -> None:
    with pytest.raises(ProcessRaisedException) as raised:
        spawn(raise_on_one, ("\U0001f642" * 200_000,), nprocs=2)
    assert "bytes are left out" in str(raised.value)
    assert len(str(raised.value)) < MAX_TEXT_BYTES + 500


def test_the_first_failure_is_reported_even_when_its_process_ends_last(tmp_path: Path) -> None:
    with pytest.raises(ProcessRaisedException, match="the cause"):
        spawn(raise_first_and_end_last, (str(tmp_path),), nprocs=2)


def test_a_process_that_lost_its_peer_is_not_the_cause(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_context, "CAUSE_SECONDS", 30.0)
    with pytest.raises(ProcessRaisedException, match="the cause"):
        spawn(lose_peer_before_it_raises, (str(tmp_path),), nprocs=2)


def test_a_context_joins_step_by_step(tmp_path: Path) -> None:
    context = start_processes(wait_for_a_word, (str(tmp_path), "end"), nprocs=2, join=False)
    assert isinstance(context, SpawnContext)
    assert isinstance(context, ProcessContext)
    assert len(context.processes) == 2
    assert context.pids() == [process.pid for process in context.processes]
    assert context.join(timeout=0) is False
    Meeting(str(tmp_path)).reach("end")
    while not context.join(timeout=10):
        pass
    assert context.join() is True
    assert [process.exitcode for process in context.processes] == [0, 0]


def test_joining_again_after_a_failure_raises_the_same() -> None:
    context = spawn(raise_on_one, nprocs=2, join=False)
    assert context is not None
    with pytest.raises(ProcessRaisedException, match="boom"):
        while not context.join():
            pass
    with pytest.raises(ProcessRaisedException, match="boom"):
        context.join()


def test_the_grace_period_bounds_how_long_a_survivor_may_resist(tmp_path: Path) -> None:
    context = spawn(resist_after_failure, (str(tmp_path),), nprocs=2, join=False)
    assert context is not None
    began = time.monotonic()
    with pytest.raises(ProcessRaisedException):
        while not context.join(grace_period=0.2):
            pass
    assert time.monotonic() - began < 25, "without a grace period it would have 30 s, and then it ends by itself"
    assert context.processes[0].exitcode == -9


def test_no_process_at_all_is_joined_at_once() -> None:
    assert spawn(sleep, nprocs=0) is None


@pytest.mark.parametrize(("nprocs", "method"), [(-1, "spawn"), (1, "no-such-method")])
def test_unusable_arguments_raise_value_error(nprocs: int, method: str) -> None:
    with pytest.raises(ValueError, match=r"nprocs|no-such-method"):
        start_processes(sleep, nprocs=nprocs, start_method=method)


def test_a_function_that_cannot_be_pickled_is_refused_and_nothing_runs_on() -> None:
    advice = 'Define `fn` at the top level of a module, .* In a notebook or a shell, pass start_method="fork"'
    with pytest.raises((AttributeError, pickle.PicklingError, TypeError), match=f"spawn cannot give .*{advice}"):
        spawn(lambda index: None, nprocs=2)


@pytest.mark.parametrize("shell", [["-c"], ["-"]])
def test_a_function_of_a_program_that_is_in_no_file_is_refused_before_anything_starts(shell: list[str]) -> None:
    source = """
import procgroup as dist
def play(index): print("rank", index)
try:
    dist.spawn(play, nprocs=2)
except Exception as error:
    print(type(error).__name__, error)
dist.spawn(play, nprocs=1, start_method="fork")
"""
    given = {"input": source} if shell == ["-"] else {}
    command = [sys.executable, *shell, *([] if given else [source])]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True, **given)
    first, *rest = done.stdout.splitlines()
    assert first.startswith(
        "PicklingError spawn: the processes cannot import `play`, because its program is in no file"
    )
    assert "procgroup.testing.run_ranks(fn, nprocs)" in first and rest == ["rank 0"], done.stdout
    assert "Traceback" not in done.stderr, done.stderr


def test_daemon_is_passed_on() -> None:
    context = spawn(sleep, (0,), daemon=True, join=False)
    assert context is not None
    assert context.processes[0].daemon
    while not context.join():
        pass


@pytest.mark.parametrize("method", METHODS)
def test_children_are_led_to_a_store_of_the_parent(tmp_path: Path, method: str) -> None:
    start_processes(show_environment, (str(tmp_path),), nprocs=2, start_method=method)
    first, second = ((tmp_path / str(index)).read_text().split() for index in range(2))
    assert first == second
    assert first[0] == "127.0.0.1"
    assert first[2].startswith("127.0.0.1:")
    assert first[2] != f"127.0.0.1:{first[1]}"
    assert len(bytes.fromhex(first[3])) == 32
    assert first[4] == "-"
    assert "MASTER_PORT" not in os.environ


def test_an_address_of_the_user_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "10.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "29500")
    spawn(show_environment, (str(tmp_path),))
    assert (tmp_path / "0").read_text() == "10.0.0.1 29500 - - -"


def test_a_job_key_of_the_user_is_the_store_s(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PROCGROUP_JOB_KEY", "ab" * 16)
    spawn(show_environment, (str(tmp_path),))
    assert (tmp_path / "0").read_text().split()[3:] == ["-", "ab" * 16]


def test_eight_jobs_at_once_do_not_collide(tmp_path: Path) -> None:
    contexts = []
    for job in range(8):
        directory = tmp_path / str(job)
        directory.mkdir()
        contexts.append(start_processes(show_environment, (str(directory),), 2, join=False, start_method="forkserver"))
    for context in contexts:
        assert context is not None
        while not context.join(timeout=40):
            pass
    assert len({(tmp_path / str(job) / "0").read_text() for job in range(8)}) == 8


def test_a_side_thread_may_end_before_the_processes_it_started(tmp_path: Path) -> None:
    made: list[Any] = []
    arguments = (str(tmp_path), "end")
    thread = threading.Thread(target=lambda: made.append(spawn(wait_for_a_word, arguments, nprocs=2, join=False)))
    thread.start()
    thread.join()
    Meeting(str(tmp_path)).reach("end")
    while not made[0].join():
        pass
    assert [process.exitcode for process in made[0].processes] == [0, 0]


def test_exceptions_survive_pickling() -> None:
    for error in (ProcessRaisedException("a", 1, 2), ProcessExitedException("b", 1, 2, -9, "SIGKILL")):
        copy = pickle.loads(pickle.dumps(error))
        assert (type(copy), str(copy), vars(copy)) == (type(error), str(error), vars(error))
        assert isinstance(copy, ProcessException)


def test_the_public_names_are_torch_s() -> None:
    assert set(spawning.__all__) == {
        "ProcessContext",
        "ProcessException",
        "ProcessExitedException",
        "ProcessRaisedException",
        "SpawnContext",
        "spawn",
        "start_processes",
    }


PROGRAM = """
    import os, sys, threading, time
    from procgroup.launch.spawning.spawn import start_processes

    def work(index):
        print("pid", os.getpid(), flush=True)
        time.sleep(60)

    def main():
        start_processes(work, nprocs=2, start_method="{method}")

    if __name__ == "__main__":
        {start}
"""
IN_THREAD = "thread = threading.Thread(target=main); thread.start(); thread.join()"


@pytest.mark.parametrize("start", ["main()", IN_THREAD], ids=["main-thread", "side-thread"])
@pytest.mark.parametrize("method", METHODS)
def test_sigkill_of_the_parent_leaves_no_child(start_launcher: Any, gone: Gone, method: str, start: str) -> None:
    running = start_launcher(PROGRAM.format(method=method, start=start), command=())
    running.wait_for("pid", 2)
    running.process.kill()
    running.process.wait()
    gone(running.pids())


@pytest.mark.parametrize("method", METHODS)
def test_an_interrupt_of_the_parent_ends_the_children(start_launcher: Any, gone: Gone, method: str) -> None:
    running = start_launcher(PROGRAM.format(method=method, start="main()"), command=())
    running.wait_for("pid", 2)
    running.process.send_signal(signal.SIGINT)
    assert running.process.wait(timeout=40) == -signal.SIGINT
    gone(running.pids())


def test_spawn_starts_without_numpy() -> None:
    source = "import procgroup.launch.spawning.spawn, sys; print('numpy' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
