"""DistributedDataParallel: a torch module whose gradients are averaged over the ranks of a group."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from operator import attrgetter
from typing import Any

from procgroup.arrays.untraced import untraced
from procgroup.parallel.backward_optimizers import Steps, take_over
from procgroup.parallel.grad_bucket import Hook
from procgroup.parallel.group_choice import default_group
from procgroup.parallel.joinable_model import JoinableModel
from procgroup.parallel.known_parameters import KnownParameters
from procgroup.parallel.mixed_precision import MixedPrecision, NarrowCopies
from procgroup.parallel.model_check import broadcast_tensors, require_same_model
from procgroup.parallel.module_buffers import ModuleBuffers
from procgroup.parallel.output_tensors import find_tensors
from procgroup.parallel.private_names import PrivateNames
from procgroup.parallel.pytorch import torch
from procgroup.parallel.reducer import Reducer
from procgroup.parallel.sparse_gradients import sparse_parameters
from procgroup.parallel.wrapping import (
    bucket_limits,
    buffer_choices,
    choose_group,
    delayed_names,
    require_group,
    require_wrappable,
    warn_of_check_reduction,
)

_NOT_COPIED = (
    "process_group",
    "_group",
    "_reducer",
    "_buffers_of_module",
    "_finalizer",
    "_precision",
    "_join",
    "_join_config",
    "_join_hook",
    "_known",
)


class DistributedDataParallel(PrivateNames, torch.nn.Module, JoinableModel):  # type: ignore[misc]
    """A module on every rank of a group, trained as one: each backward leaves the average of the ranks' gradients.

    The arguments are those of ``torch.nn.parallel.DistributedDataParallel``. Parameters that some ranks do not use,
    shared ones and checkpointed modules need no flag: ``find_unused_parameters``, ``gradient_as_bucket_view`` and
    ``batched_grad_copy`` are accepted, and change nothing. ``device_ids`` and ``output_device`` must be None: tensors
    lie in CPU memory.

    Raises RuntimeError, TypeError and ValueError for what cannot be wrapped, before anything is sent; ModelMismatch on
    every rank when the ranks' parameters differ.
    """

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
    ) -> None:
        super().__init__()
        self.process_group: Any = choose_group(process_group, device_mesh)
        self._group = require_group(self.process_group)
        self.parameters_to_ignore: frozenset[str] = frozenset(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))
        named = self._named(module)
        require_wrappable(module, named, device_ids, output_device)
        self._delayed = delayed_names(delay_all_reduce_named_params, param_to_hook_all_reduce, module)
        if check_reduction:
            warn_of_check_reduction()
        self.forward_sync_buffers, init_sync_buffers = buffer_choices(broadcast_buffers, forward_sync_buffers)
        self.module = module
        self.dim = dim
        self.device: torch.device = torch.device("cpu")
        self.device_type: str = "cpu"
        self.device_ids: None = None
        self.output_device: None = None
        self.find_unused_parameters = find_unused_parameters
        self.gradient_as_bucket_view = gradient_as_bucket_view
        self.static_graph = static_graph
        self.skip_all_reduce_unused_params = skip_all_reduce_unused_params
        self.mixed_precision = mixed_precision
        self.require_backward_grad_sync: bool = True
        self.require_forward_param_sync: bool = True
        self._limits = bucket_limits(bucket_cap_mb, bucket_cap_mb_list)
        self._communication_hook: tuple[Any, Hook] | None = None
        self._optimizers: list[Steps] = []
        self._looked_for_optimizers = False
        if init_sync:
            require_same_model(self._group, named)
        self._attach()
        if init_sync:
            buffers = self._buffers_of_module.tensors() if init_sync_buffers else []
            broadcast_tensors(self._group, [parameter for _, parameter in named] + buffers, 0)

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Call the module. Buffers are those of rank 0; the next backward averages gradients."""
        is_recording = torch.is_grad_enabled()
        self._before_forward(is_recording)
        copies = None
        if self._precision is None:
            output = self.module(*inputs, **kwargs)
        else:
            output, copies = self._precision.call(inputs, kwargs)
        self._after_forward(output, is_recording, copies)
        return output

    @untraced
    def _before_forward(self, is_recording: bool) -> None:
        if self._known.look_again():
            self._buffers_of_module.look()
        if is_recording:
            self._known.require_no_others()
            if not self._looked_for_optimizers:
                self._looked_for_optimizers = True
                self._optimizers += take_over(self.module.parameters())
            self._reducer.prepare()
        copies_buffers = self.will_sync_module_buffers()
        root = self._announce_forward(copies_buffers, is_recording)
        if copies_buffers:
            self._buffers_of_module.broadcast(root)

    @untraced
    def _after_forward(self, output: Any, is_recording: bool, copies: NarrowCopies | None) -> None:
        """Have the backward of the output say what it is, before anything inside of the module."""
        is_round = is_recording and self.require_backward_grad_sync
        self.require_forward_param_sync = is_round
        if not is_recording:
            return
        self._reducer.expects_round = is_round
        # Of the reducer only: a module may keep its output, and would keep its wrapper alive.
        begin = partial(_begin, self._reducer, is_round, copies)
        for tensor in find_tensors(output):
            if tensor.grad_fn is not None:
                tensor.register_hook(begin)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Let gradients add up on each rank; the first backward whose forward is outside averages all of them."""
        before = self.require_backward_grad_sync
        self.require_backward_grad_sync = False
        try:
            yield
        finally:
            self.require_backward_grad_sync = before

    def register_comm_hook(self, state: object, hook: Hook) -> None:
        """Have ``hook(state, bucket)`` average each bucket, once it is complete, in place of all_reduce.

        It returns something with ``wait()``, such as a Future of procgroup or of torch, which gives a tensor of as
        many elements as the bucket, divided by the world size if it is to be. ``wait`` is called bucket by bucket at
        the end of the backward, so calls that it makes come in the same order on all ranks. Raises RuntimeError when
        there is a hook already, TypeError when it cannot be called.
        """
        if not callable(hook):
            raise TypeError("Communication hook must be callable.")
        if self._communication_hook is not None:
            raise RuntimeError("register_comm_hook or register_builtin_comm_hook can only be called once.")
        self._communication_hook = (state, hook)
        self._reducer.set_hook(state, hook)

    def will_sync_module_buffers(self) -> bool:
        """Tell whether the next forward copies the buffers of rank 0 to all ranks."""
        return bool(self.require_forward_param_sync and self.forward_sync_buffers and self._buffers_of_module)

    @property
    def broadcast_buffers(self) -> bool:
        """The old name of ``forward_sync_buffers``."""
        return self.forward_sync_buffers

    @broadcast_buffers.setter
    def broadcast_buffers(self, value: bool) -> None:
        self.forward_sync_buffers: bool = value

    def _copy_from(self, root: int) -> None:
        """Copy the parameters and buffers of a rank to all, which go on together."""
        self.require_forward_param_sync = True
        buffers = self._buffers_of_module.tensors() if self.forward_sync_buffers else []
        broadcast_tensors(self._group, [tensor for _, tensor in self._named(self.module)] + buffers, root)

    def _named(self, module: Any) -> list[tuple[str, Any]]:
        """Return the parameters that are looked after, each once."""
        return [named for named in module.named_parameters() if named[0] not in self.parameters_to_ignore]

    def _attach(self) -> None:
        """Watch the parameters of the module."""
        self._buffers_of_module = ModuleBuffers(self.module, self._group, self.parameters_to_ignore)
        chosen = self.mixed_precision
        self._precision = MixedPrecision(chosen, self.module, self.parameters_to_ignore) if chosen else None
        self._reducer = Reducer(
            self._group,
            [named for named in self._named(self.module) if named[1].requires_grad],
            limits=self._limits,
            sparse=sparse_parameters(self.module),
            delayed=self._delayed,
            static_graph=self.static_graph,
            leaves_out_unused=self.skip_all_reduce_unused_params,
            optimizers=self._optimizers,
            gradient_dtype=self._precision.gradient_dtype if self._precision else attrgetter("dtype"),
        )
        if self._communication_hook is not None:
            self._reducer.set_hook(*self._communication_hook)
        averaged = self._reducer.parameter_ids
        self._known: KnownParameters = KnownParameters(self.module, self.parameters_to_ignore, averaged)
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
        self.process_group = default_group()
        self._group = require_group(self.process_group)
        self._attach()

    def __deepcopy__(self, memo: dict[int, Any]) -> DistributedDataParallel:
        made: DistributedDataParallel = type(self).__new__(type(self))
        memo[id(self)] = made
        state = {name: value for name, value in self.__dict__.items() if name not in _NOT_COPIED}
        torch.nn.Module.__setstate__(made, copy.deepcopy(state, memo))
        made.process_group, made._group = self.process_group, self._group
        made._attach()
        return made


@untraced
def _begin(reducer: Reducer, is_round: bool, copies: NarrowCopies | None, gradient: Any) -> None:
    reducer.begin(is_round, copies)
