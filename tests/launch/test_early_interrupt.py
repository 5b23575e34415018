"""Ctrl-C while a command of the launcher is still importing its modules."""

from __future__ import annotations

import subprocess
import sys

import pytest

from launch.conftest import Launcher
from procgroup.launch.hosts.agent_channel import Assignment

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


@pytest.mark.parametrize(
    ("module", "interrupted", "arguments"),
    [
        ("procgroup", "procgroup.launch.run", ["run"]),
        ("procgroup.launch", "procgroup.launch.flags", []),
        (
            "procgroup.launch.hosts.remote_agent",
            "procgroup.launch.nodes.job_plan",
            ["--nnodes=1", "--rdzv-backend=c10d"],
        ),
    ],
)
def test_an_interrupt_during_an_import_ends_the_command_without_a_traceback(
    launcher: Launcher, module: str, interrupted: str, arguments: list[str]
) -> None:
    script = launcher.script("print('ran')")
    program = launcher.script(INTERRUPTED, "interrupted.py")
    given = Assignment(0, "host1", str(launcher.directory), {}, 0).to_line() + b"127.0.0.1:0\n"
    done = subprocess.run(
        [sys.executable, program, module, interrupted, *arguments, script],
        input=given,
        capture_output=True,
        timeout=30,
    )
    assert (done.returncode, done.stderr) == (130, b"")
    assert b"ran" not in done.stdout
