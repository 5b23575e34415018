"""Hooks that autograd calls when it has added to a parameter's gradient."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class GradientHooks:
    """The hooks of one reducer on its parameters."""

    def __init__(self) -> None:
        self._handles: list[Any] = []

    def add(self, parameter: Any, hook: Callable[[Any], None]) -> None:
        """Have ``hook`` called with the parameter; also when that is frozen now, and used again later."""
        is_frozen = not parameter.requires_grad
        parameter.requires_grad_()  # torch leaves a hook on no other
        self._handles.append(parameter.register_post_accumulate_grad_hook(hook))
        if is_frozen:
            parameter.requires_grad_(False)

    def remove(self) -> None:
        """Leave the parameters alone from now on."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
