"""How a job ends: signals to the launcher, also at its start, its own death, ranks that resist, children of ranks."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import psutil
import pytest

from launch.conftest import Launcher
from procgroup.launch.hosts.agent_channel import Assignment
from world import run_command

SLEEP = """
    import os, time
    print("pid", os.getpid(), flush=True)
    time.sleep(60)
"""
RESIST = """
    import os, signal, time
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    print("pid", os.getpid(), flush=True)
    while True:
        time.sleep(1)
"""
WITH_CHILD = """
    import os, pathlib, subprocess, sys, time
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    print("pid", os.getpid(), "child", child.pid, flush=True)
    shown = [pathlib.Path(__file__).with_name(f"shown {{rank}}") for rank in range(2)]
    shown[int(os.environ["RANK"])].touch()
    while not all(path.exists() for path in shown):
        time.sleep(0.01)
    {end}
"""
INTERRUPTED = """
    import runpy, signal, sys

    class Interrupt:
        def find_spec(self, name, path=None, target=None):
            if name == interrupted:
                signal.raise_signal(signal.SIGINT)

    module, interrupted, *arguments = sys.argv[1:]
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.meta_path.insert(0, Interrupt())
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
"""

Gone = Callable[[list[int]], None]

SOON = 20
"""Seconds until a launcher has ended that a signal ends, or the death of its ranks: less than one where nothing else
runs; ranks that do not end are killed after 30 s, and the programs would go on for 60."""


def end_by_signal(running: Any, number: signal.Signals, ranks: int, gone: Gone) -> None:
    """Send it once all ranks work; expect it as the exit status, and no rank left."""
    running.wait_for("pid", ranks)
    running.process.send_signal(number)
    assert running.process.wait(SOON) == 128 + number
    gone(running.pids())


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT])
def test_a_signal_ends_all_ranks_and_is_the_exit_status(
    start_launcher: Any, gone: Gone, number: signal.Signals
) -> None:
    running = start_launcher(SLEEP, "--nproc-per-node", "3")
    end_by_signal(running, number, 3, gone)
    assert f"procgroup run: {number.name}: ending 3 ranks\n" in running.stderr


IN_BACKGROUND = """import os, signal, sys
for number in (signal.SIGINT, signal.SIGQUIT):
    signal.signal(number, signal.SIG_IGN)
os.execv(sys.executable, [sys.executable, "-m", "procgroup", "run", *sys.argv[1:]])
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGQUIT])
def test_a_signal_ends_all_ranks_of_a_job_that_a_shell_runs_in_the_background_too(
    start_launcher: Any, gone: Gone, number: signal.Signals
) -> None:
    running = start_launcher(SLEEP, "--nproc-per-node", "2", command=("-c", IN_BACKGROUND))
    end_by_signal(running, number, 2, gone)


def test_an_interrupt_shows_one_line_per_rank_and_no_wall_of_tracebacks(start_launcher: Any) -> None:
    running = start_launcher(SLEEP, "--nproc-per-node", "2")
    running.wait_for("pid", 2)
    running.process.send_signal(signal.SIGINT)
    running.process.wait(SOON)
    assert "Traceback" not in running.stderr
    assert running.stderr.count("KeyboardInterrupt") == 2
    assert len(running.stderr.splitlines()) <= 4


def test_ranks_that_ignore_an_interrupt_are_killed_soon(start_launcher: Any, gone: Gone) -> None:
    running = start_launcher(RESIST, "--nproc-per-node", "2")
    running.wait_for("pid", 2)
    running.process.send_signal(signal.SIGINT)
    assert running.process.wait(SOON) == 130
    gone(running.pids())


def test_a_second_interrupt_kills_at_once(start_launcher: Any, gone: Gone) -> None:
    running = start_launcher(RESIST, "--nproc-per-node", "2", "--shutdown-timeout", "50")
    running.wait_for("pid", 2)
    running.process.send_signal(signal.SIGINT)
    running.wait_for_message("SIGINT: ending")
    running.process.send_signal(signal.SIGINT)
    assert running.process.wait(SOON) == 130
    assert "SIGINT again: killing 2 ranks" in running.stderr
    gone(running.pids())


def test_ranks_that_ignore_sigterm_get_the_shutdown_timeout_and_no_more(start_launcher: Any, gone: Gone) -> None:
    running = start_launcher(RESIST, "--nproc-per-node", "2", "--shutdown-timeout", "0.7")
    running.wait_for("pid", 2)
    began = time.monotonic()
    running.process.send_signal(signal.SIGTERM)
    assert running.process.wait(SOON) == 143
    assert time.monotonic() - began >= 0.7
    gone(running.pids())


