"""Heat that spreads over a plane, which the ranks share as a mesh: each step exchanges the edges of their parts.

python -m procgroup run --nproc-per-node 4 examples/heat_on_mesh.py

The plane is a ring in one direction and has cold borders in the other. One call exchanges the edges on all four sides.
Rank 0 computes the whole plane, too, and finds the same temperatures to the bit.
"""

import numpy as np

import procgroup as dist

MESH, PERIODIC = (2, 2), (False, True)
ROWS, COLUMNS = 24, 32
STEPS = 200


def step(field: np.ndarray) -> None:
    """Advance all cells but those of the halo."""
    inner = field[1:-1, 1:-1]
    around = field[:-2, 1:-1] + field[2:, 1:-1] + field[1:-1, :-2] + field[1:-1, 2:]
    inner += 0.2 * (around - 4 * inner)


def initial() -> np.ndarray:
    """Return the plane with its halo, and one warm spot."""
    plane = np.zeros((ROWS + 2, COLUMNS + 2))
    plane[4:10, 1:6] = 100.0
    return plane


dist.init_process_group("gloo")
rank = dist.get_rank()
row, column = divmod(rank, MESH[1])
rows, columns = ROWS // MESH[0], COLUMNS // MESH[1]
field = initial()[row * rows : (row + 1) * rows + 2, column * columns : (column + 1) * columns + 2].copy()

halos = [field[0, 1:-1], field[-1, 1:-1], field[1:-1, 0], field[1:-1, -1]]
edges = [field[1, 1:-1], field[-2, 1:-1], field[1:-1, 1], field[1:-1, -2]]
for _ in range(STEPS):
    dist.neighbor_all_to_all(halos, edges, MESH, PERIODIC)
    step(field)

part = field[1:-1, 1:-1].copy()
parts = [np.empty_like(part) for _ in range(dist.get_world_size())] if rank == 0 else None
dist.gather(part, parts)
if parts is not None:
    together = np.block([parts[:2], parts[2:]])
    alone = initial()
    for _ in range(STEPS):
        alone[:, 0], alone[:, -1] = alone[:, -2], alone[:, 1]
        step(alone)
    assert np.array_equal(together, alone[1:-1, 1:-1])
    print(f"after {STEPS} steps the warmest cell has {together.max():.2f} degrees, as on one rank")
dist.destroy_process_group()
