"""Error feedback: what a hook has not sent of a gradient is kept, and added to the next one.

Karimireddy et al., "Error Feedback Fixes SignSGD and other Gradient Compression Schemes", arXiv 1901.09847.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from procgroup.parallel.communication_hooks.interface import GradBucket
from procgroup.parallel.pytorch import torch


class Residuals:
    """What this rank has not sent, by parameter: so it outlives that parameters come into other buckets."""

    def __init__(self) -> None:
        # One tensor per bucket as it is now. Tensors are compared by identity here: it is the first that Python looks
        # at, and their hash.
        self._flats: dict[tuple[Any, ...], Any] = {}
        self._parts: dict[Any, Any] = {}

    def has(self, bucket: GradBucket) -> bool:
        """Tell whether there is a tensor for this very division into buckets."""
        return tuple(bucket.parameters()) in self._flats

    def of(self, bucket: GradBucket) -> Any:
        """Return the residual of a bucket as one flat tensor, zeros at first, for the caller to write to."""
        parameters = tuple(bucket.parameters())
        flat = self._flats.get(parameters)
        if flat is None:
            flat = self._flats[parameters] = self._gather(parameters, bucket.buffer())
        return flat

    def flat(self, parameters: tuple[Any, ...]) -> Any:
        """Return the residual of the bucket that has these parameters."""
        return self._flats[parameters]

    def state_dict(self, model: Any) -> dict[str, Any]:
        """Return copies by the names that the parameters have in ``model``."""
        named = {name: self._parts.get(parameter) for name, parameter in model.named_parameters()}
        return {name: part.clone() for name, part in named.items() if part is not None}

    def load_state_dict(self, state: Mapping[str, Any], model: Any) -> None:
        """Take what ``state_dict`` gave. Raises ValueError for names or sizes that the model does not have."""
        parameters = dict(model.named_parameters())
        for name, part in state.items():
            if name not in parameters or parameters[name].numel() != part.numel():
                raise ValueError(
                    f"Expected the residual of a parameter of the model; {name!r} with {part.numel()} elements is none."
                )
        self._flats.clear()
        self._parts = {parameters[name]: part.clone() for name, part in state.items()}

    def _gather(self, parameters: tuple[Any, ...], buffer: Any) -> Any:
        moved = frozenset(map(id, parameters))
        self._flats = {
            others: flat for others, flat in self._flats.items() if moved.isdisjoint(map(id, others))
        }  # what is left of the old buckets lives on in the parts
        flat = torch.zeros(buffer.numel(), dtype=working_dtype(buffer))
        counts = [parameter.numel() for parameter in parameters]
        for parameter, part in zip(parameters, flat.split(counts), strict=True):
            if parameter in self._parts:
                part.copy_(self._parts[parameter])
            self._parts[parameter] = part
        return flat


def working_dtype(buffer: Any) -> Any:
    """Return the dtype to compute with: float64 for float64, else float32."""
    return torch.float64 if buffer.dtype is torch.float64 else torch.float32


def finite(tensor: Any) -> Any:
    """Put zeros in place of what is not finite: that was sent, and must not come again with every later step."""
    return torch.nan_to_num_(tensor, nan=0.0, posinf=0.0, neginf=0.0)
