"""Communication hooks: other ways to average a bucket of gradients, which send fewer bytes and say what that costs.

Each is given to ``DistributedDataParallel.register_comm_hook(state, hook)``. Names that torch has too mean the same
here.
"""

from __future__ import annotations

from procgroup.lazy_names import bound_on_first_use

TYPE_CHECKING = False
if TYPE_CHECKING:
    from procgroup.parallel.communication_hooks.block_quantized import BlockQuantizedState as BlockQuantizedState
    from procgroup.parallel.communication_hooks.block_quantized import block_quantized_hook as block_quantized_hook
    from procgroup.parallel.communication_hooks.default_hooks import allreduce_hook as allreduce_hook
    from procgroup.parallel.communication_hooks.default_hooks import bf16_compress_hook as bf16_compress_hook
    from procgroup.parallel.communication_hooks.default_hooks import bf16_compress_wrapper as bf16_compress_wrapper
    from procgroup.parallel.communication_hooks.default_hooks import fp16_compress_hook as fp16_compress_hook
    from procgroup.parallel.communication_hooks.default_hooks import fp16_compress_wrapper as fp16_compress_wrapper
    from procgroup.parallel.communication_hooks.model_averaging import PeriodicModelAverager as PeriodicModelAverager
    from procgroup.parallel.communication_hooks.model_averaging import PostLocalSGDOptimizer as PostLocalSGDOptimizer
    from procgroup.parallel.communication_hooks.outer_steps import OuterSteps as OuterSteps
    from procgroup.parallel.communication_hooks.post_local_sgd import PostLocalSGDState as PostLocalSGDState
    from procgroup.parallel.communication_hooks.post_local_sgd import post_localSGD_hook as post_localSGD_hook
    from procgroup.parallel.communication_hooks.power_sgd import PowerSGDState as PowerSGDState
    from procgroup.parallel.communication_hooks.power_sgd import powerSGD_hook as powerSGD_hook
    from procgroup.parallel.communication_hooks.top_k import TopKState as TopKState
    from procgroup.parallel.communication_hooks.top_k import top_k_hook as top_k_hook

_MODULE_OF_NAME = {
    "BlockQuantizedState": "block_quantized",
    "OuterSteps": "outer_steps",
    "PeriodicModelAverager": "model_averaging",
    "PostLocalSGDOptimizer": "model_averaging",
    "PostLocalSGDState": "post_local_sgd",
    "PowerSGDState": "power_sgd",
    "TopKState": "top_k",
    "allreduce_hook": "default_hooks",
    "bf16_compress_hook": "default_hooks",
    "bf16_compress_wrapper": "default_hooks",
    "block_quantized_hook": "block_quantized",
    "fp16_compress_hook": "default_hooks",
    "fp16_compress_wrapper": "default_hooks",
    "post_localSGD_hook": "post_local_sgd",
    "powerSGD_hook": "power_sgd",
    "top_k_hook": "top_k",
}

__all__ = list(_MODULE_OF_NAME)

__getattr__, __dir__ = bound_on_first_use(__name__, _MODULE_OF_NAME)
