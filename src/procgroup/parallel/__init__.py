"""Training on many ranks: data parallelism, data samplers, averaged gradients, device meshes.

Every public name is bound when it is first used, so that importing the package costs nothing.
"""

from __future__ import annotations

from procgroup.lazy_names import bound_on_first_use

TYPE_CHECKING = False
if TYPE_CHECKING:
    from procgroup.parallel.averaging import average_gradients as average_gradients
    from procgroup.parallel.averaging import broadcast_parameters as broadcast_parameters
    from procgroup.parallel.distributed_data_parallel import DistributedDataParallel as DistributedDataParallel
    from procgroup.parallel.distributed_sampler import DistributedSampler as DistributedSampler
    from procgroup.parallel.grad_bucket import GradBucket as GradBucket
    from procgroup.parallel.grad_bucket import Hook as Hook
    from procgroup.parallel.grad_bucket import Waitable as Waitable
    from procgroup.parallel.join import Join as Join
    from procgroup.parallel.join import Joinable as Joinable
    from procgroup.parallel.join import JoinHook as JoinHook

_MODULE_OF_NAME = {
    "DistributedDataParallel": "distributed_data_parallel",
    "DistributedSampler": "distributed_sampler",
    "GradBucket": "grad_bucket",
    "Hook": "grad_bucket",
    "Join": "join",
    "JoinHook": "join",
    "Joinable": "join",
    "Waitable": "grad_bucket",
    "average_gradients": "averaging",
    "broadcast_parameters": "averaging",
}

__all__ = list(_MODULE_OF_NAME)

__getattr__, __dir__ = bound_on_first_use(__name__, _MODULE_OF_NAME)
