"""DistributedDataParallel: train one PyTorch module on all ranks, with averaged gradients."""

from procgroup.parallel.ddp.distributed_data_parallel import DistributedDataParallel as DistributedDataParallel
