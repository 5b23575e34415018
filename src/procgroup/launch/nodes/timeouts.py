"""How long the agent of a node waits for other nodes, for its ranks to end, and for a store that is silent."""

from __future__ import annotations

from typing import NamedTuple


class Timeouts(NamedTuple):
    """The timeouts of an agent, in seconds.

    ``join`` is how long the agent waits for enough nodes, ``last_call`` how long for further ones before the first
    round, ``recovery`` the same after the store was lost. ``shutdown`` is how long ranks have from SIGTERM to SIGKILL
    (None: the defaults of ``shutdown_seconds``), ``cut_off`` the same when other nodes may start the next round
    meanwhile and no ``shutdown`` was asked for. A rank that hangs for ``hang`` seconds is killed (None: never).
    ``lead`` is the time between an agent's end of waiting for a silent store and the moment at which the store's host
    declares that agent lost.
    """

    join: float = 600.0
    last_call: float = 30.0
    recovery: float = 1.5
    shutdown: float | None = None
    hang: float | None = None
    cut_off: float = 0.75
    lead: float = 1.5
