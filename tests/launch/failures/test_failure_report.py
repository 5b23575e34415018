"""The failing rank's own traceback comes last, the first failure is the one that is named, its status is passed on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from procgroup.cluster.control_group import OutOfMemoryKills
from procgroup.launch.failures.report import RankFailure, describe, first_failure
from procgroup.process.error_file import ErrorRecord
from procgroup.process.exit_reason import PEER, Origin
from world import free_port, run_command

RAISES = """
    import os, time
    def inner():
        raise ValueError("boom on two")
    if os.environ["RANK"] == "2":
        inner()
    time.sleep(60)
"""


AFTER_EACH_OTHER = f"""
        import atexit, fcntl, os, sys, termios, time
        sys.path.append({str(Path(__file__).parents[2])!r})
        from waiting import Meeting

        meeting = Meeting(sys.argv[1])

        def say_when_read(word):  # by the launcher: all that this rank has written
            while any(fcntl.ioctl(stream, termios.FIONREAD, bytes(4)) != bytes(4) for stream in (1, 2)):
                time.sleep(0.01)
            meeting.reach(word)
"""
# The ranks of these tests end one after the other, on purpose: the launcher must not end the last one meanwhile.
PATIENT_LAUNCHER = """
import sys
from procgroup.__main__ import main
from procgroup.launch import one_node
one_node.REPORT_SECONDS = 20.0
sys.exit(main())
"""
FAILS_ON_THE_LAST_RANK = """
    import os
    import numpy as np
    import procgroup as dist

    dist.init_process_group()
    print("attempt", os.environ["TORCHELASTIC_RESTART_COUNT"])
    dist.all_reduce(np.ones(3))
    if dist.get_rank() == 3:
        raise ValueError("boom of three")
    dist.all_reduce(np.ones(3))
"""


OPENS_TOO_MANY_FILES = """
    import resource
    import numpy as np
    import procgroup as dist

    dist.init_process_group()
    dist.all_reduce(np.ones(3))
    if dist.get_rank() == 1:
        resource.setrlimit(resource.RLIMIT_NOFILE, (100, 100))
        files = []
        while True:
            files.append(open("/dev/null"))
    dist.all_reduce(np.ones(3))
"""


def run_after_each_other(launcher: Any, source: str, ranks: int) -> list[str]:
    """Run a script whose ranks end one after the other; return the lines of the launcher's stderr."""
    script = launcher.script(AFTER_EACH_OTHER + source)
    flags = ["run", "--nproc-per-node", str(ranks), str(script), str(launcher.directory)]
    return run_command([sys.executable, "-c", PATIENT_LAUNCHER, *flags]).stderr.splitlines()


