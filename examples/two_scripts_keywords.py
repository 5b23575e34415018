"""Rank 0 of a world of two scripts: it says by keywords who it is. Start both in any order, in two terminals:

MASTER_ADDR=127.0.0.1 MASTER_PORT=29500 python examples/two_scripts_keywords.py
MASTER_ADDR=127.0.0.1 MASTER_PORT=29500 RANK=1 WORLD_SIZE=2 python examples/two_scripts_environment.py
"""

import numpy as np

import procgroup as dist

dist.init_process_group("gloo", rank=0, world_size=2)
message = np.array([3.0, 1.0, 4.0])
dist.broadcast(message, src=0)
print(f"rank {dist.get_rank()} sent {message}")
dist.destroy_process_group()
