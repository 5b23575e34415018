"""Key-value stores, through which processes find each other.

``HashStore`` (threads of one process), ``FileStore`` (processes that share a file), ``TCPStore`` (any
processes), ``PrefixStore`` (a part of another store). They are imported on first use, so that only
TCPStore loads the native module.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from procgroup.stores.file import FileStore
    from procgroup.stores.hash import HashStore
    from procgroup.stores.prefix import PrefixStore
    from procgroup.stores.store import Store
    from procgroup.stores.tcp import TCPStore

__all__ = ["FileStore", "HashStore", "PrefixStore", "Store", "TCPStore"]

_MODULES = {"FileStore": "file", "HashStore": "hash", "PrefixStore": "prefix", "Store": "store", "TCPStore": "tcp"}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    value = getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
    globals()[name] = value
    return value
