"""Gradients that are averaged within small groups, or not at all, once training is under way.

Lin et al., "Don't Use Large Mini-Batches, Use Local SGD", arXiv 1808.07217. What the small groups learn is brought
together by averaging parameters: see ``model_averaging``.
"""

from __future__ import annotations

from socket import gethostname
from typing import ClassVar

from procgroup import types
from procgroup.api import leaving
from procgroup.groups import objects
from procgroup.groups.group import ProcessGroup
from procgroup.parallel.communication_hooks.default_hooks import average
from procgroup.parallel.communication_hooks.hook_state import HookState
from procgroup.parallel.communication_hooks.interface import Done, GradBucket, Pending
from procgroup.parallel.group_choice import group_of


class PostLocalSGDState(HookState):
    """What ``post_localSGD_hook`` keeps: the number of steps, and who averages from ``start_localSGD_iter`` on.

    Then the ranks of ``subgroup`` average or, without ``post_local_gradient_allreduce``, no ranks do. ``subgroup`` is
    by default the ranks of this host, as host names tell; it is made by all ranks when it is used first, and all ranks
    or none give one. Both numbers must be the same on all ranks. Raises ValueError for a negative start.
    """

    SHARED: ClassVar[tuple[str, ...]] = ("start_localSGD_iter", "post_local_gradient_allreduce", "gives_subgroup")
    GROUPS: ClassVar[tuple[str, ...]] = ("process_group", "subgroup")
    OWN_GROUPS: ClassVar[tuple[str, ...]] = ("_of_host",)

    def __init__(
        self,
        process_group: ProcessGroup | None,
        subgroup: ProcessGroup | None,
        start_localSGD_iter: int,  # noqa: N803 - torch's name
        post_local_gradient_allreduce: bool = True,
    ) -> None:
        super().__init__(process_group)
        if start_localSGD_iter < 0:
            raise ValueError(f"Expected parameter `start_localSGD_iter` to be at least 0, got {start_localSGD_iter}.")
        self.subgroup = subgroup
        self.start_localSGD_iter = start_localSGD_iter
        self.post_local_gradient_allreduce = post_local_gradient_allreduce
        self.iter = 0
        self._of_host: ProcessGroup | None = None

    @property
    def gives_subgroup(self) -> bool:
        """Whether there is a subgroup of the caller's."""
        return self.subgroup is not None

    def local_group(self) -> ProcessGroup:
        """Return the subgroup; the first time, where none was given, all ranks make one for each host."""
        if self.subgroup is not None:
            return group_of(self.subgroup)
        if self._of_host is None:
            self._of_host = _ranks_of_host(self.group())
        return self._of_host


def post_localSGD_hook(state: PostLocalSGDState, bucket: GradBucket) -> Pending | Done:  # noqa: N802 - torch's name
    """Average the bucket over all ranks in the first steps, then over those of the subgroup or over none.

    Sent: the elements as they are, to fewer ranks. Error: that of ``all_reduce`` with AVG at first; then gradients are
    those of the subgroup, and the parameters of the ranks differ until they are averaged, by PeriodicModelAverager
    with ``warmup_steps`` = ``start_localSGD_iter`` or by PostLocalSGDOptimizer. Raises CollectiveMismatch for different
    settings.
    """
    group = state.group()
    is_global = state.iter < state.start_localSGD_iter
    if bucket.is_last():
        state.iter += 1
    if is_global:
        return average(group, bucket.buffer())
    if state.post_local_gradient_allreduce:
        return average(state.local_group(), bucket.buffer())
    return Done(bucket.buffer())


def _ranks_of_host(group: ProcessGroup) -> ProcessGroup:
    """Make a group of the ranks that are on this host; it ends with the one that it is made from."""
    hosts = objects.all_gather(group, gethostname(), types.seconds(group.timeout), safe=True)
    ranks = [rank for rank, host in enumerate(hosts) if host == hosts[group.rank()]]
    if len(ranks) == group.size():
        return group
    made = group.make_subgroup(
        ranks,
        op="PostLocalSGDState",
        group_name=f"{group.group_name}:host of rank {ranks[0]}",
        timeout=group.timeout,
        group_desc="the ranks of one host",
    )
    leaving.adopt(made, group)
    return made
