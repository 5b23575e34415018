"""The small program that a rank starts as: what it sees to before it becomes the rank's command."""

from __future__ import annotations

import signal
import subprocess

import pytest

from procgroup.launch.ranks.rank_process import dying_with_this_process
from world import run_command


def test_a_rank_whose_launcher_has_ended_before_it_began_is_killed() -> None:
    launcher = subprocess.Popen(["true"])
    launcher.wait()
    program, _, *rest = dying_with_this_process(["echo", "the rank runs"])
    done = run_command([program, str(launcher.pid), *rest])
    assert (done.returncode, done.stdout) == (-signal.SIGKILL, "")


@pytest.mark.parametrize("name", ["PIPE", "XFSZ", "INT"])
def test_a_signal_that_the_launcher_ignores_ends_a_rank_all_the_same(name: str) -> None:
    rank = dying_with_this_process(["sh", "-c", f"kill -s {name} $$; echo the rank runs on"])
    launcher = f"ulimit -c 0; trap '' {name}; exec \"$@\""  # no core file
    done = run_command(["sh", "-c", launcher, "launcher", *rank])
    assert (done.returncode, done.stdout) == (-getattr(signal, f"SIG{name}"), "")
