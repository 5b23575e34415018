"""Measure the link between two ranks by messages: latency, bandwidth both ways, and the offset of their clocks.

::

    initiator                        partner
    [1]              ->                              many times; half of a round trip is the latency
                     <-   [its clock]
    [0]              ->
    [size], array    ->                              from 64 KiB on, growing until one takes long enough
                     <-   [0]
    [0]              ->
                     <-   [size], array              the same the other way

Every message has a deadline. The offset of the clocks is that of the fastest round trip, in whose middle the partner
read its clock; it is wrong by at most half of that round trip (the method of NTP, RFC 5905).

Many hosts are measured in rounds: in each, every host has one partner, so that no two links share a host (the schedule
of a tournament in which everybody meets everybody else).
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from procgroup.groups.group import ProcessGroup

LARGEST_BYTES = 16 << 20
_SMALLEST_BYTES = 64 << 10
_GROWTH = 4
MESSAGE_SECONDS = 10.0
"""The deadline of one message. Calls with a longer one would take part in deadlock reports, too."""

_ROUND_TRIPS = 10_000
_ROUND_TRIPS_SECONDS = 0.2
_LONG_ENOUGH_SECONDS = 0.05
_STREAM_SECONDS = 0.25
_STREAM_MESSAGES = 5
_TAG = 1

Clock = Callable[[], int]


class Speed(NamedTuple):
    """A measured link, as one of its ranks sees it: seconds, and bytes per second of messages that this rank sends.

    ``size`` is the size of these messages. ``clock_offset`` is how far the partner's clock is ahead of this rank's, in
    seconds, and ``clock_error`` by how much that may be wrong; both are known to the initiator only.
    """

    bandwidth: float
    size: int
    latency: float | None = None
    clock_offset: float | None = None
    clock_error: float | None = None


class Trip(NamedTuple):
    """One round trip, in nanoseconds: its beginning, its end and the partner's time by their clocks, and its length."""

    began: int
    ended: int
    partner: int
    length: int


def rounds(number: int) -> list[list[tuple[int, int]]]:
    """Return the rounds in which ``number`` hosts meet in pairs, the lower one first; every pair meets once."""
    places: list[int | None] = [*range(number), *([None] if number % 2 else [])]
    found = []
    for _ in range(len(places) - 1):
        half = len(places) // 2
        pairs = zip(places[:half], reversed(places[half:]), strict=True)
        met = [(min(a, b), max(a, b)) for a, b in pairs if a is not None and b is not None]
        found += [met] if met else []
        places = [places[0], places[-1], *places[1:-1]]
    return found


def measure_as_initiator(group: ProcessGroup, partner: int, clock: Clock = time.time_ns) -> Speed:
    """Measure the link to a rank of the group that calls ``measure_as_partner``. Raises DistError at a deadline."""
    messages = _LinkMessages(group, partner)
    trips = _ping(messages, clock)
    bandwidth, size = _stream(messages)
    _receive_stream(messages)
    fastest = min(trips, key=lambda trip: trip.length)
    return Speed(
        bandwidth,
        size,
        latency=statistics.median(trip.length for trip in trips) / 2e9,
        clock_offset=(fastest.partner - (fastest.began + fastest.ended) / 2) / 1e9,
        clock_error=fastest.length / 2e9,
    )


def measure_as_partner(group: ProcessGroup, initiator: int, clock: Clock = time.time_ns) -> Speed:
    """Measure the link to a rank of the group that calls ``measure_as_initiator``. Raises DistError at a deadline."""
    messages = _LinkMessages(group, initiator)
    while messages.receive():
        messages.send(clock())
    _receive_stream(messages)
    return Speed(*_stream(messages))


class _LinkMessages:
    """Sends numbers and arrays to one rank, and receives them from it."""

    def __init__(self, group: ProcessGroup, peer: int) -> None:
        self._group = group
        self._peer = peer
        self._number = np.zeros(1, np.int64)

    def send(self, number: int) -> None:
        self._number[0] = number
        self.send_array(self._number)

    def receive(self) -> int:
        self.receive_array(self._number)
        return int(self._number[0])

    def send_array(self, array: np.ndarray) -> None:
        self._group.send(array, self._peer, _TAG, timeout=MESSAGE_SECONDS)

    def receive_array(self, array: np.ndarray) -> None:
        self._group.recv(array, self._peer, _TAG, timeout=MESSAGE_SECONDS)


def _ping(messages: _LinkMessages, clock: Clock) -> list[Trip]:
    trips: list[Trip] = []
    end = time.monotonic() + _ROUND_TRIPS_SECONDS
    while len(trips) < _ROUND_TRIPS and (not trips or time.monotonic() < end):
        began, start = clock(), time.perf_counter_ns()
        messages.send(1)
        partner = messages.receive()
        trips.append(Trip(began, clock(), partner, time.perf_counter_ns() - start))
    messages.send(0)
    # The first ones are slower: threads wake up, and processors leave their idle states.
    return trips[len(trips) // 2 :]


def _stream(messages: _LinkMessages) -> tuple[float, int]:
    """Send growing messages, and then some of the last size; return (bytes per second, that size)."""
    array = np.ones(LARGEST_BYTES, np.uint8)  # zeros would be one page, which stays in the cache
    size, times = _SMALLEST_BYTES, [_send_one(messages, array[:_SMALLEST_BYTES])]
    while size < LARGEST_BYTES and times[0] < _LONG_ENOUGH_SECONDS:
        size = min(LARGEST_BYTES, size * _GROWTH)
        times = [_send_one(messages, array[:size])]
    while len(times) < _STREAM_MESSAGES and sum(times) < _STREAM_SECONDS:
        times.append(_send_one(messages, array[:size]))
    messages.send(0)
    return size / statistics.median(times), size


def _send_one(messages: _LinkMessages, array: np.ndarray) -> float:
    started = time.perf_counter()
    messages.send(array.nbytes)
    messages.send_array(array)
    messages.receive()
    return time.perf_counter() - started


def _receive_stream(messages: _LinkMessages) -> None:
    array = np.zeros(LARGEST_BYTES, np.uint8)
    while size := messages.receive():
        messages.receive_array(array[:size])
        messages.send(0)
