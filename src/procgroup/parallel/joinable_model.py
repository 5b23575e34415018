"""DistributedDataParallel on uneven inputs: what makes it joinable, for procgroup's Join and for torch's."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from procgroup.parallel.join import Join, Joinable
from procgroup.parallel.model_join import ModelJoinHook

if TYPE_CHECKING:
    from procgroup.groups.group import ProcessGroup
    from procgroup.parallel.module_buffers import ModuleBuffers
    from procgroup.parallel.reducer import Reducer


class JoinableModel(Joinable):
    """What ``DistributedDataParallel`` has of this."""

    process_group: Any
    device: Any
    forward_sync_buffers: bool
    require_backward_grad_sync: bool
    _group: ProcessGroup
    _reducer: Reducer
    _buffers_of_module: ModuleBuffers
    _copy_from: Callable[[int], None]
    _join_hook: ModelJoinHook
    _join_config: Any = None  # torch's Join leaves one on each of its joinables

    def join(
        self,
        divide_by_initial_world_size: bool = True,
        enable: bool = True,
        throw_on_early_termination: bool = False,
    ) -> Join:
        """Return a context in which ranks may have different numbers of inputs. All ranks enter it.

        A rank that leaves it answers the others, with zero gradients, until all have left; then all have the model of
        one that came last. Gradients are divided by the number of all ranks or, without
        ``divide_by_initial_world_size``, of those that still have inputs. With ``throw_on_early_termination`` all
        ranks raise InputsExhausted at the step at which the first has none. Optimizers of ranks that have left take no
        step.
        """
        return Join(
            [self],
            enable,
            throw_on_early_termination,
            divide_by_initial_world_size=divide_by_initial_world_size,
        )

    def join_hook(self, **kwargs: Any) -> ModelJoinHook:
        """Return what answers for this model, for procgroup's Join and for torch's; see ``join``."""
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
        """Where torch's Join makes its tensors."""
        return self.device

    def _announce_forward(self, copies_buffers: bool, is_recording: bool) -> int:
        """Say inside of a Join what comes; return the rank whose buffers count."""
        if self._join is not None:
            return self._join_hook.announce_forward(copies_buffers)
        if self._join_config is not None and self._join_config.enable:
            is_round = is_recording and self.require_backward_grad_sync
            return self._join_hook.announce_iteration(self, copies_buffers, is_round)
        return 0
