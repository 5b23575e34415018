"""DistributedDataParallel: a torch module whose gradients are averaged over the ranks of a group."""

from __future__ import annotations

import copy
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from operator import attrgetter
from typing import Any, TypeVar

from procgroup.arrays.untraced import untraced
from procgroup.groups.group import ProcessGroup
from procgroup.parallel.communication_hooks.interface import Hook
from procgroup.parallel.ddp.arguments import (
    bucket_limits,
    buffer_options,
    builtin_hook,
    choose_group,
    delayed_names,
    require_group,
    require_wrappable,
)
from procgroup.parallel.ddp.backward import BackwardOptimizers, find_tensors
from procgroup.parallel.ddp.captured_steps import require_no_join
from procgroup.parallel.ddp.devices import choose_devices, make_groups, needs_further_groups
from procgroup.parallel.ddp.lost_ranks import RAISE, LostRanks, require_choice
from procgroup.parallel.ddp.mixed_precision import MixedPrecision, NarrowCopies
from procgroup.parallel.ddp.model_checks import ParameterCheck, require_same_model
from procgroup.parallel.ddp.model_join import ModelJoinHook
from procgroup.parallel.ddp.module_buffers import ModuleBuffers
from procgroup.parallel.ddp.reducer import Reducer
from procgroup.parallel.ddp.round import sparse_parameters
from procgroup.parallel.group_choice import default_group
from procgroup.parallel.join import Join, Joinable
from procgroup.parallel.pytorch import torch
from procgroup.parallel.sync_batch_norm import adopt_sync_batch_norms

Result = TypeVar("Result")

_NOT_COPIED = (
    "process_group",
    "_group",
    "_groups",
    "_reducer",
    "_buffers_of_module",
    "_finalizer",
    "_precision",
    "_entered_hook",
    "_join_config",
    "_join_hook",
    "_parameter_check",
    "_lost_ranks",
)


