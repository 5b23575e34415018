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

pytestmark = [pytest.mark.torch, pytest.mark.timeout(120)]

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
    return run_command(command, environment={"PYTHONPATH": paths}, timeout=60)


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


@pytest.mark.parametrize("end", ["pass", "dist.destroy_process_group()"])
def test_a_program_ends_after_the_callbacks_that_run(tmp_path: Path, end: str) -> None:
    done = run_program(tmp_path, CALLBACK + end)
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
if {is_busy}:
    begun.clear()
    callbacks.run(lambda: begun.set() or may_end.wait(60))
    assert begun.wait(60)
child = os.fork()
if child == 0:
    callbacks.run(over.set)
    print("callback in the child:", over.wait(20), flush=True)
else:
    os.waitpid(child, 0)
    may_end.set()
    print("the child has ended")
"""


@pytest.mark.parametrize("is_busy", [False, True], ids=["idle", "busy"])
def test_a_forked_child_has_callbacks_of_its_own(is_busy: bool) -> None:
    program = FORK.format(is_busy=is_busy)
    done = run_command([sys.executable, "-c", program], environment={"PYTHONPATH": SOURCES}, timeout=20)
    assert done.stdout == "callback in the child: True\nthe child has ended\n"
    assert done.stderr == ""


def test_an_exception_and_not_a_callback_decides_how_a_program_ends(tmp_path: Path) -> None:
    done = run_program(tmp_path, CALLBACK + "raise ValueError('of the program')")
    assert "ValueError: of the program" in done.stderr
    assert "terminate called" not in done.stdout + done.stderr
    assert done.stdout.count("callback over") == 2
