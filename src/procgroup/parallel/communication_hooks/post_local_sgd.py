"""Gradients that are averaged within small groups, or not at all, once training is under way.

Lin et al., "Don't Use Large Mini-Batches, Use Local SGD", arXiv 1808.07217. What the small groups learn is brought
together by averaging parameters: see ``model_averaging``.
"""

from __future__ import annotations

from procgroup.groups.group import ProcessGroup
from procgroup.parallel.communication_hooks.default_hooks import average
from procgroup.parallel.communication_hooks.hook_state import HookState
from procgroup.parallel.communication_hooks.pending import Done, Pending
from procgroup.parallel.grad_bucket import GradBucket


class PostLocalSGDState(HookState):
    """What ``post_localSGD_hook`` keeps: the number of steps, and who averages from ``start_localSGD_iter`` on.

    Then the ranks of ``subgroup`` average or, without ``post_local_gradient_allreduce``, no ranks do. Both numbers must
    be the same on all ranks. Raises ValueError for a negative start, and where a subgroup is needed and not given.
    """

    SHARED = ("start_localSGD_iter", "post_local_gradient_allreduce")
    GROUPS = ("process_group", "subgroup")

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
        if post_local_gradient_allreduce and subgroup is None:
            raise ValueError(
                "post_local_gradient_allreduce averages over the ranks of `subgroup`, and it is None. Pass one, such "
                "as procgroup.new_subgroups(group_size)[0], or post_local_gradient_allreduce=False."
            )
        self.subgroup = subgroup
        self.start_localSGD_iter = start_localSGD_iter
        self.post_local_gradient_allreduce = post_local_gradient_allreduce
        self.iter = 0


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
        return average(state.subgroup, bucket.buffer())
    return Done(bucket.buffer())