class DistributedDataParallel(torch.nn.Module, Joinable):  # type: ignore[misc]
    """Wrap a PyTorch module on every rank of a group; each backward averages the gradients over the ranks.

    The arguments are those of ``torch.nn.parallel.DistributedDataParallel``. Unused parameters, shared parameters and
    checkpointed modules need no option: ``find_unused_parameters``, ``gradient_as_bucket_view`` and
    ``batched_grad_copy`` are accepted and have no effect. The module is in CPU memory, on one GPU, or on several GPUs.
    With ``device_ids=[gpu]``, the module's one GPU, the inputs of each forward are moved to it.

    ``on_lost_rank`` says what happens when a rank is lost. "raise": the other ranks raise PeerLost or PeerFailed.
    "shrink": they go on as a smaller default group; the backward that had begun averages the gradients of these ranks.
    "replace": they do so until the next forward, which waits for a new process in the place of each lost one, and gives
    it the model and the states of ``share_state``. Collectives of the program itself have to be made in ``retry``.

    Raises RuntimeError, TypeError and ValueError for arguments and modules that are not supported, before anything is
    sent; ModelMismatch on every rank when the ranks' parameters differ.
    """

    forward_sync_buffers: bool
    _join_config: Any = None  # set by torch's Join on each of its joinables
    _lost_ranks: LostRanks | None = None

    def __init__(
        self,
        module: Any,
        device_ids: Sequence[Any] | None = None,
        output_device: Any = None,
        dim: int = 0,
        broadcast_buffers: bool | None = None,
        init_sync: bool = True,
        process_group: Any = None,
        bucket_cap_mb: float | None = None,
        find_unused_parameters: bool = False,
        check_reduction: bool = False,
        gradient_as_bucket_view: bool = False,
        static_graph: bool = False,
        delay_all_reduce_named_params: Sequence[tuple[str, Any]] | None = None,
        param_to_hook_all_reduce: Any = None,
        mixed_precision: Any = None,
        device_mesh: Any = None,
        skip_all_reduce_unused_params: bool = False,
        bucket_cap_mb_list: Sequence[float] | None = None,
        batched_grad_copy: bool = False,
        forward_sync_buffers: bool | None = None,
        on_lost_rank: str = RAISE,
    ) -> None:
        super().__init__()
        self.process_group: Any = choose_group(process_group, device_mesh)
        self._group = require_group(self.process_group)
        self.parameters_to_ignore: frozenset[str] = frozenset(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))
        named = self._named(module)
        require_wrappable(named)
        self._devices = choose_devices(named, device_ids, output_device)
        require_choice(on_lost_rank, process_group is None and self.process_group is self._group)
        if on_lost_rank != RAISE and needs_further_groups(self._group, self._devices.all):
            raise ValueError(
                f"on_lost_rank={on_lost_rank!r} is for modules on one device, but this one is on "
                f"{', '.join(map(str, self._devices.all))}, which has a group of NCCL for each GPU."
            )
        self._delayed = delayed_names(delay_all_reduce_named_params, param_to_hook_all_reduce, module)
        if check_reduction:
            warnings.warn(
                "The `check_reduction` argument in `DistributedDataParallel` module is deprecated. "
                "Please avoid using it.",
                FutureWarning,
                stacklevel=2,
            )
        self.forward_sync_buffers, init_sync_buffers = buffer_options(broadcast_buffers, forward_sync_buffers)
        adopt_sync_batch_norms(module, None if self.process_group is default_group() else self.process_group)
        self.module = module
        self.dim = dim
        self.device: torch.device = self._devices.all[0]
        self.device_type: str = self.device.type
        self.is_multi_device_module: bool = len(self._devices.all) > 1
        self.device_ids: list[int] | None = self._devices.ids
        self.output_device: int | None = self._devices.output
        self.find_unused_parameters = find_unused_parameters
        self.gradient_as_bucket_view = gradient_as_bucket_view
        self.static_graph: bool = static_graph
        self.skip_all_reduce_unused_params = skip_all_reduce_unused_params
        self.mixed_precision = mixed_precision
        self.on_lost_rank: str = on_lost_rank
        self.require_backward_grad_sync: bool = True
        self.require_forward_param_sync: bool = True
        self._limits = bucket_limits(bucket_cap_mb, bucket_cap_mb_list, self._devices.on_gpus)
        self._communication_hook: tuple[Any, Hook] | None = None
        self._optimizers = BackwardOptimizers()
        if on_lost_rank != RAISE:
            self._lost_ranks = LostRanks(self._group, on_lost_rank, self)
        new = self._lost_ranks if self._lost_ranks is not None and self._lost_ranks.is_new else None
        if init_sync and new is None:
            require_same_model(self._group, named)
        self._groups = make_groups(self._group, self._devices.all)
        self._attach()
        if new is not None:
            new.receive_model()
        elif init_sync:
            self._broadcast_state(0, init_sync_buffers)

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Call the module, with the buffers of rank 0. The backward of its output averages gradients."""
        is_recording = torch.is_grad_enabled()
        self._before_forward(is_recording)
        inputs, kwargs = self._devices.take_in(inputs, kwargs)
        copies = None
        if self._precision is None:
            output = self.module(*inputs, **kwargs)
        else:
            output, copies = self._precision.call(inputs, kwargs)
        self._after_forward(output, is_recording, copies)
        return output

    @untraced
    def _before_forward(self, is_recording: bool) -> None:
        if self._parameter_check.rescan():
            self._buffers_of_module.rescan()
        if is_recording:
            self._parameter_check.require_known_parameters()
            self._optimizers.take_over(self.module.parameters())
            self._reducer.prepare()
        if self._lost_ranks is not None:
            self._enter_forward(self._lost_ranks, is_recording and self.require_backward_grad_sync)
            return
        copies_buffers = self.will_sync_module_buffers()
        root = self._announce_forward(copies_buffers, is_recording)
        if copies_buffers:
            self._buffers_of_module.broadcast(root)

    def _enter_forward(self, lost_ranks: LostRanks, begins_round: bool) -> None:
        """Copy the buffers of rank 0, in a group that may have to be filled up first."""
        lost_ranks.require_state()
        exchanges = lost_ranks.exchanges

        def copy_buffers() -> None:
            if begins_round and exchanges.is_fill_up_due:
                lost_ranks.fill_up()
                self.require_forward_param_sync = True  # as in the new process
            if self.will_sync_module_buffers():
                self._buffers_of_module.broadcast(0)

        if (begins_round and (exchanges.is_fill_up_due or lost_ranks.is_new)) or self.will_sync_module_buffers():
            exchanges.run(copy_buffers)
        lost_ranks.is_new = False
        if begins_round:
            exchanges.has_begun_round = True

    @untraced
    def _after_forward(self, output: Any, is_recording: bool, copies: NarrowCopies | None) -> None:
        """Register hooks on the output: they begin the backward, before any hook of the module's parameters."""
        is_round = is_recording and self.require_backward_grad_sync
        self.require_forward_param_sync = is_round
        if not is_recording:
            return
        self._reducer.expects_round = is_round
        # The hook refers to the reducer only: a module may keep its output, which must not keep its wrapper alive.
        begin = partial(_begin, self._reducer, is_round, copies)
        for tensor in find_tensors(output):
            if tensor.grad_fn is not None:
                tensor.register_hook(begin)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients on each rank; the first backward of a forward outside of the block averages them."""
        before = self.require_backward_grad_sync
        self.require_backward_grad_sync = False
        try:
            yield
        finally:
            self.require_backward_grad_sync = before

    def register_comm_hook(self, state: object, hook: Hook) -> None:
        """Average each bucket with ``hook(state, bucket)`` instead of all_reduce, as soon as the bucket is complete.

        The hook returns an object with ``wait()``, such as a Future of procgroup or of torch, which returns a tensor
        with the bucket's number of elements. Dividing by the world size is left to the hook. ``wait`` is called bucket
        by bucket at the end of the backward, so collectives within it have the same order on all ranks. Raises
        RuntimeError when a hook is registered already, TypeError when the hook is not callable.
        """
        if self._lost_ranks is not None:
            raise RuntimeError(
                f"on_lost_rank={self.on_lost_rank!r} cannot be used with communication hooks: what a hook has done "
                "cannot be undone for another attempt."
            )
        if not callable(hook):
            raise TypeError("Communication hook must be callable.")
        if self._communication_hook is not None:
            raise RuntimeError("register_comm_hook or register_builtin_comm_hook can only be called once.")
        self._communication_hook = (state, hook)
        self._reducer.set_hook(state, hook)

    def will_sync_module_buffers(self) -> bool:
        """Return whether the next forward copies the buffers of rank 0 to all ranks."""
        return bool(self.require_forward_param_sync and self.forward_sync_buffers and self._buffers_of_module)

    @property
    def broadcast_buffers(self) -> bool:
        """The old name of ``forward_sync_buffers``."""
        return self.forward_sync_buffers

    @broadcast_buffers.setter
    def broadcast_buffers(self, value: bool) -> None:
        self.forward_sync_buffers = value

    # Ranks that are lost.

    def share_state(self, *states: Any) -> None:
        """Give new processes the state of these objects, too: of optimizers, schedulers, and what counts the steps.

        Each has ``state_dict()``, which returns numbers, texts, tensors and containers of these, and
        ``load_state_dict(state)``. Every rank calls it with the same objects, before its first forward; a new process,
        with ``on_lost_rank="replace"``, gets the state of a rank that has stayed, with all tensors in host memory, from
        where optimizers load them to the devices of their parameters. Raises TypeError for other objects,
        and ArgumentError in a new process when the other ranks share another number of them.
        """
        if self._lost_ranks is not None:
            self._lost_ranks.share(states)

    def retry(self, function: Callable[[], Result]) -> Result:
        """Call ``function``, which makes collectives; call it again when a rank is lost in them. Return its result.

        All ranks call it between the same two forwards or backwards, never inside of one. What ``function`` changes it
        must be able to change again: ``lambda: average(loss.item())`` rather than a call that works in one array. With
        ``on_lost_rank="raise"`` it is called once.
        """
        return function() if self._lost_ranks is None else self._lost_ranks.exchanges.run(function)

    def _change_group(self, group: ProcessGroup) -> None:
        self.process_group = self._group = group
        self._groups.group = group

    def _send_model(self, group: ProcessGroup, root: int) -> None:
        """Copy the model of a rank to all; begin with new buckets, since new ranks do not know the order of arrival."""
        require_same_model(group, self._named(self.module))
        if self._finalizer.detach():
            self._reducer.remove_hooks()
        self._attach()
        self._broadcast_state(root, with_buffers=True)

    # Training on uneven inputs.

    def join(
        self, divide_by_initial_world_size: bool = True, enable: bool = True, throw_on_early_termination: bool = False
    ) -> Join:
        """Return a context in which ranks may have different numbers of inputs. All ranks enter it.

        A rank that leaves it contributes zero gradients to the others' backwards until all have left; then all ranks
        get the model of a rank that left last. Gradients are divided by the number of all ranks or, without
        ``divide_by_initial_world_size``, of the ranks that still have inputs. With ``throw_on_early_termination`` all
        ranks raise InputsExhausted at the step at which the first has no more inputs. Optimizers of ranks that have
        left do not step.
        """
        if self._lost_ranks is not None:
            raise RuntimeError(f"join() cannot be used with on_lost_rank={self.on_lost_rank!r}")
        return Join(
            [self], enable, throw_on_early_termination, divide_by_initial_world_size=divide_by_initial_world_size
        )

    def join_hook(self, **kwargs: Any) -> ModelJoinHook:
        """Return the hook with which a joined rank takes part, for procgroup's Join and for torch's; see ``join``."""
        self._join_hook = ModelJoinHook(
            self._group,
            self._reducer,
            self._buffers_of_module if self.forward_sync_buffers else None,
            copy_from=self._copy_from,
            divide_by_initial_world_size=kwargs.get("divide_by_initial_world_size", True),
        )
        return self._join_hook

    @property
    def join_process_group(self) -> Any:
        """The group of the model."""
        return self.process_group

    @property
    def join_device(self) -> Any:
        """The device on which torch's Join creates tensors."""
        return self.device

    def _announce_forward(self, copies_buffers: bool, is_recording: bool) -> int:
        """Announce a forward within a Join; return the rank whose buffers are copied."""
        if self._entered_hook is None and not (self._join_config is not None and self._join_config.enable):
            return 0
        if self._devices.on_gpus:
            require_no_join()
        if self._entered_hook is not None:
            return self._join_hook.announce_forward(copies_buffers)
        is_round = is_recording and self.require_backward_grad_sync
        return self._join_hook.announce_iteration(self, copies_buffers, is_round)

    def _copy_from(self, root: int) -> None:
        """Copy the parameters and buffers of a rank to all ranks at the end of a Join."""
        self.require_forward_param_sync = True
        self._broadcast_state(root, self.forward_sync_buffers)

    # Private names of torch's class that programs use.

    @staticmethod
    def _set_params_and_buffers_to_ignore_for_model(module: Any, params_and_buffers_to_ignore: Sequence[str]) -> None:
        """Set the names of parameters and buffers that a later wrapper of ``module`` ignores."""
        module._ddp_params_and_buffers_to_ignore = params_and_buffers_to_ignore

    def _set_static_graph(self) -> None:
        """Set ``static_graph=True`` after construction. Raises RuntimeError after the first backward."""
        if self.static_graph:
            warnings.warn("You've set static_graph to be True, no need to set it again.", stacklevel=2)
            return
        self._reducer.set_static_graph()
        self.static_graph = True

    def _register_builtin_comm_hook(self, comm_hook_type: Any) -> None:
        """Register the hook for a member of torch.distributed.BuiltinCommHookType."""
        self.register_comm_hook(self.process_group, builtin_hook(comm_hook_type))

    def _register_fused_optim(
        self, optim: Any, *args: Any, optim_params: Iterable[Any] | None = None, **kwargs: Any
    ) -> None:
        """Create an optimizer of class ``optim`` that steps at the end of each backward with averaged gradients."""
        chosen = [each for each in self.module.parameters() if each.requires_grad]
        self._optimizers.created.append(optim(list(chosen if optim_params is None else optim_params), *args, **kwargs))

    def _get_ddp_logging_data(self) -> dict[str, Any]:
        """Return a description of this wrapper under torch's names."""
        buckets = self._reducer.buckets
        parameters = [slot.parameter for bucket in buckets for slot in bucket.slots]
        return {
            "module_name": type(self.module).__name__,
            "world_size": self._group.size(),
            "rank": self._group.rank(),
            "backend_name": "procgroup",
            "device_ids": ", ".join(map(str, self.device_ids or ())),
            "output_device": -1 if self.output_device is None else self.output_device,
            "broadcast_buffers": int(self.forward_sync_buffers),
            "find_unused_parameters": int(self.find_unused_parameters),
            "gradient_as_bucket_view": int(self.gradient_as_bucket_view),
            "static_graph": int(self.static_graph),
            "bucket_cap_bytes": self._limits[-1],
            "bucket_sizes": ", ".join(str(bucket.nbytes) for bucket in buckets),
            "dtypes": ", ".join(dict.fromkeys(str(each.dtype).removeprefix("torch.") for each in parameters)),
            "num_parameter_tensors": len(parameters),
            "total_parameter_size_bytes": sum(each.nbytes for each in parameters),
        }

    # State that belongs to one process: created anew in a copy and after unpickling.

    def _named(self, module: Any) -> list[tuple[str, Any]]:
        """Return the names and parameters of a module without the ignored ones, each parameter once."""
        return [named for named in module.named_parameters() if named[0] not in self.parameters_to_ignore]

    def _broadcast_state(self, root: int, with_buffers: bool) -> None:
        """Broadcast the parameters, and optionally the buffers, of a rank."""
        tensors = [parameter for _, parameter in self._named(self.module)]
        for tensor in tensors + (self._buffers_of_module.tensors() if with_buffers else []):
            _broadcast(self._groups.of(tensor), tensor.detach(), root)

    def _attach(self) -> None:
        """Create the reducer, with its hooks on the parameters, and the other state of this process."""
        self._buffers_of_module = ModuleBuffers(self.module, self._groups, self.parameters_to_ignore)
        chosen = self.mixed_precision
        self._precision = MixedPrecision(chosen, self.module, self.parameters_to_ignore) if chosen else None
        self._reducer = Reducer(
            self._groups,
            [named for named in self._named(self.module) if named[1].requires_grad],
            limits=self._limits,
            sparse=sparse_parameters(self.module),
            delayed=self._delayed,
            static_graph=self.static_graph,
            leaves_out_unused=self.skip_all_reduce_unused_params,
            after_round=self._optimizers.step,
            gradient_dtype=self._precision.gradient_dtype if self._precision else attrgetter("dtype"),
            exchanges=None if self._lost_ranks is None else self._lost_ranks.exchanges,
        )
        if self._communication_hook is not None:
            self._reducer.set_hook(*self._communication_hook)
        averaged = self._reducer.parameter_ids
        self._parameter_check: ParameterCheck = ParameterCheck(self.module, self.parameters_to_ignore, averaged)
        self._finalizer = weakref.finalize(self, self._reducer.remove_hooks)
        self._finalizer.atexit = False

    def __getstate__(self) -> dict[str, Any]:
        if not self._group.is_usable() or self.process_group is not default_group():
            raise RuntimeError(
                "DDP Pickling/Unpickling are only supported when using DDP with the default process group. That is, "
                "when you have called init_process_group and have not passed process_group argument to DDP constructor"
            )
        return {name: value for name, value in self.__dict__.items() if name not in _NOT_COPIED}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.on_lost_rank = RAISE
        self.process_group = default_group()
        self._group = require_group(self.process_group)
        self._groups = make_groups(self._group, self._devices.all)
        self._attach()

    def __deepcopy__(self, memo: dict[int, Any]) -> DistributedDataParallel:
        made: DistributedDataParallel = type(self).__new__(type(self))
        memo[id(self)] = made
        state = {name: value for name, value in self.__dict__.items() if name not in _NOT_COPIED}
        torch.nn.Module.__setstate__(made, copy.deepcopy(state, memo))
        made.on_lost_rank = RAISE
        made.process_group, made._group, made._groups = self.process_group, self._group, copy.copy(self._groups)
        made._attach()
        return made


def _broadcast(group: ProcessGroup, tensor: Any, root: int) -> None:
    if tensor.is_cpu or tensor.is_contiguous():
        group.broadcast(tensor, root)
        return
    dense = tensor.contiguous()  # as arrays on GPUs have to be
    group.broadcast(dense, root)
    tensor.copy_(dense)


@untraced
def _begin(reducer: Reducer, is_round: bool, copies: NarrowCopies | None, gradient: Any) -> None:
    reducer.begin(is_round, copies)
