"""Random programs of sends and receives, played on all ranks, against an oracle.

A program is a list of messages: (source, destination, tag, count). Every rank issues its part in an order of its own:
blocking sends only where each message is small, so that MPI guarantees that the program completes; isends and irecvs in
any order. What arrives must be what was sent, in order for each (source, destination, tag).
"""

from __future__ import annotations

from random import Random
from typing import Any, NamedTuple

import numpy as np
import pytest
from collectives.contract_cases import TRANSPORTS
from seeded_cases import FIRST_SEED, naming

import procgroup as dist
from tiers import SAMPLED
from world import run

pytestmark = pytest.mark.timeout(400)

PROGRAMS = 40 if SAMPLED else 400
COUNTS = (0, 1, 7, 500, 2047, 2048, 2049, 40_000)  # of 8 bytes; up to 2048 is eager


class Message(NamedTuple):
    number: int
    source: int
    destination: int
    tag: int
    count: int


def program(seed: int, size: int) -> list[Message]:
    random = Random(seed)
    counts = COUNTS if seed % 2 else COUNTS[:6]
    messages = []
    for number in range(random.randint(1, 40)):
        source, destination = random.sample(range(size), 2)
        messages.append(Message(number, source, destination, random.randint(0, 2), random.choice(counts)))
    return messages


def content(message: Message, seed: int) -> Any:
    return np.arange(message.count, dtype=np.int64) * 1000 + message.number + seed


def play(seed: int, rank: int, messages: list[Message]) -> None:
    """Issue this rank's part: sends and receives keep their order among those of one peer and tag, and only that."""
    random = Random(seed * 1000 + rank)
    sends = [message for message in messages if message.source == rank]
    receives = [message for message in messages if message.destination == rank]
    works: list[Any] = []
    arrays: list[tuple[Message, Any]] = []
    kept: list[Any] = []
    while sends or receives:
        if sends and (not receives or random.random() < 0.5):
            message = sends.pop(0)
            kept.append(content(message, seed))
            if message.count <= 2048 and random.random() < 0.5:
                dist.send(kept[-1], message.destination, tag=message.tag)  # eager: completes without its receive
            else:
                works.append(dist.isend(kept[-1], message.destination, tag=message.tag))
        else:
            # Any receive may come first, as long as none of its own peer and tag is overtaken.
            heads = {(message.source, message.tag): message for message in reversed(receives)}
            message = random.choice(sorted(heads.values()))
            receives.remove(message)
            arrays.append((message, np.full(message.count, -1, np.int64)))
            works.append(dist.irecv(arrays[-1][1], message.source, tag=message.tag))
    random.shuffle(works)
    for work in works:
        work.wait()
    for message, array in arrays:
        assert (array == content(message, seed)).all(), message


def play_all(rank: int, size: int, first: int, programs: int) -> None:
    dist.init_process_group(timeout=100)
    for seed in range(first, first + programs):
        with naming(f"program {seed} of {size} ranks, which PROCGROUP_TEST_SEED={seed} plays first"):
            play(seed, rank, program(seed, size))
            if seed % 5 == 0:
                dist.barrier()


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_every_program_that_must_complete_completes(transport: str) -> None:
    for size in (2, 4) if PROGRAMS > 40 else (4,):
        arguments = (FIRST_SEED or size * 10_000, PROGRAMS)
        run(play_all, size, args=arguments, timeout=150, environment={"PROCGROUP_TRANSPORT": transport})
