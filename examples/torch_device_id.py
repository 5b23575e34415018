"""device_id, the GPU that a rank keeps to: what of it is there on a machine with GPUs, and on one without.

python -m procgroup run --nproc-per-node 2 examples/torch_device_id.py

NCCL, the backend of tensors on GPUs, connects the ranks inside init_process_group where device_id is given, and at the
first collective otherwise, after which a rank must keep its GPU. Beside the backend procgroup of torch.distributed NCCL
waits for the first collective. A GPU that is not there both refuse, which the program shows where there is not one for
each rank.
"""

import os

import torch
import torch.distributed

import procgroup

rank, local_rank = int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"])
has_gpu = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
gpu = torch.device("cuda", local_rank if has_gpu else torch.cuda.device_count() + local_rank)

for device in (torch.device("cpu"), gpu):
    try:
        procgroup.init_process_group("cpu:gloo,cuda:nccl", device_id=device)
    except procgroup.DistBackendError as error:
        if has_gpu:
            raise
        print(f"rank {rank}: procgroup with device_id={device}, where there is none: {error}")
        continue
    ones = torch.ones(2)
    procgroup.all_reduce(ones)
    print(f"rank {rank}: procgroup with device_id={device}: {ones.tolist()}, backends {procgroup.get_backend_config()}")
    procgroup.destroy_process_group()

try:
    torch.distributed.init_process_group("cpu:procgroup,cuda:nccl", device_id=gpu)
except (RuntimeError, ValueError) as error:
    if has_gpu:
        raise
    print(f"rank {rank}: torch.distributed with device_id={gpu}, where there is none: {type(error).__name__}: {error}")
    torch.distributed.init_process_group("cpu:procgroup,cuda:nccl")
for device in [torch.device("cpu")] + [gpu] * has_gpu:
    ones = torch.ones(2, device=device)
    torch.distributed.all_reduce(ones)
    print(f"rank {rank}: torch.distributed on {device}: {ones.tolist()}")
torch.distributed.destroy_process_group()
