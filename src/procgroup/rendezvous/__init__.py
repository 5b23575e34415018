"""How ranks find each other: from a URL to a store, a rank and a world size.

torch.distributed has a function and a module of this name; here the package is both, and can be called.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

from procgroup.rendezvous.handlers import register_rendezvous_handler, rendezvous
from procgroup.stores.store import Store

__all__ = ["register_rendezvous_handler", "rendezvous"]


class _CallablePackage(ModuleType):
    def __call__(
        self, url: str, rank: int = -1, world_size: int = -1, **kwargs: Any
    ) -> Iterator[tuple[Store, int, int]]:
        return rendezvous(url, rank, world_size, **kwargs)


sys.modules[__name__].__class__ = _CallablePackage