def test_the_shutdown_timeout_holds_after_a_failure_too(launcher: Any) -> None:
    source = """
        import os, signal, sys, time
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if os.environ["RANK"] == "1":
            sys.exit(9)
        time.sleep(60)
    """
    began = time.monotonic()
    done = launcher.run(source, "--nproc-per-node", "2", "--shutdown-timeout", "0.3")
    assert done.returncode == 9
    assert time.monotonic() - began < 25, "without that flag it would be 30 s"


def test_a_rank_may_use_the_grace_to_save_its_work(start_launcher: Any) -> None:
    source = """
        import os, pathlib, signal, sys, time
        def save(number, frame):
            while not pathlib.Path(sys.argv[0]).with_name("go").exists():
                time.sleep(0.01)
            print("saved", flush=True)
            sys.exit(0)
        signal.signal(signal.SIGTERM, save)
        print("pid", os.getpid(), flush=True)
        time.sleep(60)
    """
    running = start_launcher(source, "--nproc-per-node", "2")
    running.wait_for("pid", 2)
    running.process.send_signal(signal.SIGTERM)
    running.wait_for_message("SIGTERM: ending 2 ranks")
    (running.directory / "go").touch()
    assert running.process.wait(SOON) == 143
    assert running.stdout.count("saved") == 2


def test_only_chosen_signals_are_handled(start_launcher: Any) -> None:
    running = start_launcher(SLEEP, "--signals-to-handle", "SIGUSR1")
    running.wait_for("pid")
    running.process.send_signal(signal.SIGUSR1)
    assert running.process.wait(SOON) == 128 + signal.SIGUSR1


def test_sigkill_of_the_launcher_at_any_moment_leaves_nothing(start_launcher: Any, gone: Gone) -> None:
    chance = random.Random(20)
    for _ in range(20):
        running = start_launcher(SLEEP, "--nproc-per-node", "3")
        family = descendants(running.process.pid, chance.uniform(0.0, 0.3))
        running.process.kill()
        running.process.wait()
        gone(family + running.pids())


def descendants(pid: int, seconds: float) -> list[int]:
    """Watch a process for a while; return the pids of all its descendants seen."""
    seen: set[int] = set()
    deadline = time.monotonic() + seconds
    while True:
        seen.update(child.pid for child in psutil.Process(pid).children(recursive=True))
        if time.monotonic() >= deadline:
            return sorted(seen)
        time.sleep(0.005)


def test_sigkill_of_the_launcher_ends_ranks_that_are_no_python_and_ignore_signals(
    start_launcher: Any, gone: Gone
) -> None:
    trap = "trap '' TERM INT HUP; echo pid $$; while :; do sleep 1; done"
    running = start_launcher("", "--no-python", "sh", "-c", trap)
    running.wait_for("pid")
    running.process.kill()
    running.process.wait()
    gone(running.pids())


@pytest.mark.parametrize("end", ["time.sleep(60)", "raise SystemExit(3)", "raise SystemExit(0)"])
def test_children_of_ranks_end_with_the_job(start_launcher: Any, gone: Gone, end: str) -> None:
    running = start_launcher(WITH_CHILD.format(end=end), "--nproc-per-node", "2")
    running.wait_for("child", 2)
    if "sleep" in end:
        running.process.send_signal(signal.SIGTERM)
    running.process.wait(SOON)
    children = running.pids("child")
    assert len(children) == 2
    gone(children)


def test_a_stopped_rank_is_ended_too(start_launcher: Any, gone: Gone) -> None:
    running = start_launcher(SLEEP, "--nproc-per-node", "2", "--shutdown-timeout", "0.5")
    running.wait_for("pid", 2)
    os.kill(running.pids()[0], signal.SIGSTOP)
    running.process.send_signal(signal.SIGTERM)
    assert running.process.wait(SOON) == 143
    gone(running.pids())


