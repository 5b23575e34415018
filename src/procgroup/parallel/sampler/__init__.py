"""DistributedSampler: give each rank its own indices of a dataset in every epoch."""

from procgroup.parallel.sampler.distributed_sampler import DistributedSampler as DistributedSampler
