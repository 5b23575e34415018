"""DiLoCo: each rank trains alone for many inner steps; then one outer step combines the ranks.

Every rank takes *inner* steps with its own optimizer. The change of its parameters is then averaged over the ranks and
used as the gradient of one *outer* step, SGD with Nesterov momentum, from the parameters before the inner steps.

Douillard et al., "DiLoCo: Distributed Low-Communication Training of Language Models", arXiv 2311.08105.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from typing import Any

from procgroup.groups.group import ProcessGroup
from procgroup.parallel.communication_hooks.model_averaging import average_tensors
from procgroup.parallel.communication_hooks.residuals import working_dtype
from procgroup.parallel.group_choice import group_of
from procgroup.parallel.pytorch import torch
from procgroup.parallel.rank_comparison import require_same


class OuterSteps:
    """Takes an outer step after every ``every`` inner steps. Call ``step`` after each step of the inner optimizer.

    Bytes sent: 4 per parameter (8 for float64), once in ``every`` steps: for ``every`` = 500 one thousandth of those of
    averaging gradients. Error: that of ``all_reduce`` with AVG; after an outer step all ranks have the same bits. A NaN
    on one rank becomes a NaN on all. Memory: twice the parameters. Buffers, such as running statistics, are not
    synchronized. The default values are those of the paper; with ``learning_rate`` = 1 and ``momentum`` = 0 an outer
    step averages the parameters.

    All ranks create it together, with the same parameters and arguments; raises CollectiveMismatch otherwise,
    ValueError for ``every`` below 1 and without parameters.
    """

    def __init__(
        self,
        parameters: Iterable[Any],
        every: int,
        learning_rate: float = 0.7,
        momentum: float = 0.9,
        process_group: ProcessGroup | None = None,
    ) -> None:
        self.parameters: list[Any] = list(parameters)
        if every < 1:
            raise ValueError(f"Expected parameter `every` to be at least 1, got {every}.")
        if not self.parameters:
            raise ValueError("Expected parameters to take outer steps with, got none.")
        self.every = every
        self.learning_rate = learning_rate
        self.momentum = momentum
        self.process_group = process_group
        self.count: int = 0
        self._begin = [self._wide(parameter) for parameter in self.parameters]
        self._velocity = [torch.zeros_like(begin) for begin in self._begin]
        mine = f"every={every}, learning_rate={learning_rate}, momentum={momentum}, parameters {self._digest()}"
        advice = "Begin with the same parameters and arguments on every rank; nothing was changed."
        require_same(group_of(process_group), "OuterSteps", mine, differing="outer steps", advice=advice)

    def step(self) -> bool:
        """Count an inner step, and take an outer step if one is due; return whether it was."""
        self.count += 1
        if self.count % self.every:
            return False
        with torch.no_grad():
            moved = [
                begin - self._wide(parameter) for begin, parameter in zip(self._begin, self.parameters, strict=True)
            ]
            average_tensors(self.process_group, moved)
            for parameter, begin, velocity, gradient in zip(
                self.parameters, self._begin, self._velocity, moved, strict=True
            ):
                # Separate operations, each rounded once: the same result on every processor.
                velocity.mul_(self.momentum).add_(gradient)
                begin.sub_((velocity * self.momentum).add_(gradient).mul_(self.learning_rate))
                parameter.copy_(begin)
        return True

    def state_dict(self) -> dict[str, Any]:
        """Return the number of inner steps, the parameters of the last outer step, and the momentum."""
        return {
            "count": self.count,
            "begin": [begin.clone() for begin in self._begin],
            "velocity": [velocity.clone() for velocity in self._velocity],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a ``state_dict``; the parameters are not changed. Raises ValueError for other shapes."""
        shapes = [begin.shape for begin in self._begin]
        for name in ("begin", "velocity"):
            found = [tensor.shape for tensor in state[name]]
            if found != shapes:
                raise ValueError(f"Expected the state of parameters of shapes {shapes}, got {found}.")
        self.count = state["count"]
        self._begin = [tensor.clone() for tensor in state["begin"]]
        self._velocity = [tensor.clone() for tensor in state["velocity"]]

    def _wide(self, parameter: Any) -> Any:
        return parameter.detach().to(working_dtype(parameter), copy=True)

    def _digest(self) -> str:
        digest = hashlib.sha256()
        for begin in self._begin:
            digest.update(f"{begin.dtype} {tuple(begin.shape)}".encode())
            digest.update(begin.cpu().reshape(-1).view(torch.uint8).numpy())
        return digest.hexdigest()[:16]
