"""A receive that fails names the messages that have come with another tag, and the tag that it awaits."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from failures.waiting_calls import TRANSPORTS, on

import procgroup as dist
from world import run

transports = pytest.mark.parametrize("transport", TRANSPORTS)


def forget_the_tag(rank: int, size: int, count: int, then: str) -> str:
    """Rank 0 sends with a tag, rank 1 receives without: the send is small, or waits for its receive."""
    dist.init_process_group(timeout=60)
    array = np.zeros(count)
    dist.barrier()
    try:
        if rank == 0:
            dist.send(array, 1, tag=3)
            if then == "receive":
                dist.recv(array, 1)
        elif then == "time limit":
            dist.recv(array, 0, timeout=1)
        else:
            dist.recv(array, 0)
    except dist.DistError as error:
        return str(error)
    return ""


UNREAD = "; a message from rank 0 is unread: it has tag 3, and this call awaits tag 0. "


@transports
@pytest.mark.parametrize("then", ["end", "receive", "time limit"])
def test_a_small_message_with_another_tag_is_named(then: str, transport: str) -> None:
    _, text = run(forget_the_tag, 2, args=(3, then), environment=on(transport))
    assert UNREAD in text, text
    if then == "end":
        # Its program leaves the groups first, and then the job.
        assert "its program ended without an error, and never made this call" in text or "it left the group" in text
    if then == "receive":
        assert "deadlock" in text, text


@transports
def test_a_deadlock_of_a_send_and_a_receive_names_both_tags(transport: str) -> None:
    sender, receiver = run(forget_the_tag, 2, args=(100_000, "end"), environment=on(transport))
    for text in (sender, receiver):
        assert "rank 0 in send to 1 with tag 3 at " in text and "rank 1 in recv from 0 with tag 0 at " in text, text


def send_an_object(rank: int, size: int) -> str:
    dist.init_process_group(timeout=60)
    dist.barrier()
    try:
        if rank == 0:
            dist.send_object_list([{"an": "object"}], 1)
        dist.recv(np.zeros(1), 1 - rank)
    except dist.Deadlock as error:
        return str(error)
    return ""


def test_an_unread_object_is_named_without_its_tag() -> None:
    _, text = run(send_an_object, 2)
    unread = "a message from rank 0 is unread: an object or a message of procgroup's own, and this call awaits"
    assert f"{unread} tag 0" in text, text


def receive_objects(rank: int, size: int) -> str:
    dist.init_process_group(timeout=60)
    dist.barrier()
    things: list[Any] = [None]
    with pytest.raises(dist.Deadlock) as caught:
        dist.recv_object_list(things, 1 - rank)
    return str(caught.value)


def test_a_deadlock_of_objects_names_the_function_and_no_tag() -> None:
    for text in run(receive_objects, 2):
        assert text.startswith("recv_object_list #"), text
        assert "rank 0 in recv from 1 at test_unread_messages.py:" in text and "tag" not in text, text
        assert text.count("(recv_object_list)") == 2, text
