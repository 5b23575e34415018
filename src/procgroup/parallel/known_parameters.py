"""That a model, once wrapped, keeps its parameters: others would be trained on each rank by itself, and nobody sees."""

from __future__ import annotations

from collections.abc import Container
from typing import Any

from procgroup.parallel.pytorch import torch


class KnownParameters:
    """The parameters whose gradients are averaged, by their ids, and where a module keeps its parameters."""

    def __init__(self, module: Any, ignored: frozenset[str], averaged: Container[int]) -> None:
        self._module = module
        self._ignored = ignored
        self._averaged = averaged
        self._look()

    def look_again(self) -> bool:
        """Find parts that were added or replaced; tell whether there are any."""
        if not any(self._empty) and all(list(parts.values()) == before for parts, before in self._parts):
            return False
        self._look()
        return True

    def require_no_others(self) -> None:
        """Raise RuntimeError when a parameter would get a gradient that nobody averages."""
        averaged = self._averaged
        for name, owner in self._owners:
            for key, parameter in owner.items():
                if parameter is not None and id(parameter) not in averaged and parameter.requires_grad:
                    self._refuse(f"{name}.{key}".lstrip("."), parameter)

    def _look(self) -> None:
        named = list(self._module.named_modules())
        self._parts = [(part._modules, list(part._modules.values())) for _, part in named if len(part._modules)]
        self._owners = [(name, part._parameters) for name, part in named if len(part._parameters)]
        places = [place for _, part in named for place in (part._modules, part._parameters)]
        self._empty = [place for place in places if not len(place)]  # where a part or a parameter may be added

    def _refuse(self, name: str, parameter: Any) -> None:
        # What torch.func.functional_call puts in a parameter's place is none.
        if name in self._ignored or not isinstance(parameter, torch.nn.Parameter):
            return
        raise RuntimeError(
            f"DistributedDataParallel: {name} {tuple(parameter.shape)} requires a gradient, and was no such parameter "
            "when the module was wrapped: each rank would train it by itself. Wrap the module again after parameters "
            "were added, replaced or given requires_grad=True."
        )
