"""A rank whose buffer table of an all_to_all has sizes above any memory: the others refuse and name it."""

from __future__ import annotations

import os
import struct
import time
from pathlib import Path

import numpy as np
import pytest

import procgroup as dist
from world import run

KEPT = 7919
"""Elements that rank 1 has for itself; no other number in its arena is this one."""
FORGED = 2**62


def own_arena() -> int:
    """The descriptor of the memory that this process shows the other ranks; theirs are closed once they are mapped."""
    found = [link for link in Path("/proc/self/fd").iterdir() if "memfd:procgroup " in target(link)]
    assert len(found) == 1
    return int(found[0].name)


def target(link: Path) -> str:
    try:
        return os.readlink(link)
    except FileNotFoundError:
        return ""


def forge(arena: int) -> int:
    """Overwrite each KEPT that stands in the arena by FORGED; return how many there were."""
    forged = 0
    begin = 0
    while True:
        try:
            begin = os.lseek(arena, begin, os.SEEK_DATA)
        except OSError:  # no more data
            return forged
        end = os.lseek(arena, begin, os.SEEK_HOLE)
        words = np.frombuffer(os.pread(arena, end - begin, begin), np.uint64)
        for index in np.flatnonzero(words == KEPT):
            os.pwrite(arena, struct.pack("Q", FORGED), begin + 8 * int(index))
            forged += 1
        begin = end


def call(rank: int, size: int, path: str) -> None:
    dist.init_process_group(timeout=20)
    store = dist.FileStore(path, size)
    counts = [KEPT if rank == peer == 1 else 3 for peer in range(size)]
    outputs = [np.zeros(count) for count in counts]
    inputs = [np.full(count, float(rank)) for count in counts]
    if rank == 1:
        dist.all_to_all(outputs, inputs, async_op=True)
        arena = own_arena()
        deadline = time.monotonic() + 10
        forged = 0
        while forged < 2 and time.monotonic() < deadline:  # another thread writes what it gives, and what it expects
            forged += forge(arena)
        assert forged == 2
        store.set("forged", "")
        store.wait(["refused"])
        return
    store.wait(["forged"])
    began = time.monotonic()
    with pytest.raises(dist.PeerFailed, match=f"rank 1 failed: it announced that it gives {FORGED} float64") as caught:
        dist.all_to_all(outputs, inputs)
    assert caught.value.peer == 1 and time.monotonic() - began < 10
    assert not any(output.any() for output in outputs)
    if store.add("refusals", 1) == size - 1:
        store.set("refused", "")


def test_every_rank_refuses_counts_that_no_memory_holds(tmp_path: Path) -> None:
    run(call, 3, args=(str(tmp_path / "store"),), environment={"PROCGROUP_TRANSPORT": "shm"})
