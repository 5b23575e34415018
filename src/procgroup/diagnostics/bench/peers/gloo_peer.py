"""torch.distributed's Gloo as a peer: ``python -m procgroup.diagnostics.bench.peers.gloo_peer SOCKET RANKS``.

It starts its ranks itself, unless RANK and WORLD_SIZE say that somebody else does.
"""

from __future__ import annotations

import os
import sys

from procgroup.diagnostics.bench.rank_loop import Driver, serve, torch_operations


def run_rank(socket_path: str, rank: int, ranks: int) -> None:
    driver = Driver(socket_path)
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{socket_path}.rendezvous", rank=rank, world_size=ranks)
    known = torch_operations(dist, dist.reduce_scatter_tensor, torch.from_numpy)
    serve(driver, rank, ranks, known, f"torch {torch.__version__}")
    dist.destroy_process_group()


def start_ranks(socket_path: str, ranks: int) -> int:
    """Fork the ranks before torch is loaded, and return the worst of their exit statuses."""
    children = []
    for rank in range(ranks):
        child = os.fork()
        if child == 0:
            run_rank(socket_path, rank, ranks)
            return 0
        children.append(child)
    return max(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) != 0 for child in children)


if __name__ == "__main__":
    if "RANK" in os.environ:
        run_rank(sys.argv[1], int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
        sys.exit()
    sys.exit(start_ranks(sys.argv[1], int(sys.argv[2])))
