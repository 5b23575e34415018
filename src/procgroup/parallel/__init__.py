"""Training on many ranks: data parallelism, data samplers, averaged gradients, device meshes.

Every public name is bound when it is first used, so that importing the package costs nothing.
"""

from procgroup import bound_on_first_use

_MODULE_OF_NAME = {
    "DistributedDataParallel": "ddp",
    "DistributedSampler": "sampler",
    "GradBucket": "communication_hooks.interface",
    "Hook": "communication_hooks.interface",
    "Join": "join",
    "JoinHook": "join",
    "Joinable": "join",
    "SyncBatchNorm": "sync_batch_norm",
    "Waitable": "communication_hooks.interface",
    "average_gradients": "averaging",
    "broadcast_parameters": "averaging",
    "require_equal_parameters": "averaging",
}

_PACKAGES = ("communication_hooks",)

__all__ = list(_MODULE_OF_NAME)

__getattr__, __dir__ = bound_on_first_use(__name__, _MODULE_OF_NAME, _PACKAGES)
