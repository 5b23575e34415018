"""Local steps: ranks train alone, or in subgroups, and average their parameters now and then.

Post-local SGD averages gradients over all ranks in the first steps, then within subgroups only or not at all. The
subgroups are synchronized by averaging parameters. Lin et al., "Don't Use Large Mini-Batches, Use Local SGD",
arXiv 1808.07217.

In DiLoCo every rank takes many *inner* steps with its own optimizer. The change of its parameters is then averaged over
the ranks and used as the gradient of one *outer* step, SGD with Nesterov momentum, from the parameters before the inner
steps. Douillard et al., "DiLoCo: Distributed Low-Communication Training of Language Models", arXiv 2311.08105.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Iterable, Mapping, Sequence
from socket import gethostname
from typing import Any, ClassVar

from procgroup.api import exit_hooks
from procgroup.groups.future import Future
from procgroup.groups.group import ProcessGroup
from procgroup.parallel.communication_hooks.default_hooks import average
from procgroup.parallel.communication_hooks.hook_state import HookState, require_at_least, working_dtype
from procgroup.parallel.communication_hooks.interface import GradBucket, Waitable
from procgroup.parallel.group_choice import group_of
from procgroup.parallel.pytorch import torch
from procgroup.parallel.rank_comparison import gather, require_same
from procgroup.types import ReduceOp


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
        require_at_least(0, start_localSGD_iter=start_localSGD_iter)
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


def post_localSGD_hook(state: PostLocalSGDState, bucket: GradBucket) -> Waitable:  # noqa: N802 - torch's name
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
    unchanged = Future()
    unchanged.set_result(bucket.buffer())
    return unchanged


class PeriodicModelAverager:
    """Averages parameters over the ranks of a group after every ``period`` steps, from step ``warmup_steps`` on.

    Bytes sent: those of the parameters, once per period. Error: that of ``all_reduce`` with AVG; afterwards all ranks
    have the same bits. ``period`` and ``warmup_steps`` must be the same on all ranks. Raises ValueError for a period
    below 1 and a negative warm-up.
    """

    def __init__(self, period: int, warmup_steps: int = 0, process_group: ProcessGroup | None = None) -> None:
        require_at_least(0, warmup_steps=warmup_steps)
        require_at_least(1, period=period)
        if period == 1:
            warnings.warn(
                "With period=1 parameters are averaged after every step, which sends no less than averaging gradients "
                "does. Use DistributedDataParallel alone.",
                stacklevel=2,
            )
        self.process_group = process_group
        self.period = period
        self.warmup_steps = warmup_steps
        self.step: int = 0

    def average_parameters(self, params: Iterable[Any]) -> None:
        """Count a step, and average the parameters or parameter groups if the period has ended.

        Unlike in torch, parameters without a gradient are averaged too: all ranks must average the same parameters,
        and ranks may use different ones.
        """
        past = self.step - self.warmup_steps
        self.step += 1
        if past >= 0 and past % self.period == 0:
            entries = [entry["params"] if isinstance(entry, dict) else [entry] for entry in params]
            _average_tensors(self.process_group, [parameter for entry in entries for parameter in entry])


class PostLocalSGDOptimizer(torch.optim.Optimizer):  # type: ignore[misc]
    """An optimizer that averages the parameters over the ranks after its steps, with the period of its averager."""

    def __init__(self, optim: Any, averager: PeriodicModelAverager) -> None:
        # torch's constructor is not called: its state is that of the wrapped optimizer.
        self.optim = optim
        self.averager = averager
        self.param_groups: Any = optim.param_groups

    @property
    def state(self) -> Any:
        """The state of the wrapped optimizer."""
        return self.optim.state

    def __repr__(self) -> str:
        return repr(self.optim)

    def step(self, closure: Any = None) -> Any:
        """Step the wrapped optimizer, then average parameters if due. Returns the result of the wrapped optimizer."""
        loss = self.optim.step() if closure is None else self.optim.step(closure)
        self.averager.average_parameters(self.param_groups)
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset the gradients."""
        self.optim.zero_grad(set_to_none=set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters. Call it on all ranks, because these parameters are averaged too."""
        self.optim.add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the wrapped optimizer, and the averager's number of steps as ``step``."""
        return {**self.optim.state_dict(), "step": self.averager.step}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a ``state_dict``. Without ``step`` the averager counts from 0, with a warning as in torch."""
        self.optim.load_state_dict(state_dict)
        self.param_groups = self.optim.param_groups
        if "step" not in state_dict:
            warnings.warn(
                "Loaded state dict does not contain a step counter for an averager. Setting step counter to 0.",
                stacklevel=2,
            )
        self.averager.step = state_dict.get("step", 0)


class OuterSteps:
    """Takes an outer step after every ``every`` inner steps. Call ``step`` after each step of the inner optimizer.

    Bytes sent: 4 per parameter (8 for float64), once in ``every`` steps: for ``every`` = 500 one thousandth of those of
    averaging gradients. Error: that of ``all_reduce`` with AVG; after an outer step all ranks have the same bits. A NaN
    on one rank becomes a NaN on all. Memory: twice the parameters. Buffers, such as running statistics, are not
    synchronized. The default values are those of the paper; with ``learning_rate`` = 1 and ``momentum`` = 0 an outer
    step averages the parameters.

    All ranks create it together, with the same parameters and arguments; raises CollectiveMismatch otherwise,
    ValueError for ``every`` below 1 and without parameters.
    """

    def __init__(
        self,
        parameters: Iterable[Any],
        every: int,
        learning_rate: float = 0.7,
        momentum: float = 0.9,
        process_group: ProcessGroup | None = None,
    ) -> None:
        self.parameters: list[Any] = list(parameters)
        require_at_least(1, every=every)
        if not self.parameters:
            raise ValueError("Expected parameters to take outer steps with, got none.")
        self.every = every
        self.learning_rate = learning_rate
        self.momentum = momentum
        self.process_group = process_group
        self.count: int = 0
        self._begin = [self._wide(parameter) for parameter in self.parameters]
        self._velocity = [torch.zeros_like(begin) for begin in self._begin]
        mine = f"every={every}, learning_rate={learning_rate}, momentum={momentum}, parameters {self._digest()}"
        advice = "Begin with the same parameters and arguments on every rank; nothing was changed."
        require_same(group_of(process_group), "OuterSteps", mine, differing="outer steps", advice=advice)

    def step(self) -> bool:
        """Count an inner step, and take an outer step if one is due; return whether it was."""
        self.count += 1
        if self.count % self.every:
            return False
        with torch.no_grad():
            moved = [
                begin - self._wide(parameter) for begin, parameter in zip(self._begin, self.parameters, strict=True)
            ]
            _average_tensors(self.process_group, moved)
            for parameter, begin, velocity, gradient in zip(
                self.parameters, self._begin, self._velocity, moved, strict=True
            ):
                # Separate operations, each rounded once: the same result on every processor.
                velocity.mul_(self.momentum).add_(gradient)
                begin.sub_((velocity * self.momentum).add_(gradient).mul_(self.learning_rate))
                parameter.copy_(begin)
        return True

    def state_dict(self) -> dict[str, Any]:
        """Return the number of inner steps, the parameters of the last outer step, and the momentum."""
        return {
            "count": self.count,
            "begin": [begin.clone() for begin in self._begin],
            "velocity": [velocity.clone() for velocity in self._velocity],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a ``state_dict``; the parameters are not changed. Raises ValueError for other shapes."""
        shapes = [begin.shape for begin in self._begin]
        for name in ("begin", "velocity"):
            found = [tensor.shape for tensor in state[name]]
            if found != shapes:
                raise ValueError(f"Expected the state of parameters of shapes {shapes}, got {found}.")
        self.count = state["count"]
        self._begin = [tensor.clone() for tensor in state["begin"]]
        self._velocity = [tensor.clone() for tensor in state["velocity"]]

    def _wide(self, parameter: Any) -> Any:
        return parameter.detach().to(working_dtype(parameter), copy=True)

    def _digest(self) -> str:
        digest = hashlib.sha256()
        for begin in self._begin:
            digest.update(f"{begin.dtype} {tuple(begin.shape)}".encode())
            digest.update(begin.cpu().reshape(-1).view(torch.uint8).numpy())
        return digest.hexdigest()[:16]


def _average_tensors(process_group: ProcessGroup | None, tensors: Sequence[Any]) -> None:
    """Average tensors in place over the ranks, with one all_reduce per dtype and device."""
    group = group_of(process_group)
    with torch.no_grad():
        for kind in dict.fromkeys((tensor.dtype, tensor.device) for tensor in tensors):
            chosen = [tensor for tensor in tensors if (tensor.dtype, tensor.device) == kind]
            flat = torch.cat([tensor.reshape(-1) for tensor in chosen])
            group.all_reduce(flat, ReduceOp.AVG)
            for tensor, part in zip(chosen, flat.split([tensor.numel() for tensor in chosen]), strict=True):
                tensor.copy_(part.view(tensor.shape))


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
