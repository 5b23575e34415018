"""Every kind of store, by name, so that one contract is checked on all of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from procgroup.stores import FileStore, HashStore, PrefixStore, Store, TCPStore

MAKERS: dict[str, Callable[[Path], Store]] = {
    "hash": lambda path: HashStore(),
    "file": lambda path: FileStore(str(path / "store")),
    "tcp": lambda path: TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False),
}
KINDS = [*MAKERS, *(f"prefix-{kind}" for kind in MAKERS), "prefix-prefix-hash"]


def make_store(kind: str, path: Path) -> Store:
    if kind.startswith("prefix-"):
        inner = make_store(kind.removeprefix("prefix-"), path)
        inner.set("outside", "not of this prefix")
        return PrefixStore("inside", inner)
    return MAKERS[kind](path)
