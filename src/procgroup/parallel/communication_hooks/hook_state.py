"""The base classes of hook states: a process group, settings, copying and pickling, and error feedback.

Error feedback keeps the part of a gradient that a hook has not sent, and adds it to the next gradient: Karimireddy et
al., "Error Feedback Fixes SignSGD and other Gradient Compression Schemes", arXiv 1901.09847.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, ClassVar, Self

from procgroup.api import default_group
from procgroup.groups.group import ProcessGroup
from procgroup.parallel.communication_hooks.interface import GradBucket
from procgroup.parallel.group_choice import group_of
from procgroup.parallel.pytorch import torch
from procgroup.parallel.rank_comparison import require_same


class HookState:
    """The state of one hook of one model on this rank."""

    # The attributes that must be the same on all ranks.
    SHARED: ClassVar[tuple[str, ...]] = ()
    # The attributes that hold groups of the caller, or None.
    GROUPS: ClassVar[tuple[str, ...]] = ("process_group",)
    # The attributes that hold groups created by the state, or None: a copy creates its own.
    OWN_GROUPS: ClassVar[tuple[str, ...]] = ()

    def __init__(self, process_group: ProcessGroup | None) -> None:
        self.process_group = process_group
        self._is_compared = False

    def group(self) -> ProcessGroup:
        """Return the group. The first call raises CollectiveMismatch when the ranks' settings differ."""
        group = group_of(self.process_group)
        if not self._is_compared:
            shared = ", ".join(f"{name}={getattr(self, name)!r}" for name in self.SHARED)
            advice = "Pass the same arguments to the hook's state on every rank; nothing was sent."
            value = f"{type(self).__name__}({shared})"
            require_same(group, "communication_hook", value, differing="settings", advice=advice)
            self._is_compared = True
        return group

    def __getstate__(self) -> dict[str, Any]:
        """Return the state without groups; unpickling uses the default group. Raises RuntimeError for another group."""
        groups = dict.fromkeys(self.GROUPS)
        if any(getattr(self, name) not in (None, default_group.slot().group) for name in groups):
            raise RuntimeError(
                f"{type(self).__name__} of another than the default process group cannot be pickled: a group does not "
                "outlive its processes. Save state_dict(model), and load it into a new state."
            )
        return {**self.__dict__, **groups, **dict.fromkeys(self.OWN_GROUPS), "_is_compared": False}

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        made = type(self).__new__(type(self))
        memo[id(self)] = made
        for name, value in self.__dict__.items():
            is_group = name in self.GROUPS or name in self.OWN_GROUPS
            setattr(made, name, value if is_group else copy.deepcopy(value, memo))
        return made


class Residuals:
    """The residuals of this rank by parameter. They survive re-bucketing."""

    def __init__(self) -> None:
        # One flat tensor per current bucket, by its parameters. Dictionaries compare tensors by identity, because their
        # hash is their identity.
        self._flats: dict[tuple[Any, ...], Any] = {}
        # By parameter: views of the flat tensors.
        self._views: dict[Any, Any] = {}

    def __contains__(self, bucket: GradBucket) -> bool:
        """Return whether there is a flat tensor for exactly the parameters of this bucket."""
        return tuple(bucket.parameters()) in self._flats

    def of(self, bucket: GradBucket) -> Any:
        """Return the residual of a bucket as one flat tensor, initially zeros. The caller updates it in place."""
        parameters = tuple(bucket.parameters())
        flat = self._flats.get(parameters)
        if flat is None:
            flat = self._flats[parameters] = self._gather(parameters, bucket.buffer())
        return flat

    def flat(self, parameters: tuple[Any, ...]) -> Any:
        """Return the residual of the bucket with these parameters."""
        return self._flats[parameters]

    def state_dict(self, model: Any) -> dict[str, Any]:
        """Return copies of the residuals by the parameters' names in ``model``."""
        named = {name: self._views.get(parameter) for name, parameter in model.named_parameters()}
        return {name: part.clone() for name, part in named.items() if part is not None}

    def load_state_dict(self, state: Mapping[str, Any], model: Any) -> None:
        """Load a ``state_dict``. Raises ValueError for names or sizes that do not fit the model."""
        parameters = dict(model.named_parameters())
        for name, part in state.items():
            if name not in parameters or parameters[name].numel() != part.numel():
                raise ValueError(
                    f"Expected the residual of a parameter of the model; {name!r} with {part.numel()} elements is none."
                )
        self._flats.clear()
        self._views = {parameters[name]: part.clone() for name, part in state.items()}

    def _gather(self, parameters: tuple[Any, ...], buffer: Any) -> Any:
        moved = frozenset(map(id, parameters))
        self._flats = {
            others: flat for others, flat in self._flats.items() if moved.isdisjoint(map(id, others))
        }  # the views keep the memory of removed buckets alive
        flat = torch.zeros(buffer.numel(), dtype=working_dtype(buffer), device=buffer.device)
        counts = [parameter.numel() for parameter in parameters]
        for parameter, part in zip(parameters, flat.split(counts), strict=True):
            if parameter in self._views:
                part.copy_(self._views[parameter])
            self._views[parameter] = part
        return flat


class CompressionState(HookState):
    """The state of a hook that compresses buckets, with error feedback in the dtype that the hook computes in."""

    def __init__(self, process_group: ProcessGroup | None, use_error_feedback: bool) -> None:
        super().__init__(process_group)
        self.use_error_feedback = use_error_feedback
        self._residuals = Residuals()

    def state_dict(self, model: Any) -> dict[str, Any]:
        """Return this rank's error feedback by the parameters' names in ``model``. It differs between ranks."""
        return self._residuals.state_dict(model)

    def load_state_dict(self, state: Mapping[str, Any], model: Any) -> None:
        """Load a ``state_dict`` of the same number of ranks. Raises ValueError when it does not fit the model."""
        self._residuals.load_state_dict(state, model)

    def _compensated(self, bucket: GradBucket) -> tuple[Any, Any]:
        """Return the gradients with the residual added, and the residual, which is None without error feedback."""
        buffer = bucket.buffer()
        exact = buffer.to(working_dtype(buffer), copy=True)
        if not self.use_error_feedback:
            return exact, None
        residual = self._residuals.of(bucket)
        exact += residual
        return exact, residual


def require_at_least(minimum: int, **given: int) -> None:
    """Raise ValueError for an argument below a minimum."""
    for name, value in given.items():
        if value < minimum:
            raise ValueError(f"Expected parameter `{name}` to be at least {minimum}, got {value}.")


def working_dtype(buffer: Any) -> Any:
    """Return the dtype to compute in: float64 for float64, otherwise float32."""
    return torch.float64 if buffer.dtype is torch.float64 else torch.float32


def finite(tensor: Any) -> Any:
    """Replace NaN and infinities by zeros, in place: they were sent, and must not be added to later gradients."""
    return torch.nan_to_num_(tensor, nan=0.0, posinf=0.0, neginf=0.0)