def run_agents(script: Path, *flags: str) -> list[tuple[int, str, str]]:
    """Run two agents with two ranks each; return their exit statuses, stdouts and stderrs."""
    place = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{free_port()}", "--rdzv-id", "job"]
    command = [sys.executable, "-m", "procgroup", "run", "--nnodes", "2", "-n", "2", *place, *flags, str(script)]
    agents = [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    try:
        outputs = [agent.communicate(timeout=120) for agent in agents]
    finally:
        for agent in agents:
            agent.kill()
    return [(agent.returncode, *output) for agent, output in zip(agents, outputs, strict=True)]


def traceback(last: str) -> str:
    return f'Traceback (most recent call last):\n  File "a.py", line 1, in <module>\n    f()\n{last}\n'


def failure(rank: int, time: float, stderr: str = "", exit_code: int = 1, **more: Any) -> RankFailure:
    return RankFailure(rank=rank, pid=100 + rank, exit_code=exit_code, time=time, stderr=stderr, **more)


def test_the_traceback_of_an_unmodified_script_comes_last(launcher: Any) -> None:
    done = launcher.run(RAISES, "--nproc-per-node", "4")
    assert done.returncode == 1
    lines = done.stderr.splitlines()
    start = next(number for number, line in enumerate(lines) if "failed first" in line)
    assert lines[start].startswith("rank 2 (")
    assert lines[start].endswith(": ValueError: boom on two")
    assert lines[start - 1] == "ranks 0, 1, 3 were ended by the launcher"
    assert lines[start + 1] == "Traceback (most recent call last):"
    assert lines[-1] == "ValueError: boom on two"
    assert "procgroup" not in "".join(lines[start + 1 :])


@pytest.mark.parametrize("code", [1, 2, 17, 255])
def test_the_exit_code_is_the_failing_rank_s(launcher: Any, code: int) -> None:
    source = f"import os, sys\nif os.environ['RANK'] == '1': sys.exit({code})"
    done = launcher.run(source, "--nproc-per-node", "2")
    assert done.returncode == code
    assert f"failed first: exit code {code}" in done.stderr


def test_a_signal_is_named_and_gives_128_more(launcher: Any) -> None:
    done = launcher.run("import os, signal; os.kill(os.getpid(), signal.SIGKILL)")
    assert done.returncode == 128 + signal.SIGKILL
    assert "failed first: killed by SIGKILL; its peak memory was " in done.stderr
    assert "no out-of-memory kill was seen" in done.stderr


def test_a_crash_shows_the_stack_of_faulthandler(launcher: Any) -> None:
    done = launcher.run("import ctypes\ndef crash(): ctypes.string_at(0)\ncrash()")
    assert done.returncode == 128 + signal.SIGSEGV
    report = done.stderr[done.stderr.index("failed first: killed by SIGSEGV") :]
    assert "Fatal Python error: Segmentation fault" in report
    assert "in crash" in report


def test_the_earliest_of_several_failures_is_the_first(launcher: Any) -> None:
    source = """
        rank = int(os.environ["RANK"])
        meeting.reach(f"started {rank}")
        for word in [f"over {rank + 1}"] if rank < 2 else ["started 0", "started 1"]:
            meeting.wait_for(word)
        atexit.register(say_when_read, f"over {rank}")  # when its traceback has been written
        raise ValueError(f"rank {rank}")
    """
    lines = run_after_each_other(launcher, source, 3)
    assert lines[-1] == "ValueError: rank 2"
    order = [line.split(" (")[0] for line in lines if "failed after that" in line]
    assert order == ["rank 1", "rank 0"]


def test_a_slow_end_does_not_hide_who_raised_first(launcher: Any) -> None:
    source = """
        if os.environ["RANK"] == "0":
            atexit.register(meeting.wait_until_collected, "raises, too")
            atexit.register(say_when_read, "over")
            raise ValueError("the cause")
        meeting.wait_for("over")
        meeting.reach("raises, too")
        raise OSError("the consequence")
    """
    assert run_after_each_other(launcher, source, 2)[-1] == "ValueError: the cause"


def test_a_rank_that_lost_its_peer_is_not_the_cause_even_when_it_ends_earlier(launcher: Any) -> None:
    source = """
        import procgroup
        from procgroup.errors import PeerLost

        @procgroup.record
        def main():
            if os.environ["RANK"] == "0":
                meeting.wait_for("started")
                atexit.register(say_when_read, "over")
                raise PeerLost(peer=1, pid=7, how="gone", op="barrier", sequence=1, group="0", rank=0, size=2)
            meeting.reach("started")
            meeting.wait_until_collected("over")
            raise ValueError("the cause")

        main()
    """
    lines = run_after_each_other(launcher, source, 2)
    assert lines[-1] == "ValueError: the cause"
    assert any(line.startswith("rank 0 (") and "PeerLost: barrier #1" in line for line in lines)


def test_a_syntax_error_is_named(launcher: Any) -> None:
    done = launcher.run("def f(:\n    pass")
    assert "failed first: SyntaxError: invalid syntax" in done.stderr


def test_chained_tracebacks_stay_together() -> None:
    chain = (
        traceback("KeyError: 'a'")
        + "\nDuring handling of the above exception, another exception occurred:\n\n"
        + traceback("ValueError: b")
        + "\nThe above exception was the direct cause of the following exception:\n\n"
        + traceback("OSError: c")
    )
    found = failure(0, 1.0, "warning\n" + traceback("IndexError: handled") + "more\n" + chain)
    assert found.evidence == chain
    assert found.reason == "OSError: c"


def test_a_logged_traceback_is_not_the_reason_of_another_exit_code() -> None:
    found = failure(0, 1.0, traceback("ValueError: logged"), exit_code=3)
    assert found.reason == "exit code 3"


def test_a_message_of_several_lines_is_shown_whole_and_headed_by_its_first() -> None:
    found = failure(0, 1.0, traceback("ValueError: one\ntwo\nthree"))
    assert found.reason == "ValueError: one"
    assert found.evidence.endswith("two\nthree\n")


def blaming(rank: int, message: str) -> RankFailure:
    record = ErrorRecord(message, traceback(message), origin=Origin(PEER, 1 - rank))
    return failure(rank, 1.0, traceback(message), record=record)


def test_failures_that_blame_another_are_secondary() -> None:
    blamed = blaming(1, "RuntimeError: as torch puts it")
    cause = failure(0, 9.0, traceback("ValueError: b"))
    assert first_failure([blamed, cause]) is cause
    assert first_failure([blamed]) is blamed


def test_memory_evidence_is_told_for_sigkill_only() -> None:
    kills = OutOfMemoryKills(group=1, host=1)
    killed = failure(0, 1.0, exit_code=-9, peak_memory=3 << 30, kills=kills)
    assert killed.reason == (
        "killed by SIGKILL; its peak memory was 3.0 GiB; "
        "the kernel killed 1 process(es) of this control group for want of memory"
    )
    assert failure(0, 1.0, exit_code=-15, peak_memory=3 << 30, kills=kills).reason == "killed by SIGTERM"


def test_the_report_is_one_line_per_other_rank() -> None:
    text = describe([failure(1, 2.0, "x\n" * 40, exit_code=4), failure(0, 1.0, exit_code=3)], [2], [], "node7")
    assert text == (
        "rank 1 (pid 101) failed after that: exit code 4\n"
        "rank 2 was ended by the launcher\n"
        "rank 0 (node7, pid 100) failed first: exit code 3\n"
    )


def test_a_rank_that_left_early_is_told_when_another_only_lost_its_peer() -> None:
    lost = blaming(0, "PeerLost: lost rank 1")
    assert "rank 1 had ended with exit status 0\n" in describe([lost], [], [1], "node7")
    cause = failure(0, 5.0, traceback("ValueError: mine"))
    assert "rank 1" not in describe([cause], [], [1], "node7")


def test_the_rank_that_a_process_group_writes_before_a_traceback_is_left_out() -> None:
    prefixed = "".join(f"[rank2]: {line}\n" for line in traceback("procgroup.errors.PeerLost: rank 0").splitlines())
    found = failure(2, 1.0, "noise\n" + prefixed)
    assert found.evidence == traceback("procgroup.errors.PeerLost: rank 0")
    assert found.reason == "procgroup.errors.PeerLost: rank 0"


MISMATCH = """
import numpy as np
import procgroup as dist
dist.init_process_group()
dist.all_reduce(np.ones(4 + dist.get_rank()))
"""


def test_a_mismatch_is_reported_once_beside_what_each_rank_says(launcher: Any) -> None:
    done = launcher.run(MISMATCH, "--nproc-per-node", "2")
    assert done.stderr.count("the ranks made different calls") == 3, "of each rank, and of the report"
    assert "[rank0]" not in done.stderr and "[rank 0] Traceback" in done.stderr
    assert "failed after that: the same CollectiveMismatch" in done.stderr


def test_every_agent_ends_with_the_first_failing_rank_s_own_traceback(launcher: Any) -> None:
    logs = launcher.directory / "logs"
    flags = ["--max-restarts", "1", "--log-dir", str(logs)]
    ended = run_agents(launcher.script(FAILS_ON_THE_LAST_RANK), *flags)
    for status, _, stderr in ended:
        assert status == 1
        assert stderr.endswith("ValueError: boom of three\n")
        assert stderr.count(f"logs are kept in {logs}/job") == 1
        report = stderr[stderr.rindex(") failed first: ") :].splitlines()
        assert report[1] == "Traceback (most recent call last):"
        consequences = [line for line in stderr.splitlines() if "failed after that: " in line]
        assert all("rank 3 failed: ValueError" in line for line in consequences)
        assert stderr.splitlines().count(report[1]) == 1, "the others' tracebacks have a prefix"
    host = os.uname().nodename
    shown = "".join(stdout for _, stdout, _ in ended)
    for rank in range(4):
        for attempt in range(2):
            assert f"[rank {rank} {host}] attempt {attempt}\n" in shown
            kept = logs / "job" / f"attempt_{attempt}" / str(rank) / "stdout.log"
            assert kept.read_text() == f"attempt {attempt}\n"


def test_a_rank_without_free_file_descriptors_says_why_it_ends(launcher: Any) -> None:
    script = launcher.script(OPENS_TOO_MANY_FILES)
    done = run_command([sys.executable, "-c", PATIENT_LAUNCHER, "run", "--nproc-per-node", "3", str(script)])
    place = f"OSError: [Errno 24] Too many open files: '/dev/null' ({script.name}:12)"
    assert done.stderr.count(f"rank 1 failed: {place}. No array was changed.") == 2 + 1, done.stderr
    assert "ranks 0, 2 failed after that, having lost rank 1: PeerFailed" in done.stderr
    assert "Error in sys.excepthook" not in done.stderr
    report = done.stderr[done.stderr.index("failed first: ") :].splitlines()
    assert report[0] == "failed first: OSError: [Errno 24] Too many open files: '/dev/null'"
    assert report[-1] == "OSError: [Errno 24] Too many open files: '/dev/null'"
    assert str(script) in report[2] and len([line for line in report if line.startswith("Traceback")]) == 1
