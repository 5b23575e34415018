"""Which nodes may run the next round: at most one part of a network that is cut may.

``JobState.previous`` holds the agents of the last round that may still run ranks somewhere. More than half of them are
a quorum. Exactly half of them are one with ``--on-partition continue``; without that flag only while they still have
the store of the last round, which the other half cannot reach then.
"""

from __future__ import annotations

from procgroup.launch.nodes.job_state import JobState


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
