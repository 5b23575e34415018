"""The state of a job, on which its agents agree: the nodes, the round, and the round's progress.

Words: a *node* is one agent and the ranks that it starts. A *round* is one attempt of a fixed set of nodes, its
*members*, to run the program. Every agent holds the same ``JobState``. job_changes.py defines its changes,
shared_state.py how the agents agree on them.

The order of the members gives the node ranks. It is the order in which the nodes joined, and it is kept from round to
round, so a node rank changes only when a node with a lower one has left. A node rank that the user gave wins.

At most one part of a network that is cut may run the next round. ``JobState.previous`` holds the agents of the last
round that may still run ranks somewhere. More than half of them are a quorum. Exactly half of them are one with
``--on-partition continue``; without that flag only while they still have the store of the last round, which the other
half cannot reach then.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple, TypeVar, get_args, get_type_hints

from procgroup.launch.failures.evidence import printable
from procgroup.launch.hosted_store import WorkerStore
from procgroup.launch.program import RankRound

Phase = Literal["forming", "running", "stopping", "ended"]

MAX_STATE_BYTES = 8 << 20
"""The largest text that is read as a state."""


class Settings(NamedTuple):
    """The settings that all nodes of a job must share."""

    min_nodes: int = 1
    max_nodes: int = 1
    max_restarts: int = 0
    on_partition: str = ""


class Node(NamedTuple):
    """One agent. ``host`` is a name for messages, ``address`` the one at which other hosts reach its ranks.

    ``agent`` is a random id that the agent keeps for its life; ``id`` is a new one for each time that it joins.
    """

    id: str
    agent: str
    host: str
    pid: int
    processes: int
    address: str = ""
    role: str = "default"
    rank: int | None = None
    hosts_store: bool = False
    can_host: bool = False

    def __str__(self) -> str:
        return f"{self.host} (agent's pid {self.pid})"


class JobState(NamedTuple):
    """One version of the job's state.

    ``waiting`` are nodes that joined while a round was running. ``passed`` are the members that have finished the round
    (running) or ended their ranks (stopping). ``previous`` are the agents of the last round that may still run ranks
    somewhere. ``is_last``: no round follows the stopping one. ``is_recovery``: the store is not that of the last round.
    ``is_moving``: the node that hosts the store has left, so the next round begins at another store. ``failures`` are
    JSON texts, one for each rank that failed; ``reason`` is one line that says why the round ends. ``store`` is set
    once the first member hosts it. ``notice`` is the number of seconds that ranks have to save their work before a
    scheduler takes a node away; 0 without such a notice.
    """

    settings: Settings
    version: int = 0
    round: int = 0
    phase: Phase = "forming"
    members: tuple[Node, ...] = ()
    waiting: tuple[Node, ...] = ()
    passed: tuple[str, ...] = ()
    previous: tuple[str, ...] = ()
    restarts: int = 0
    is_last: bool = False
    is_recovery: bool = False
    is_moving: bool = False
    reason: str = ""
    failures: tuple[str, ...] = ()
    store: WorkerStore | None = None
    exit_status: int = 0
    notice: float = 0.0

    def node_rank(self, node_id: str) -> int | None:
        """Return the node's rank among the members; None where it is not a member."""
        return next((rank for rank, node in enumerate(self.members) if node.id == node_id), None)

    def node(self, node_id: str) -> Node | None:
        """Return a member or a waiting node by its id."""
        return next((node for node in (*self.members, *self.waiting) if node.id == node_id), None)

    def name(self, node: Node) -> str:
        """Return a node's host, with the agent's pid where several agents run on that host."""
        others = [other for other in (*self.members, *self.waiting) if other.id != node.id]
        return str(node) if any(other.host == node.host for other in others) else node.host

    @property
    def hosts(self) -> str:
        """The members' hosts as text, each host once."""
        agents = Counter(node.host for node in self.members)
        return ", ".join(host if number == 1 else f"{host} ({number} agents)" for host, number in agents.items())

    def round_of(self, node_rank: int, store: WorkerStore) -> RankRound:
        """Return the running round as one of its nodes sees it."""
        return RankRound(
            self.round,
            self.restarts,
            node_rank,
            self.members[node_rank].host,
            tuple(node.processes for node in self.members),
            tuple(node.role for node in self.members),
            store,
        )

    def to_json(self) -> str:
        """Return the state as JSON: an object, and each node and store in it another."""
        fields = {
            **self._asdict(),
            "settings": self.settings._asdict(),
            "members": [node._asdict() for node in self.members],
            "waiting": [node._asdict() for node in self.waiting],
            "store": None if self.store is None else self.store._asdict(),
        }
        return json.dumps(fields, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: bytes | str) -> JobState:
        """Read a state. Raises ValueError for anything else: every client of the store can write to it."""
        if len(text) > MAX_STATE_BYTES:
            raise ValueError(f"a job's state of {len(text)} bytes")
        try:
            fields = json.loads(text)
            if fields["phase"] not in get_args(Phase):
                raise ValueError(f"the phase {fields['phase']!r}")
            store = fields["store"]
            kinds = get_type_hints(cls)
            return cls(
                **{
                    **{name: kind(fields[name]) for name, kind in kinds.items() if kind in (int, bool, float)},
                    "reason": printable(str(fields["reason"])),
                    "settings": _read(Settings, fields["settings"]),
                    "phase": fields["phase"],
                    "members": tuple(_read_node(node) for node in fields["members"]),
                    "waiting": tuple(_read_node(node) for node in fields["waiting"]),
                    "passed": tuple(map(str, fields["passed"])),
                    "previous": tuple(map(str, fields["previous"])),
                    "failures": tuple(map(str, fields["failures"])),
                    "store": None if store is None else _read(WorkerStore, store),
                }
            )
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError, OverflowError) as error:
            raise ValueError(f"expected a job's state: {error!r}") from error


_Fields = TypeVar("_Fields", Settings, Node, WorkerStore)


def _read(cls: type[_Fields], fields: Mapping[str, Any]) -> _Fields:
    """Build an object after checking the types of its fields."""
    kinds = get_type_hints(cls)
    for name, value in fields.items():
        if not isinstance(value, kinds[name]):
            raise ValueError(f"{name} is {value!r:.80}")
    shown: dict[str, Any] = {n: printable(value) if isinstance(value, str) else value for n, value in fields.items()}
    return cls(**shown)


def _read_node(fields: Mapping[str, Any]) -> Node:
    node = _read(Node, fields)
    if not 0 < node.processes <= 1 << 20:
        raise ValueError(f"a node with {node.processes} processes")
    return node


def can_begin(state: JobState) -> bool:
    """Return whether the forming round has enough members to begin."""
    has_minimum = state.phase == "forming" and len(state.members) >= state.settings.min_nodes
    return has_minimum and not state.is_moving and has_quorum(state)


def has_quorum(state: JobState) -> bool:
    """Return whether the members may run a round; the largest number of nodes always may: no other part can have it."""
    if len(state.members) == state.settings.max_nodes:
        return True
    here = returning_members(state)
    if 2 * here == len(state.previous):
        policy = state.settings.on_partition
        return not state.previous or policy == "continue" or (policy == "" and not state.is_recovery)
    return 2 * here > len(state.previous)


def is_active(state: JobState) -> bool:
    """Return whether the nodes run a round, or can begin one."""
    return state.phase in ("running", "stopping") or can_begin(state)


def returning_members(state: JobState) -> int:
    """Return how many of the members were members of the last round."""
    return sum(node.agent in state.previous for node in state.members)
