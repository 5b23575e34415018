"""Under the launcher: it sets the whole environment, so that init_process_group needs nothing but the backend.

python -m procgroup run --nproc-per-node 2 examples/under_run.py
python -m procgroup run --standalone --nproc_per_node=2 examples/under_run.py
python -m procgroup run --nproc_per_node=2 --nnodes=1 --node_rank=0 --master_addr=127.0.0.1 --master_port=29500 examples/under_run.py
"""  # noqa: E501

import numpy as np

import procgroup as dist

dist.init_process_group("gloo")
rank = np.array([dist.get_rank()])
dist.all_reduce(rank, op=dist.ReduceOp.MAX)
print(f"rank {dist.get_rank()} of {dist.get_world_size()}: the highest rank is {rank[0]}")
dist.destroy_process_group()
