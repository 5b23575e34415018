"""A rank of a stock PyTorch program that ends with an exception: the others raise its type, text and line at once.

The program imports nothing of procgroup. Its ranks are forked after the imports, which take
most of a start, and end as whole programs do: what counts is how the interpreter ends them.
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest

import procgroup
from world import free_port, run_command

pytestmark = pytest.mark.torch

PROGRAM = """
import gc, os, sys, time
from datetime import timedelta
import torch
import torch._dynamo  # DistributedDataParallel imports it, which takes a second: once for all ranks
import torch.distributed as dist

def fail(*_):
    print(case, "raised", time.monotonic(), flush=True)
    raise ValueError("no such file: a.txt")

def play():
    if case == "irecv":
        dist.irecv(torch.zeros(4), 0, tag=9)
    elif case == "all_reduce":
        dist.all_reduce(torch.ones(4), async_op=True)
    else:
        next(model.parameters()).register_hook(fail)
        step()
    fail()

def step():
    model(torch.ones(2, 4)).sum().backward()

def fork_ranks():
    for rank in range(2):
        if os.fork() == 0:
            return rank
    statuses = [os.wait()[1] for _ in range(2)]
    print(case, "statuses", sorted(map(os.waitstatus_to_exitcode, statuses)), flush=True)

backend = sys.argv[1]
gc.freeze()  # a rank's end takes a second otherwise
os.environ.update(WORLD_SIZE="2", MASTER_ADDR="127.0.0.1")
for case, os.environ["MASTER_PORT"] in zip(("irecv", "all_reduce", "backward"), sys.argv[2:]):
    rank = fork_ranks()
    if rank is not None:
        break
else:
    sys.exit()

os.environ["RANK"] = str(rank)
dist.init_process_group(backend, timeout=timedelta(seconds=60))
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))
step()
if rank == 1:
    play()
try:
    while True:
        step() if case == "backward" else dist.all_reduce(torch.ones(4))
except RuntimeError as error:
    print(case, "told", time.monotonic(), repr(str(error)), flush=True)
"""

LINE = PROGRAM.splitlines().index('    raise ValueError("no such file: a.txt")') + 1


@pytest.mark.parametrize(("backend", "transport"), [("procgroup", "shm"), ("gloo", "tcp")])
def test_an_exception_ends_the_calls_of_the_others(tmp_path: Path, backend: str, transport: str) -> None:
    (tmp_path / "train.py").write_text(PROGRAM)
    make_known(tmp_path)
    paths = [str(tmp_path), str(Path(procgroup.__file__).parent.parent), os.environ.get("PYTHONPATH", "")]
    done = run_command(
        [sys.executable, "train.py", backend, *(str(free_port()) for _ in range(3))],
        environment={
            "PYTHONPATH": os.pathsep.join(path for path in paths if path),
            "PROCGROUP_TRANSPORT": transport,
            "PROCGROUP_REPLACE_GLOO": str(int(backend == "gloo")),
        },
        directory=tmp_path,
        timeout=250,
    )
    output = done.stdout + done.stderr
    for case in ("irecv", "all_reduce", "backward"):
        raised = re.search(rf"{case} raised (\S+)", output)
        told = re.search(rf"{case} told (\S+) (.*)", output)
        assert raised and told and f"{case} statuses [0, 1]" in output, output
        assert f"rank 1 failed: ValueError: no such file: a.txt (train.py:{LINE})" in told[2], told[2]
        assert float(told[1]) - float(raised[1]) < 5, output


def make_known(folder: Path) -> None:
    """Put procgroup's entry point for torch into a folder of PYTHONPATH: the sources alone have none."""
    facts = folder / "procgroup_entry-1.0.dist-info"
    facts.mkdir()
    (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: procgroup-entry\nVersion: 1.0\n")
    (facts / "entry_points.txt").write_text("[torch.backends]\nprocgroup = procgroup.torch_plugin:register\n")
