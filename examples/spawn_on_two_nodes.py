"""spawn starts the ranks of one node; two nodes may have different numbers of them: here 1 and 2, in two terminals.

python examples/spawn_on_two_nodes.py --start-rank 0 --nprocs 1 --world-size 3 --init-method tcp://127.0.0.1:29500
python examples/spawn_on_two_nodes.py --start-rank 1 --nprocs 2 --world-size 3 --init-method tcp://127.0.0.1:29500
"""

import argparse

import numpy as np

import procgroup as dist


def run(local_rank: int, start_rank: int, world_size: int, init_method: str) -> None:
    rank = start_rank + local_rank
    dist.init_process_group("gloo", init_method=init_method, rank=rank, world_size=world_size)
    gathered = [np.zeros(1, np.int64) for _ in range(world_size)]
    dist.all_gather(gathered, np.array([rank * rank]))
    print(f"rank {rank} (local rank {local_rank}) gathered {[int(array[0]) for array in gathered]}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    options = argparse.ArgumentParser()
    options.add_argument("--start-rank", type=int, required=True)
    options.add_argument("--nprocs", type=int, required=True)
    options.add_argument("--world-size", type=int, required=True)
    options.add_argument("--init-method", required=True)
    node = options.parse_args()
    dist.spawn(run, args=(node.start_rank, node.world_size, node.init_method), nprocs=node.nprocs)
