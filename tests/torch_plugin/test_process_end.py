"""How a PyTorch program on backend "procgroup" ends: as a whole process, interpreter and all."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from subprocess import CompletedProcess

import pytest

import procgroup
from world import run_command

pytestmark = pytest.mark.torch

SOURCES = str(Path(procgroup.__file__).parent.parent)

BEGINNING = """
import time
import torch, torch.distributed as dist
from procgroup import torch_plugin
torch_plugin.register()
dist.init_process_group("procgroup")
"""


def run_program(folder: Path, source: str) -> CompletedProcess[str]:
    """Run a program on two ranks."""
    (folder / "program.py").write_text(BEGINNING + source)
    paths = os.pathsep.join(path for path in (SOURCES, os.environ.get("PYTHONPATH", "")) if path)
    command = [sys.executable, "-m", "procgroup", "run", "--nproc-per-node", "2", str(folder / "program.py")]
    return run_command(command, environment={"PYTHONPATH": paths})


CALLBACK = """
def take_long(_):
    end = time.monotonic() + 0.5
    while time.monotonic() < end:
        torch.ones(1).sum()
    print("callback over", flush=True)

if dist.get_rank() == 1:
    time.sleep(0.3)
future = dist.all_reduce(torch.ones(1), async_op=True).get_future().then(take_long)
"""


def test_a_program_ends_after_the_callbacks_that_run(tmp_path: Path) -> None:
    done = run_program(tmp_path, CALLBACK + "if dist.get_rank() == 0:\n    dist.destroy_process_group()\n")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("callback over") == 2
    # procgroup says whom it waits for, where another rank is late.
    said = re.compile(r"(\[rank ?\d\]:? )?procgroup WARNING: ")
    assert [line for line in done.stderr.splitlines() if not said.match(line)] == []


FORK = """
import os, threading, time
from procgroup.torch_plugin import callbacks

begun, may_end, over = threading.Event(), threading.Event(), threading.Event()
callbacks.run(begun.set)
while not callbacks._threads._idle:
    time.sleep(0.01)
for is_busy in (False, True):
    if is_busy:
        begun.clear()
        callbacks.run(lambda: begun.set() or may_end.wait(60))
        assert begun.wait(60)
    child = os.fork()
    if child == 0:
        callbacks.run(over.set)
        print("callback in the child:", over.wait(20), flush=True)
        os._exit(0)
    os.waitpid(child, 0)
    print("the child has ended", flush=True)
may_end.set()
"""


def test_a_forked_child_has_callbacks_of_its_own_whether_its_parent_s_are_idle_or_busy() -> None:
    done = run_command([sys.executable, "-c", FORK], environment={"PYTHONPATH": SOURCES})
    assert done.stdout == 2 * "callback in the child: True\nthe child has ended\n"
    assert done.stderr == ""


def test_an_exception_and_not_a_callback_decides_how_a_program_ends(tmp_path: Path) -> None:
    done = run_program(tmp_path, CALLBACK + "raise ValueError('of the program')")
    assert "ValueError: of the program" in done.stderr
    assert "terminate called" not in done.stdout + done.stderr
    assert done.stdout.count("callback over") == 2