def test_ranks_learn_that_the_reader_of_their_output_is_gone(launcher: Any) -> None:
    script = launcher.script("while True: print('line')")
    command = [sys.executable, "-m", "procgroup", "run", "--nproc-per-node", "2", str(script)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.readline()
        process.stdout.close()
        assert "BrokenPipeError" in process.stderr.read()
    assert process.returncode == 1


def test_the_launcher_refuses_to_run_in_a_side_thread(launcher: Any) -> None:
    script = launcher.script("print('started')", "ranks.py")
    source = f"""
        import threading
        from procgroup.launch import run
        thread = threading.Thread(target=run.main, args=([{str(script)!r}],))
        thread.start()
        thread.join()
    """
    done = run_command([sys.executable, str(launcher.script(source))])
    assert "call it in the main thread" in done.stderr
    assert "started" not in done.stdout


def test_a_second_sigterm_is_passed_on_and_kills_nobody(start_launcher: Any) -> None:
    source = """
        import os, signal, sys, time
        seen = []
        signal.signal(signal.SIGTERM, lambda number, frame: seen.append(number))
        print("pid", os.getpid(), flush=True)
        while len(seen) < 2:
            time.sleep(0.02)
            if len(seen) == 1:
                print("once", flush=True)
        print("saved", flush=True)
    """
    running = start_launcher(source)
    running.wait_for("pid")
    running.process.send_signal(signal.SIGTERM)
    running.wait_for("once")
    running.process.send_signal(signal.SIGTERM)
    assert running.process.wait(SOON) == 143
    assert "saved" in running.stdout


def test_a_reader_that_takes_nothing_cannot_keep_the_launcher(launcher: Any) -> None:
    script = launcher.script("print('x' * 300_000)")
    command = [sys.executable, "-m", "procgroup", "run", str(script)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        assert process.stdout is not None
        process.stdout.read(1)
        process.send_signal(signal.SIGTERM)
        process.send_signal(signal.SIGINT)
        assert process.wait(SOON) in (130, 143)


def test_a_rank_that_cannot_be_started_ends_those_that_were(launcher: Any) -> None:
    script = launcher.script("import time; time.sleep(60)")
    argument = "x" * 200_000  # more than the kernel takes as one argument
    source = f"""
        from procgroup.launch.output.job_output import JobOutput, LogOptions
        from procgroup.launch.ranks.worker_group import RankPlan, WorkerGroup
        output = JobOutput(LogOptions(directory="/dev/null"), "job")
        commands = [{sys.executable!r}, {str(script)!r}], ["true", {argument!r}]
        plans = [RankPlan(command, {{}}, output.of_rank(rank, rank), rank) for rank, command in enumerate(commands)]
        group = WorkerGroup(plans, 0, print)
        group.start(lambda: False)
        while group.living:
            group.watch(0)
        print(group.has_settled, group.incomplete)
    """
    done = run_command([sys.executable, str(launcher.script(source, "agent.py"))])
    assert done.stdout.startswith("True cannot start rank 1: ")
    assert "Traceback" not in done.stderr


def test_eight_jobs_at_once_do_not_collide(start_launcher: Any) -> None:
    source = """
        import os, pathlib, sys, time
        print("port", os.environ["MASTER_PORT"], flush=True)
        while not pathlib.Path(sys.argv[0]).with_name("over").exists():
            time.sleep(0.01)
    """
    jobs = [start_launcher(source, "--nproc-per-node", "2") for _ in range(8)]
    for job in jobs:
        job.wait_for("port", 2)
    for job in jobs:
        (job.directory / "over").touch()
    assert [job.process.wait(40) for job in jobs] == [0] * 8
    assert len({job.pids("port")[0] for job in jobs}) >= 2
    assert all(len(set(job.pids("port"))) == 1 for job in jobs)


@pytest.mark.parametrize(
    ("module", "interrupted", "arguments"),
    [
        ("procgroup", "procgroup.launch.run", ["run"]),
        ("procgroup.launch", "procgroup.launch.flags", []),
        ("procgroup.launch.remote_agent", "procgroup.launch.job_plan", ["--nnodes=1", "--rdzv-backend=c10d"]),
    ],
)
def test_an_interrupt_during_an_import_ends_the_command_without_a_traceback(
    launcher: Launcher, module: str, interrupted: str, arguments: list[str]
) -> None:
    script = launcher.script("print('ran')")
    program = launcher.script(INTERRUPTED, "interrupted.py")
    given = Assignment(0, "host1", str(launcher.directory), {}, 0).to_line() + b"127.0.0.1:0\n"
    done = subprocess.run(
        [sys.executable, program, module, interrupted, *arguments, script], input=given, capture_output=True, timeout=30
    )
    assert (done.returncode, done.stderr) == (130, b"")
    assert b"ran" not in done.stdout
