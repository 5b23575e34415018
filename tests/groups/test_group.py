"""A process group maps its ranks to the world's, whatever backend moves its bytes."""

from __future__ import annotations

from datetime import timedelta

import numpy as np
import pytest

from procgroup.backends.loopback import LoopbackBackend
from procgroup.errors import ForkedProcessError, GroupDestroyed
from procgroup.groups.backend import VERBS
from procgroup.groups.ended import EndedBackend
from procgroup.groups.group import ProcessGroup
from procgroup.stores.hash import HashStore


def group_of(*members: int) -> ProcessGroup:
    return ProcessGroup(
        LoopbackBackend(name="gloo", group_name="7", timeout=1.0),
        HashStore(),
        rank=0,
        members=members,
        group_name="7",
        timeout=timedelta(seconds=1),
        backend_config="cpu:gloo",
    )


def test_global_and_group_ranks_are_mapped_in_group_order() -> None:
    group = group_of(5, 2, 9)
    assert [group.global_rank(rank) for rank in range(3)] == [5, 2, 9]
    assert [group.group_rank(rank) for rank in (5, 2, 9)] == [0, 1, 2]


def test_a_rank_that_is_no_member_is_refused() -> None:
    group = group_of(5, 2)
    with pytest.raises(ValueError, match=r"Global rank 0 is not part of group 7, which has \(5, 2\)"):
        group.group_rank(0)
    with pytest.raises(ValueError, match="Group rank 2 is not part of group 7"):
        group.global_rank(2)


def test_a_receive_says_which_global_rank_the_message_came_from() -> None:
    group = group_of(5)
    work = group.irecv(np.zeros(1))
    group.send(np.ones(1), 0, async_op=True)
    assert work.wait()
    assert work.source_rank() == 5
    assert repr(work) == "<Work recv on group 7 (rank 0 of 1): complete>"
    assert repr(group) == "<ProcessGroup 7: rank 0 of 1, loopback>"


def test_shutdown_is_idempotent_and_later_calls_raise() -> None:
    group = group_of(0)
    assert group.is_usable()
    group.shutdown()
    group.shutdown()
    group.abort()
    assert not group.is_usable()
    assert (group.name(), group.transport) == ("gloo", "loopback")
    with pytest.raises(GroupDestroyed):
        group.barrier()


def test_a_forked_copy_says_what_happened() -> None:
    group = group_of(0)
    group.mark_forked()
    with pytest.raises(ForkedProcessError, match="process group 7 was used in a forked child"):
        group.all_reduce(np.ones(1))
    group.shutdown()
    with pytest.raises(ForkedProcessError):
        group.barrier()


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_of_a_group_that_has_ended_raises(verb: str) -> None:
    ended = EndedBackend(LoopbackBackend(name="gloo", group_name="7", timeout=1.0), GroupDestroyed, "7")
    with pytest.raises(GroupDestroyed):
        getattr(ended, verb)()


def test_aborting_ends_a_receive() -> None:
    group = group_of(0)
    work = group.irecv(np.zeros(1))
    future = work.get_future()
    group.abort()
    assert "the group was aborted" in str(work.exception())
    assert future.exception(timeout=1) is work.exception()
    assert (work.is_completed(), work.is_success()) == (True, False)
    with pytest.raises(RuntimeError, match="the group was aborted"):
        work.result()
