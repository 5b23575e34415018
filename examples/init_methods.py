"""Four ways in which ranks find each other: the environment, an address, a file, and a store of your own.

python -m procgroup run --nproc-per-node 2 examples/init_methods.py
"""

import os
import tempfile
from pathlib import Path

import numpy as np

import procgroup as dist

RANK, SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def check(method: str) -> None:
    """Use the group that was just made, and end it."""
    number = np.array([RANK + 1])
    dist.all_reduce(number)
    assert number[0] == SIZE * (SIZE + 1) // 2
    print(f"rank {RANK}: {method} works", flush=True)
    dist.destroy_process_group()


def agree_on(text: str) -> str:
    """Return rank 0's text on every rank."""
    letters = np.zeros(200, np.uint8)
    letters[: len(text)] = np.frombuffer(text.encode(), np.uint8)
    dist.broadcast(letters, src=0)
    return bytes(letters).rstrip(b"\0").decode()


dist.init_process_group("gloo", init_method="env://")
folder = agree_on(tempfile.mkdtemp() if RANK == 0 else "")
listener = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) if RANK == 0 else None
port = int(agree_on(str(listener.port) if listener else ""))
check("env://")

dist.init_process_group("gloo", init_method=f"file://{folder}/ranks", rank=RANK, world_size=SIZE)
check("file://")

store = listener or dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
dist.init_process_group("gloo", store=store, rank=RANK, world_size=SIZE)
check("a store")

# A store wins over the environment, but store and init_method exclude each other.
try:
    dist.init_process_group("gloo", store=store, init_method="env://", rank=RANK, world_size=SIZE)
except (AssertionError, ValueError) as error:
    print(f"rank {RANK}: refused: {error}", flush=True)

# A method from the environment, when the program names none.
os.environ["TORCH_DISTRIBUTED_INIT_METHOD"] = f"file://{folder}/default"
dist.init_process_group("gloo", rank=RANK, world_size=SIZE)
dist.barrier()
check("TORCH_DISTRIBUTED_INIT_METHOD")
if RANK == 0:
    for file in Path(folder).glob("*"):
        file.unlink(missing_ok=True)
    Path(folder).rmdir()
