"""Error feedback: keep the part of a gradient that a hook has not sent, and add it to the next gradient.

Karimireddy et al., "Error Feedback Fixes SignSGD and other Gradient Compression Schemes", arXiv 1901.09847.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from procgroup.parallel.communication_hooks.interface import GradBucket
from procgroup.parallel.pytorch import torch


class Residuals:
    """The residuals of this rank by parameter. They survive re-bucketing."""

    def __init__(self) -> None:
        # One flat tensor per current bucket, by its parameters. Dictionaries compare tensors by identity, because their
        # hash is their identity.
        self._flats: dict[tuple[Any, ...], Any] = {}
        # By parameter: views of the flat tensors.
        self._views: dict[Any, Any] = {}

    def has(self, bucket: GradBucket) -> bool:
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


def working_dtype(buffer: Any) -> Any:
    """Return the dtype to compute in: float64 for float64, otherwise float32."""
    return torch.float64 if buffer.dtype is torch.float64 else torch.float32


def finite(tensor: Any) -> Any:
    """Replace NaN and infinities by zeros, in place: they were sent, and must not be added to later gradients."""
    return torch.nan_to_num_(tensor, nan=0.0, posinf=0.0, neginf=0.0)
