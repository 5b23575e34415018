"""Post-local SGD: after the first steps, average gradients within subgroups only, or not at all.

Lin et al., "Don't Use Large Mini-Batches, Use Local SGD", arXiv 1808.07217. The subgroups are synchronized by averaging
parameters: see ``model_averaging``.
"""

from __future__ import annotations

from socket import gethostname
from typing import ClassVar

from procgroup.api import exit_hooks
from procgroup.groups.group import ProcessGroup
from procgroup.parallel.communication_hooks.default_hooks import average
from procgroup.parallel.communication_hooks.hook_state import HookState
from procgroup.parallel.communication_hooks.interface import Done, GradBucket, Pending
from procgroup.parallel.group_choice import group_of
from procgroup.parallel.rank_comparison import gather


class PostLocalSGDState(HookState):
    """The state of ``post_localSGD_hook``: the number of steps, and the group after ``start_localSGD_iter`` steps.

    From then on gradients are averaged over ``subgroup`` or, without ``post_local_gradient_allreduce``, not at
    all. The default subgroup is the ranks with the same host name; all ranks create it at its first use, so either all
    ranks or no rank may pass one. The other arguments must be the same on all ranks. Raises ValueError for a negative
    start.
    """

    SHARED: ClassVar[tuple[str, ...]] = ("start_localSGD_iter", "post_local_gradient_allreduce", "gives_subgroup")
    GROUPS: ClassVar[tuple[str, ...]] = ("process_group", "subgroup")
    OWN_GROUPS: ClassVar[tuple[str, ...]] = ("_host_group",)

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
        self._host_group: ProcessGroup | None = None

    @property
    def gives_subgroup(self) -> bool:
        """Whether the caller has passed a subgroup."""
        return self.subgroup is not None

    def local_group(self) -> ProcessGroup:
        """Return the subgroup. Without one all ranks create, at the first call, a group for each host."""
        if self.subgroup is not None:
            return group_of(self.subgroup)
        if self._host_group is None:
            self._host_group = _group_of_host(self.group())
        return self._host_group


def post_localSGD_hook(state: PostLocalSGDState, bucket: GradBucket) -> Pending | Done:  # noqa: N802 - torch's name
    """Average the bucket over all ranks in the first steps, then over the subgroup or not at all.

    Bytes sent: those of the elements, to fewer ranks. Error: that of ``all_reduce`` with AVG. After the first steps the
    average is that of the subgroup, and the parameters differ between subgroups until they are averaged, by
    PeriodicModelAverager with ``warmup_steps`` = ``start_localSGD_iter`` or by PostLocalSGDOptimizer. Raises
    CollectiveMismatch for different settings.
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


def _group_of_host(group: ProcessGroup) -> ProcessGroup:
    """Create a group of the ranks on this host. It is destroyed together with its parent group."""
    hosts = gather(group, gethostname())
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
    exit_hooks.adopt(made, group)
    return made
