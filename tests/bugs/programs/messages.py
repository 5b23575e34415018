"""Messages that do not fit, do not come, or wait for each other."""

from __future__ import annotations

import time

from bugs.bug import LONG_TIMEOUT, TIMEOUT, absence, deadlock, death, harmless, mismatch
from bugs.library import dist, expect, full, join

LARGE = 1_000_000
"""Elements of a message that is not sent before it is received."""

# A message does not carry the line that sent it, so the receiver of one that does not fit names the sender alone.


@mismatch(guilty=(0,), victims=(1,), guilty_errors=None, has_line=False)
def message_is_longer_than_its_array() -> None:
    """Rank 0 sends five numbers, rank 1 has room for four."""
    join()
    if dist.get_rank() == 0:
        dist.send(full(5, 1.0), 1)  # BUG
    elif dist.get_rank() == 1:
        dist.recv(full(4, 7.0), 0)


@mismatch(guilty=(0,), victims=(1,), guilty_errors=None, has_line=False)
def message_is_shorter_than_its_array() -> None:
    """Rank 0 sends four numbers, rank 1 waits for five."""
    join()
    if dist.get_rank() == 0:
        dist.send(full(4, 1.0), 1)  # BUG
    elif dist.get_rank() == 1:
        dist.recv(full(5, 7.0), 0)


@mismatch("CollectiveMismatch", "PeerFailed", guilty=(0,), victims=(1,), has_line=False)
def large_message_is_longer_than_its_array() -> None:
    """Rank 0 sends a large array, and rank 1 has one that is shorter by one."""
    join()
    if dist.get_rank() == 0:
        dist.send(full(LARGE, 1.0), 1)  # BUG
    elif dist.get_rank() == 1:
        dist.recv(full(LARGE - 1, 7.0), 0)


@mismatch(guilty=(0,), victims=(1,), guilty_errors=None, has_line=False)
def dtype_of_a_message_differs() -> None:
    """Rank 0 sends float64, rank 1 receives int64: as many bytes, with another meaning."""
    join()
    if dist.get_rank() == 0:
        dist.send(full(4, 1.0, "float64"), 1)  # BUG
    elif dist.get_rank() == 1:
        dist.recv(full(4, 7, "int64"), 0)


@deadlock(guilty=(0, 1), size=2)
def both_receive_first() -> None:
    """Two ranks exchange their edges, and both receive before they send."""
    join(LONG_TIMEOUT)
    mine, theirs, other = full(4, 1.0), full(4, 0.0), 1 - dist.get_rank()
    dist.recv(theirs, other)  # BUG
    dist.send(mine, other)


@deadlock(guilty=(0, 1), size=2)
def both_send_first() -> None:
    """Two ranks exchange large arrays, and both send before they receive."""
    join(LONG_TIMEOUT)
    mine, theirs, other = full(LARGE, 1.0), full(LARGE, 0.0), 1 - dist.get_rank()
    dist.send(mine, other)  # BUG
    dist.recv(theirs, other)
    expect(theirs, 1.0)


@deadlock(guilty=(0, 1, 2))
def ring_of_receives() -> None:
    """Each rank receives from its left before it sends to its right, and nobody begins."""
    join(LONG_TIMEOUT)
    rank, size = dist.get_rank(), dist.get_world_size()
    values = full(4, 1.0)
    dist.recv(values, (rank - 1) % size)  # BUG
    dist.send(values, (rank + 1) % size)


@deadlock(guilty=(0, 1), size=2)
def both_wait_for_messages_that_nobody_sends() -> None:
    """Two ranks post their receives, and wait for these before they send."""
    join(LONG_TIMEOUT)
    mine, theirs, other = full(4, 1.0), full(4, 0.0), 1 - dist.get_rank()
    received = dist.irecv(theirs, other)  # BUG
    received.wait()
    dist.send(mine, other)


@deadlock(guilty=(0, 1), size=2)
def tags_of_an_exchange_differ() -> None:
    """Two ranks exchange large arrays with `isend` and `irecv`, and both take their own rank as the tag."""
    join(LONG_TIMEOUT)
    mine, theirs, rank = full(LARGE, 1.0), full(LARGE, 0.0), dist.get_rank()
    received = dist.irecv(theirs, 1 - rank, tag=rank)
    sent = dist.isend(mine, 1 - rank, tag=rank)  # BUG
    sent.wait()
    received.wait()
    expect(theirs, 1.0)


@harmless()
def exchange_is_slow() -> None:
    """Rank 1 comes late to an exchange of large arrays with its neighbours, and the others wait for it."""
    join(LONG_TIMEOUT)
    rank, size = dist.get_rank(), dist.get_world_size()
    values = full(LARGE, 0.0)
    received = dist.irecv(values, (rank - 1) % size)
    if rank == 1:
        time.sleep(TIMEOUT / 2)  # BUG
    sent = dist.isend(full(LARGE, 1.0), (rank + 1) % size)
    received.wait()
    sent.wait()
    expect(values, 1.0)


@deadlock("Deadlock", "PeerFailed", "CollectiveMismatch")
def received_from_the_wrong_rank() -> None:
    """Rank 0 sends, and rank 1 receives from rank 2, which is at the next barrier."""
    join(LONG_TIMEOUT)
    if dist.get_rank() == 0:
        dist.send(full(4, 1.0), 1)
    elif dist.get_rank() == 1:
        dist.recv(full(4, 0.0), 2)  # BUG
    dist.barrier()


@deadlock("Deadlock", "PeerFailed", "CollectiveMismatch")
def tag_is_wrong() -> None:
    """Rank 0 sends with tag 1, and rank 1 receives with tag 2."""
    join(LONG_TIMEOUT)
    if dist.get_rank() == 0:
        dist.send(full(4, 1.0), 1, tag=1)
    elif dist.get_rank() == 1:
        dist.recv(full(4, 0.0), 0, tag=2)  # BUG
    dist.barrier()


@deadlock("Deadlock", "PeerFailed", "CollectiveMismatch")
def message_is_not_received() -> None:
    """Rank 0 sends a large array to rank 1, which forgets to receive it and is at the next barrier."""
    join(LONG_TIMEOUT)
    if dist.get_rank() == 0:
        dist.send(full(LARGE, 1.0), 1)
    dist.barrier()  # BUG


@death(victims=(0,))
def message_is_not_sent() -> None:
    """Rank 0 receives from rank 1, whose program has ended without a send."""
    join()
    if dist.get_rank() == 0:
        dist.recv(full(4, 0.0), 1)
    elif dist.get_rank() == 1:
        dist.destroy_process_group()  # BUG


@absence(victims=(0,))
def message_comes_too_late() -> None:
    """Rank 0 receives from rank 1, which computes for longer than the timeout."""
    join()
    if dist.get_rank() == 0:
        dist.recv(full(4, 0.0), 1)
    elif dist.get_rank() == 1:
        time.sleep(20 * TIMEOUT)  # BUG
