"""send and recv wait; isend and irecv return at once a Work to wait for. Leave the array alone until then.

python -m procgroup run --nproc-per-node 2 examples/point_to_point.py
"""

import numpy as np

import procgroup as dist

dist.init_process_group("gloo")
rank = dist.get_rank()

number = np.zeros(1)
if rank == 0:
    number += 1
    dist.send(number, dst=1)
else:
    sender = dist.recv(number, src=0)
    assert sender == 0
print(f"rank {rank} has {number[0]:g}")

image = np.full((512, 512), 7.0) if rank == 0 else np.zeros((512, 512))
work = dist.isend(image, dst=1) if rank == 0 else dist.irecv(image, src=0)
work.wait()
assert work.is_completed()
assert (image == 7).all()
print(f"rank {rank} has the image")
dist.destroy_process_group()
