"""Stores: in one process, in a file, behind a TCP port; and two groups of keys in one of them.

python examples/choose_a_store.py
"""

import tempfile
from pathlib import Path

import procgroup as dist


def make_store(kind: str, folder: str) -> dist.Store:
    if kind == "tcp":
        return dist.TCPStore("127.0.0.1", 0, world_size=1, is_master=True, timeout=300, wait_for_workers=True)
    if kind == "file":
        return dist.FileStore(str(Path(folder, "store")), 1)
    return dist.HashStore()


with tempfile.TemporaryDirectory() as folder:
    for kind in ("hash", "file", "tcp"):
        base = make_store(kind, folder)
        first, second = dist.PrefixStore("group1_", base), dist.PrefixStore("group2_", base)
        first.set("colour", "red")
        second.set("colour", "blue")
        assert (first.get("colour"), second.get("colour")) == (b"red", b"blue")
        assert base.get("group1_/colour") == b"red"
        assert [first.add("visits", 2), first.add("visits", 3)] == [2, 5]
        first.set_timeout(0.1)
        try:
            first.get("never set")
        except dist.DistStoreError as error:
            print(f"{kind}: {type(base).__name__}: {error}")
