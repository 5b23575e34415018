"""Names of torch's DistributedDataParallel that say they are private, and which programs use all the same."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from procgroup.parallel.backward_optimizers import Steps
from procgroup.parallel.communication_hooks.default_hooks import allreduce_hook, fp16_compress_hook

if TYPE_CHECKING:
    from procgroup.groups.group import ProcessGroup
    from procgroup.parallel.reducer import Reducer


class PrivateNames:
    """What ``DistributedDataParallel`` has of these."""

    module: Any
    process_group: Any
    find_unused_parameters: bool
    gradient_as_bucket_view: bool
    forward_sync_buffers: bool
    static_graph: bool
    register_comm_hook: Callable[[Any, Any], None]
    _group: ProcessGroup
    _limits: list[int]
    _reducer: Reducer
    _optimizers: list[Steps]

    @staticmethod
    def _set_params_and_buffers_to_ignore_for_model(module: Any, params_and_buffers_to_ignore: Sequence[str]) -> None:
        """Name parameters and buffers that a DistributedDataParallel made of ``module`` later leaves alone."""
        module._ddp_params_and_buffers_to_ignore = params_and_buffers_to_ignore

    def _set_static_graph(self) -> None:
        """Do what ``static_graph=True`` does. Raises RuntimeError after the first backward."""
        if self.static_graph:
            warnings.warn("You've set static_graph to be True, no need to set it again.", stacklevel=2)
            return
        self._reducer.set_static_graph()
        self.static_graph = True

    def _register_builtin_comm_hook(self, comm_hook_type: Any) -> None:
        """Register the hook that a member of torch.distributed.BuiltinCommHookType means, which is told by its name."""
        hooks = {"ALLREDUCE": allreduce_hook, "FP16_COMPRESS": fp16_compress_hook}
        name = str(comm_hook_type).rpartition(".")[2]
        if name not in hooks:
            raise ValueError(f"Expected comm_hook_type to be one of {', '.join(hooks)}, got {comm_hook_type!r}.")
        self.register_comm_hook(self.process_group, hooks[name])

    def _register_fused_optim(
        self, optim: Any, *args: Any, optim_params: Iterable[Any] | None = None, **kwargs: Any
    ) -> None:
        """Have an optimizer of class ``optim`` take a step at the end of each backward whose gradients are averaged."""
        chosen = [each for each in self.module.parameters() if each.requires_grad]
        self._optimizers.append(optim(chosen if optim_params is None else list(optim_params), *args, **kwargs))

    def _get_ddp_logging_data(self) -> dict[str, Any]:
        """Return what this wrapper is, by torch's names."""
        buckets = self._reducer.buckets
        parameters = [place.parameter for bucket in buckets for place in bucket.places]
        return {
            "module_name": type(self.module).__name__,
            "world_size": self._group.size(),
            "rank": self._group.rank(),
            "backend_name": "procgroup",
            "device_ids": "",
            "output_device": -1,
            "broadcast_buffers": int(self.forward_sync_buffers),
            "find_unused_parameters": int(self.find_unused_parameters),
            "gradient_as_bucket_view": int(self.gradient_as_bucket_view),
            "static_graph": int(self.static_graph),
            "bucket_cap_bytes": self._limits[-1],
            "bucket_sizes": ", ".join(str(bucket.nbytes) for bucket in buckets),
            "dtypes": ", ".join(dict.fromkeys(str(each.dtype).removeprefix("torch.") for each in parameters)),
            "num_parameter_tensors": len(parameters),
            "total_parameter_size_bytes": sum(each.nbytes for each in parameters),
        }
