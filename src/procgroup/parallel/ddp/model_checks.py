"""Checks of a wrapped model: the same on all ranks, the same parameters over time, and the same graph if promised."""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import Any

from procgroup.errors import GraphChanged, ModelMismatch
from procgroup.groups.group import ProcessGroup
from procgroup.parallel.ddp.buckets import ParameterSlot
from procgroup.parallel.ddp.round import Round
from procgroup.parallel.pytorch import torch
from procgroup.parallel.rank_comparison import gather, gather_if_different

_NOTHING = "nothing"


def require_same_model(group: ProcessGroup, named_parameters: Sequence[tuple[str, Any]]) -> None:
    """Raise ModelMismatch on every rank when the parameters differ in number, name, shape, dtype, layout or device.

    Of devices their kind counts, and which parameters share one: the numbers of GPUs may differ.
    """
    devices = list(dict.fromkeys(parameter.device for _, parameter in named_parameters))
    mine = [_describe(name, parameter, devices) for name, parameter in named_parameters]
    models = gather_if_different(group, mine)
    if models is not None:
        differing = [rank for rank, model in enumerate(models) if model != models[0]]
        expected, got = _first_difference(models[0], models[differing[0]])
        raise ModelMismatch(expected=expected, got=got, rank=differing[0], ranks=differing)


def _describe(name: str, parameter: Any, devices: Sequence[Any]) -> str:
    grad = "" if parameter.requires_grad else ", without gradient"
    dtype = str(parameter.dtype).removeprefix("torch.")
    where = "" if parameter.device.type == "cpu" else f", on {parameter.device.type}"
    if len(devices) > 1:
        where += f" (device {devices.index(parameter.device) + 1} of {len(devices)})"
    return f"{name} {tuple(parameter.shape)} {dtype}, strides {tuple(parameter.stride())}{where}{grad}"


def _first_difference(expected: Sequence[str], got: Sequence[str]) -> tuple[str, str]:
    for index in range(max(len(expected), len(got))):
        pair = tuple(model[index] if index < len(model) else _NOTHING for model in (expected, got))
        if pair[0] != pair[1]:
            return pair[0], pair[1]
    raise AssertionError("the models do not differ")


class ParameterCheck:
    """Finds parameters that were added or replaced after wrapping: no collective would average their gradients."""

    def __init__(self, module: Any, ignored: frozenset[str], averaged: Container[int]) -> None:
        """``averaged`` are the ids of the parameters with averaged gradients."""
        self._module = module
        self._ignored = ignored
        self._averaged = averaged
        self._scan()

    def rescan(self) -> bool:
        """Scan the module again if submodules were added or replaced; return whether that was so."""
        if not any(self._empty) and all(list(children.values()) == before for children, before in self._children):
            return False
        self._scan()
        return True

    def require_known_parameters(self) -> None:
        """Raise RuntimeError when a parameter requires a gradient that is not averaged."""
        averaged = self._averaged
        for name, owner in self._owners:
            for key, parameter in owner.items():
                if parameter is not None and id(parameter) not in averaged and parameter.requires_grad:
                    self._refuse(f"{name}.{key}".lstrip("."), parameter)

    def _scan(self) -> None:
        named = list(self._module.named_modules())
        self._children = [(part._modules, list(part._modules.values())) for _, part in named if len(part._modules)]
        self._owners = [(name, part._parameters) for name, part in named if len(part._parameters)]
        containers = [container for _, part in named for container in (part._modules, part._parameters)]
        # The empty containers: a submodule or parameter may be added to one of them.
        self._empty = [container for container in containers if not len(container)]

    def _refuse(self, name: str, parameter: Any) -> None:
        # torch.func.functional_call replaces parameters by other tensors for one call.
        if name in self._ignored or not isinstance(parameter, torch.nn.Parameter):
            return
        raise RuntimeError(
            f"DistributedDataParallel: {name} {tuple(parameter.shape)} requires a gradient, and was no such parameter "
            "when the module was wrapped: each rank would train it by itself. Wrap the module again after parameters "
            "were added, replaced or given requires_grad=True."
        )


class StaticGraph:
    """Checks ``static_graph=True``: autograd accumulates into each gradient as often as in the first round."""

    def __init__(self, slots: Sequence[ParameterSlot]) -> None:
        self._slots = slots
        self._uses: list[int] | None = None

    def learn(self) -> None:
        """Take the number of accumulations in the first round as the expected number."""
        if self._uses is not None:
            return
        self._uses = [slot.arrivals for slot in self._slots]
        for slot in self._slots:
            slot.awaited = slot.arrivals

    def compare(self, current: Round) -> None:
        """Mark the parameters that were not used as often as expected."""
        for slot, uses in zip(self._slots, self._uses or (), strict=False):
            if slot.arrivals != uses:
                current.mark_changed(slot)

    def error(self, group: ProcessGroup) -> GraphChanged:
        """Return the error with the changes on all ranks; every rank calls this."""
        changes = [
            (slot.name, slot.shape, expected, slot.arrivals)
            for slot, expected in zip(self._slots, self._uses or (), strict=True)
            if slot.arrivals != expected
        ]
        return GraphChanged(uses=dict(enumerate(gather(group, changes))))
