"""Under a launcher: it sets the whole environment, so that init_process_group needs nothing but the backend.

python -m procgroup run --nproc-per-node 2 examples/under_run.py
python -m procgroup run --standalone --nproc_per_node=2 examples/under_run.py
python -m procgroup run --nproc_per_node=2 --nnodes=1 --node_rank=0 --master_addr=127.0.0.1 --master_port=29500 examples/under_run.py
python -m procgroup run --standalone --nproc_per_node=2 --rdzv_id=demo --max_restarts=0 examples/under_run.py torch
python -m torch.distributed.run --standalone --nproc_per_node=2 examples/under_run.py torch
python -m torch.distributed.run --nproc_per_node=2 --rdzv_id=demo --rdzv_backend=c10d --rdzv_endpoint=localhost:29500 examples/under_run.py torch

The arrays are NumPy's, or of the library that is named at the end. The last two commands are torchrun's. `procgroup run`
takes torchrun's flags; those for several nodes and for restarts it refuses in words, as it has one node, once, so far.
"""  # noqa: E501

import importlib
import sys

import procgroup as dist

library = importlib.import_module(sys.argv[1] if len(sys.argv) > 1 else "numpy")

dist.init_process_group("gloo")
rank = library.asarray([dist.get_rank()])
dist.all_reduce(rank, op=dist.ReduceOp.MAX)
print(f"rank {dist.get_rank()} of {dist.get_world_size()}: the highest rank is {int(rank[0])}")
dist.destroy_process_group()
