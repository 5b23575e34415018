"""A world of one process, described by the environment. Every program here is the same on one rank and on many.

MASTER_ADDR=127.0.0.1 MASTER_PORT=29500 RANK=0 WORLD_SIZE=1 python examples/one_process.py
"""

import procgroup as dist

dist.init_process_group("gloo")
print(f"rank {dist.get_rank()} of {dist.get_world_size()}, backend {dist.get_backend()}")
dist.destroy_process_group()
