"""Rank 1 of a world of two scripts: the environment says who it is. See two_scripts_keywords.py."""

import numpy as np

import procgroup as dist

dist.init_process_group("gloo")
message = np.zeros(3)
dist.broadcast(message, src=0)
print(f"rank {dist.get_rank()} received {message}")
dist.destroy_process_group()
