"""One path serves job after job, whatever the last one left there."""

from __future__ import annotations

import random
import time
from typing import Any

import pytest

from procgroup.rendezvous.handlers import rendezvous
from procgroup.rendezvous.join import join
from world import run, start


def meet_and_stay(rank: int, size: int, url: str) -> None:
    store, rank, size = next(rendezvous(url, rank, size, timeout=20))
    join(store, rank, size, 20)
    print("joined", flush=True)
    time.sleep(60)


def meet_and_leave(rank: int, size: int, url: str) -> int:
    store, rank, size = next(rendezvous(url, rank, size, timeout=20))
    number = join(store, rank, size, 20).round
    store.barrier("over", size)
    store.close()
    return number


@pytest.mark.timeout(300)
def test_a_path_can_be_used_again_after_sigkill_at_any_moment(tmp_path: Any, sampled: bool) -> None:
    url = f"file://{tmp_path}/meeting"
    moments = random.Random(2)
    for attempt in range(20 if sampled else 100):
        with start(meet_and_stay, 2, args=(url,)) as world:
            if attempt % 2:
                time.sleep(moments.uniform(0, 0.2))
            else:
                world.wait_for_output(0, "joined", 20)
                world.wait_for_output(1, "joined", 20)
            world.kill(attempt % 2)
            world.kill(1 - attempt % 2)
            world.wait()
    assert run(meet_and_leave, 2, args=(url,)) == [0, 0]


def test_a_path_can_be_used_again_after_an_orderly_end(tmp_path: Any) -> None:
    url = f"file://{tmp_path}/meeting"
    for _ in range(3):
        assert run(meet_and_leave, 3, args=(url,)) == [0, 0, 0]


@pytest.mark.parametrize("content", [b"", b"\x00" * 100, b"not a store at all"])
def test_a_file_that_is_empty_or_no_store_is_used_or_refused_but_never_hangs(content: bytes, tmp_path: Any) -> None:
    path = tmp_path / "meeting"
    path.write_bytes(content)
    started = time.monotonic()
    try:
        assert run(meet_and_leave, 2, args=(f"file://{path}",)) == [0, 0]
    except AssertionError as error:
        assert "DistStoreError" in str(error)
        assert path.read_bytes() == content
    assert time.monotonic() - started < 20
