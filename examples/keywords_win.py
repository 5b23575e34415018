"""Keywords win over the environment: WORLD_SIZE says 2, the program says 1, and it is a world of one.

MASTER_ADDR=127.0.0.1 MASTER_PORT=29500 RANK=1 WORLD_SIZE=2 python examples/keywords_win.py
"""

import procgroup as dist

dist.init_process_group("gloo", rank=0, world_size=1)
print(f"rank {dist.get_rank()} of {dist.get_world_size()}")
dist.destroy_process_group()
