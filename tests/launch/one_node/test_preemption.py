"""A node that is to be taken away: its ranks learn it, save their work and end; so do the others'."""

from __future__ import annotations

import signal
import subprocess
import sys
from typing import Any

import procgroup
from procgroup.launch.ranks import preemption
from procgroup.launch.ranks.preemption import Notice

SAVES = """
    import os, pathlib, time
    import procgroup as dist
    assert dist.preempted() is None
    print("pid", os.getpid(), flush=True)
    while (seconds := dist.preempted()) is None:
        time.sleep(0.01)
    print("saving", 0 < seconds <= 40, flush=True)
"""
CALLED_BACK = """
    import os, time
    import procgroup as dist
    dist.on_preemption(lambda seconds: print("called", seconds > 0, flush=True) or os._exit(0))
    print("pid", os.getpid(), flush=True)
    time.sleep(60)
"""


def test_ranks_that_look_for_the_notice_end_by_themselves(start_launcher: Any) -> None:
    running = start_launcher(SAVES, "-n", "2", "--shutdown-timeout", "40")
    running.wait_for("pid", 2)
    running.process.send_signal(signal.SIGTERM)
    assert running.process.wait(timeout=20) == 128 + signal.SIGTERM
    assert running.stdout.count("saving True") == 2


def test_a_callback_gets_the_seconds(start_launcher: Any) -> None:
    running = start_launcher(CALLED_BACK, "--shutdown-timeout", "40")
    running.wait_for("pid")
    running.process.send_signal(signal.SIGTERM)
    assert running.process.wait(timeout=20) == 128 + signal.SIGTERM
    assert "called True" in running.stdout


def test_ranks_that_do_not_end_are_killed_when_the_time_is_over(start_launcher: Any, gone: Any) -> None:
    source = """
        import os, time
        import procgroup as dist
        dist.preempted()
        print("pid", os.getpid(), flush=True)
        time.sleep(60)
    """
    running = start_launcher(source, "--shutdown-timeout", "0.3")
    running.wait_for("pid")
    running.process.send_signal(signal.SIGTERM)
    assert running.process.wait(timeout=20) == 128 + signal.SIGTERM
    gone(running.pids())


def test_ranks_that_do_not_look_get_the_signal(start_launcher: Any) -> None:
    running = start_launcher("import os, time; print('pid', os.getpid(), flush=True); time.sleep(60)")
    running.wait_for("pid")
    running.process.send_signal(signal.SIGTERM)
    assert running.process.wait(timeout=20) == 128 + signal.SIGTERM


def test_without_a_launcher_there_is_no_notice() -> None:
    source = "import procgroup as dist; dist.on_preemption(print); print(dist.preempted())"
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, timeout=120)
    assert (done.stdout, done.stderr) == ("None\n", "")


def test_a_descriptor_of_that_number_that_is_something_else_is_no_notice(monkeypatch: Any, tmp_path: Any) -> None:
    with (tmp_path / "file").open("w+b") as file:
        file.write(bytes(64))
        file.flush()
        monkeypatch.setenv("PROCGROUP_NOTICE", str(file.fileno()))
        monkeypatch.setattr(preemption, "_page", [])
        assert procgroup.preempted() is None


def test_a_notice_is_wanted_once_a_rank_has_looked(monkeypatch: Any) -> None:
    notice = Notice()
    monkeypatch.setenv("PROCGROUP_NOTICE", str(notice.descriptor))
    monkeypatch.setattr(preemption, "_page", [])
    assert not notice.is_wanted
    assert procgroup.preempted() is None
    assert notice.is_wanted
    notice.give(30)
    assert 0 < (procgroup.preempted() or 0) <= 30
    preemption._page.clear()
    notice.close()
