"""The examples for GPUs: on stand-ins of GPUs, of torch's "cuda" and of CuPy, on CPUs, and without what they need."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from subprocess import CompletedProcess

import pytest
from nccl import gpu_arrays, stand_ins
from torch_gpus import stand_in_torch

from world import run_command

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"

# The part of CuPy that the example uses.
CUPY = """
import copy
from types import SimpleNamespace
import numpy as np
from nccl import gpu_arrays

def full(count, value, dtype):
    return Array.of(np.full(count, value, dtype))

class Array(gpu_arrays.GpuArray):
    def __getitem__(self, part):
        view = copy.copy(self)
        view.shape = (part.stop,)
        return view

class Device:
    def __init__(self, number):
        self.number = number
    def use(self):
        gpu_arrays.start(self.number)

arange = np.arange
cuda = SimpleNamespace(Device=Device)
"""


def launch(name: str, size: int, **environment: str) -> CompletedProcess[str]:
    command = [sys.executable, "-m", "procgroup", "run", "--nproc-per-node", str(size), str(EXAMPLES / f"{name}.py")]
    return run_command(command, environment=environment)


@pytest.mark.skipif(bool(gpu_arrays.MISSING), reason=gpu_arrays.MISSING)
def test_cupy_s_arrays_are_reduced_in_groups(tmp_path: Path) -> None:
    (tmp_path / "cupy.py").write_text(CUPY)
    path = f"{tmp_path}:{Path(__file__).parents[1]}"
    done = launch("cupy_groups", 3, **stand_ins.environment(gpus=3), PYTHONPATH=path)
    assert done.returncode == 0, done.stdout + done.stderr
    for rank, kind, total in ((0, "even", 2.0), (1, "odd", 1.0), (2, "even", 2.0)):
        assert f"rank {rank}: all ranks: {[6.0] * 4}" in done.stdout
        assert f"rank {rank}: the {kind} ranks: {[total] * 4}" in done.stdout
        assert f"rank {rank}: the largest is [2.0], and meanwhile 332833500" in done.stdout


@pytest.mark.skipif(importlib.util.find_spec("cupy") is not None, reason="CuPy is here")
def test_without_cupy_the_example_says_what_it_needs() -> None:
    done = run_command([sys.executable, str(EXAMPLES / "cupy_groups.py")])
    assert done.returncode == 1
    assert re.fullmatch(r"This example needs CuPy and a GPU for each process: pip install .*\n", done.stderr)


def test_a_compiled_step_of_jax_gives_all_ranks_the_same_weights() -> None:
    pytest.importorskip("jax")
    done = launch("jax_gpu", 2, JAX_PLATFORMS="cpu")
    assert done.returncode == 0, done.stdout + done.stderr
    for rank in (0, 1):
        assert f"rank {rank} on a CPU: weights [1.0, -2.0, 0.5], loss below 1e-3: True" in done.stdout


@pytest.mark.torch
def test_a_network_of_pytorch_is_trained_on_gpus_and_saved() -> None:
    done = launch("train_gpu", 2, **stand_in_torch.environment(gpus=2))
    assert done.returncode == 0, done.stdout + done.stderr
    losses = dict(re.findall(r"rank \d of 2 on (cuda:\d): loss (\S+) after 6 epochs", done.stdout))
    assert losses.keys() == {"cuda:0", "cuda:1"} and len(set(losses.values())) == 1
    assert float(losses["cuda:0"]) < 0.3
