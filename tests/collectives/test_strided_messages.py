"""Messages between arrays that are not contiguous, waited for in every way."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest
from collectives.contract_cases import TRANSPORTS

import procgroup as dist
from procgroup.testing import run_ranks
from world import placed


def exchange(count: int, way: str) -> list[Any] | None:
    if dist.get_rank() == 0:
        array = np.arange(2 * count)[::2]
        for _ in range(3):
            dist.send(array, 1)
        return None
    if way == "recv, when the message is there":
        time.sleep(0.05)  # most often the message is there by then
    columns = [np.full((count, 3), -1)[:, 1] for _ in range(3)]
    for column in columns:
        if way == "irecv":
            dist.irecv(column, 0).wait()
        else:
            dist.recv(column, 0)
    return columns


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("way", ["recv", "recv, when the message is there", "irecv"])
def test_what_is_received_into_a_column_is_there_when_the_call_has_completed(transport: str, way: str) -> None:
    for count in (1, 6, 1000, 200_000):
        columns = run_ranks(exchange, 2, count, way, **placed(transport, 2))[1]
        assert columns is not None
        for column in columns:
            assert np.array_equal(column, np.arange(2 * count)[::2]), count
