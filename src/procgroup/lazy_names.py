"""Packages whose public names are bound when they are first used, so that importing the package costs nothing.

::

    __getattr__, __dir__ = bound_on_first_use(__name__, {"TCPStore": "tcp"})    # of the module procgroup.stores.tcp
"""

from __future__ import annotations

import sys
from importlib import import_module

TYPE_CHECKING = False  # importing typing would cost a third of importing procgroup
if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping


def bound_on_first_use(
    package: str, module_of_name: Mapping[str, str], of_torch: Collection[str] = ()
) -> tuple[Callable[[str], object], Callable[[], list[str]]]:
    """Return ``__getattr__`` and ``__dir__`` of a package whose modules have these names.

    ``of_torch``: names that torch.distributed alone has; asked for them, the package says where they are.
    """
    bound = vars(sys.modules[package])

    def get(name: str) -> object:
        module = module_of_name.get(name)
        if module is None:
            where = f"; torch.distributed.{name} is PyTorch's own, and runs on its backend 'procgroup'"
            advice = where if name in of_torch else ""
            raise AttributeError(f"module {package!r} has no attribute {name!r}{advice}")
        value: object = getattr(import_module(f"{package}.{module}"), name)
        bound[name] = value
        return value

    def names() -> list[str]:
        return sorted({*bound, *module_of_name})

    return get, names
