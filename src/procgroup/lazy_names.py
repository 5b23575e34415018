"""Packages whose public names are bound when they are first used, so that importing the package costs nothing.

::

    __getattr__, __dir__ = bound_on_first_use(__name__, {"TCPStore": "tcp"})    # of the module procgroup.stores.tcp

Type checkers and editors read the same names in the stub beside the package, ``__init__.pyi``.
"""

from __future__ import annotations

import sys
from importlib import import_module

TYPE_CHECKING = False  # importing typing would cost a third of importing procgroup
if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping


def bound_on_first_use(
    package: str, module_of_name: Mapping[str, str], packages: Collection[str] = (), of_torch: Collection[str] = ()
) -> tuple[Callable[[str], object], Callable[[], list[str]]]:
    """Return ``__getattr__`` and ``__dir__`` of a package whose modules have these names.

    ``packages``: public sub-packages, imported on first use too. ``of_torch``: names that only torch.distributed has;
    the AttributeError for one of them says where it is. ``__dir__`` returns the public names and nothing else.
    """
    module = sys.modules[package]

    def get(name: str) -> object:
        if name in packages:
            return import_module(f"{package}.{name}")
        owner = module_of_name.get(name)
        if owner is None:
            where = f"; torch.distributed.{name} is PyTorch's own, and runs on its backend 'procgroup'"
            advice = where if name in of_torch else ""
            # With name and obj, Python's traceback suggests the closest of dir()'s names.
            raise AttributeError(f"module {package!r} has no attribute {name!r}{advice}", name=name, obj=module)
        value: object = getattr(import_module(f"{package}.{owner}"), name)
        setattr(module, name, value)
        return value

    def names() -> list[str]:
        return sorted([*packages, *(name for name in module_of_name if name[0] != "_")])

    return get, names
