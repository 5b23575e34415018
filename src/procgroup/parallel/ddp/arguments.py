"""Check the arguments of DistributedDataParallel, before anything is sent."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

from procgroup.api.default_group import is_foreign
from procgroup.groups.group import ProcessGroup
from procgroup.parallel.communication_hooks.default_hooks import allreduce_hook, fp16_compress_hook
from procgroup.parallel.communication_hooks.interface import Hook
from procgroup.parallel.group_choice import default_group, group_of, is_group
from procgroup.parallel.pytorch import torch

DEFAULT_BUCKET_BYTES = 4 << 20
DEFAULT_BUCKET_BYTES_ON_GPU = 25 << 20
"""As in torch: calls on GPUs need more bytes to be fast."""


def choose_group(process_group: Any, device_mesh: Any) -> Any:
    """Return the given group, the group of a one-dimensional mesh, or the default group; procgroup's or torch's.

    Raises RuntimeError for a group together with a mesh, and for a mesh of several dimensions.
    """
    if process_group is not None and device_mesh is not None:
        raise RuntimeError("Cannot specify both process_group and device_mesh arguments.")
    if device_mesh is not None:
        if device_mesh.ndim != 1:
            raise RuntimeError(f"Only 1D device mesh is supported, but got {device_mesh}.")
        return device_mesh.get_group(0)
    return default_group() if process_group is None else process_group


def require_group(process_group: Any) -> ProcessGroup:
    """Return the group of procgroup for a group of procgroup or torch.

    Raises ValueError for a group without this rank or of another backend, TypeError for an object that is not a group.
    """
    if is_foreign(process_group):
        raise ValueError(
            "This rank does not belong to the process_group of DistributedDataParallel: wrap on members only."
        )
    if process_group is not None and not is_group(process_group):
        raise TypeError(
            f"Expected process_group to be a group of procgroup, got {process_group!r} of type "
            f"{type(process_group).__name__}. Make one with procgroup.new_group()."
        )
    return group_of(process_group)


def require_wrappable(named_parameters: Sequence[tuple[str, Any]]) -> None:
    """Raise RuntimeError, as torch does, for lazy parameters, and for a module without gradients to average."""
    lazy = torch.nn.parameter.UninitializedParameter
    if any(isinstance(parameter, lazy) for _, parameter in named_parameters):
        raise RuntimeError(
            "Modules with uninitialized parameters can't be used with `DistributedDataParallel`. "
            "Run a dummy forward pass to correctly initialize the modules"
        )
    if not any(parameter.requires_grad for _, parameter in named_parameters):
        raise RuntimeError(
            "DistributedDataParallel is not needed when a module doesn't have any parameter that requires a gradient."
        )


def delayed_names(named_parameters: Any, trigger: Any, module: Any) -> frozenset[str]:
    """Return the parameter names in ``delay_all_reduce_named_params``.

    Raises ValueError unless ``param_to_hook_all_reduce`` is given too, and for parameters of another module.
    """
    if (named_parameters is None) != (trigger is None):
        raise ValueError("delay_all_reduce_named_params and param_to_hook_all_reduce need to be set at the same time.")
    if named_parameters is None:
        return frozenset()
    known = dict(module.named_parameters(remove_duplicate=False))
    foreign = [name for name, parameter in named_parameters if known.get(name) is not parameter]
    if foreign or not any(parameter is trigger for parameter in known.values()):
        raise ValueError(f"Expected parameters of the module to be delayed; these are not: {foreign or trigger.shape}.")
    return frozenset(name for name, _ in named_parameters)


def bucket_limits(bucket_cap_mb: float | None, bucket_cap_mb_list: Sequence[float] | None, on_gpus: bool) -> list[int]:
    """Return the size in bytes that closes each bucket; the last entry is for all further buckets."""
    if bucket_cap_mb_list:
        return [int(cap * (1 << 20)) for cap in bucket_cap_mb_list]
    if bucket_cap_mb is None:
        return [DEFAULT_BUCKET_BYTES_ON_GPU if on_gpus else DEFAULT_BUCKET_BYTES]
    return [int(bucket_cap_mb * (1 << 20))]


def buffer_options(broadcast_buffers: bool | None, forward_sync_buffers: bool | None) -> tuple[bool, bool]:
    """Return whether to copy buffers before each forward, and whether at construction. Warns as torch does."""
    if broadcast_buffers is not None:
        warnings.warn(
            "`broadcast_buffers` is deprecated. Use `forward_sync_buffers` instead, which still copies buffers at "
            "construction; it decides where both are given.",
            FutureWarning,
            stacklevel=3,
        )
    if forward_sync_buffers is not None:
        return forward_sync_buffers, True
    chosen = broadcast_buffers is None or broadcast_buffers
    return chosen, chosen


def builtin_hook(comm_hook_type: Any) -> Hook:
    """Return the hook for a member of torch.distributed.BuiltinCommHookType, which is recognized by its name."""
    hooks: dict[str, Hook] = {"ALLREDUCE": allreduce_hook, "FP16_COMPRESS": fp16_compress_hook}
    name = str(comm_hook_type).rpartition(".")[2]
    if name not in hooks:
        raise ValueError(f"Expected comm_hook_type to be one of {', '.join(hooks)}, got {comm_hook_type!r}.")
    return hooks[name]
