"""The template that many programs start from: processes of multiprocessing, each of which joins the group.

python examples/multiprocessing_template.py
"""

import multiprocessing
import os
import socket
from collections.abc import Callable

import numpy as np

import procgroup as dist


def run(rank: int, size: int) -> None:
    """Add up the ranks' numbers: what you replace with your own program."""
    number = np.array([rank + 1.0])
    dist.all_reduce(number)
    print(f"rank {rank} of {size} has {number[0]:g}", flush=True)


def init_process(rank: int, size: int, port: int, function: Callable[[int, int], None]) -> None:
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    os.environ["MASTER_PORT"] = str(port)
    dist.init_process_group("gloo", rank=rank, world_size=size)
    function(rank, size)
    dist.destroy_process_group()


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


if __name__ == "__main__":
    multiprocessing.set_start_method("spawn")
    size, port = 2, free_port()
    processes = [multiprocessing.Process(target=init_process, args=(rank, size, port, run)) for rank in range(size)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
        assert process.exitcode == 0
