"""A worker that raises or is killed: the others raise an error that names it, and the client's job ends."""

from __future__ import annotations

import pytest
from clients.client_programs import Program, play

SECONDS = 10.0
"""How long after the failure another worker may go on, on a busy machine."""

TORCHRUN = ["{python}", "-m", "torch.distributed.run", "--master-port={port}", "--nproc-per-node=2"]
LAUNCHERS = {"accelerate": TORCHRUN, "transformers": TORCHRUN, "ray": ["{python}"]}


@pytest.mark.slow
@pytest.mark.torch
@pytest.mark.timeout(1600)
@pytest.mark.parametrize("how", ["raise", "kill"])
@pytest.mark.parametrize(
    ("client", "way"),
    [
        ("accelerate", "replaced"),
        ("accelerate", "run"),
        ("transformers", "replaced"),
        ("transformers", "run"),
        ("ray", "replaced"),
        ("ray", "named"),
    ],
)
def test_the_other_workers_name_the_one_that_failed(client: str, way: str, how: str) -> None:
    script = ["{folder}/lost.py", how]
    run = ["--nproc-per-node", "2", *script]
    program = Program(client, "lost", "", command=[*LAUNCHERS[client], *script], run=run, seconds=600)
    played = play(program, way)
    assert played.exit_code != 0
    assert "rank 1" in played.values["error on rank 0"], played.output
    waited = played.values["time of the error on rank 0"] - played.values["time of the failure on rank 1"]
    assert waited < SECONDS, f"the other worker went on for {waited:.1f} s"
