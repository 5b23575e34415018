"""Under the launch module, which hands the local rank over as an argument, or with --use-env in the environment only.

python -m procgroup.launch --nproc-per-node 2 examples/under_launch.py --steps 3
python -m procgroup.launch --nproc-per-node 2 --use-env examples/under_launch.py --steps 3
python -m procgroup.launch --nproc-per-node 2 --use_env examples/under_launch.py --steps 3 --arrays torch
python -m torch.distributed.launch --nproc-per-node 2 examples/under_launch.py --steps 3 --arrays torch
"""

import argparse
import importlib
import os

import procgroup as dist

options = argparse.ArgumentParser()
options.add_argument("--local-rank", "--local_rank", type=int, default=None)
options.add_argument("--steps", type=int, default=1)
options.add_argument("--arrays", default="numpy", help="the library whose arrays are moved: numpy or torch")
arguments = options.parse_args()
library = importlib.import_module(arguments.arrays)
local_rank = int(os.environ["LOCAL_RANK"])
assert arguments.local_rank in (None, local_rank)

dist.init_process_group("gloo")
total = library.zeros(1)
for _ in range(arguments.steps):
    step = library.ones(1)
    dist.all_reduce(step)
    total += step
came_by = "the environment" if arguments.local_rank is None else "an argument"
print(f"rank {os.environ['RANK']} of {os.environ['WORLD_SIZE']}: {int(total[0])}; local rank {local_rank} by {came_by}")
dist.destroy_process_group()
