"""Communication hooks: average a bucket of gradients with fewer bytes, at a documented loss of precision.

Register one with ``DistributedDataParallel.register_comm_hook(state, hook)``. Hooks that PyTorch has too have the same
names and arguments.
"""

from procgroup import bound_on_first_use

_MODULE_OF_NAME = {
    "BlockQuantizedState": "block_quantized",
    "OuterSteps": "local_steps",
    "PeriodicModelAverager": "local_steps",
    "PostLocalSGDOptimizer": "local_steps",
    "PostLocalSGDState": "local_steps",
    "PowerSGDState": "power_sgd",
    "TopKState": "top_k",
    "allreduce_hook": "default_hooks",
    "bf16_compress_hook": "default_hooks",
    "bf16_compress_wrapper": "default_hooks",
    "block_quantized_hook": "block_quantized",
    "fp16_compress_hook": "default_hooks",
    "fp16_compress_wrapper": "default_hooks",
    "post_localSGD_hook": "local_steps",
    "powerSGD_hook": "power_sgd",
    "top_k_hook": "top_k",
}

__all__ = list(_MODULE_OF_NAME)

__getattr__, __dir__ = bound_on_first_use(__name__, _MODULE_OF_NAME)
