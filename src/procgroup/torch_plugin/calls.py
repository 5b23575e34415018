"""The calls that torch.distributed makes of a backend, on one of procgroup's process groups.

torch's functions call these methods from Python, and torch's C++ code (stock DDP, the functional collectives) calls
them by the same names. Each takes the forms that torch's own takes: lists and an options object, or one tensor and
arguments. A call whose options say ``asyncOp`` False, as the blocking functions have it, has completed when it returns.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
from torch._C._distributed_c10d import AllreduceOptions, BarrierOptions, GatherOptions

from procgroup.api.barriers import monitored_barrier
from procgroup.arrays.untraced import untraced
from procgroup.errors import DistBackendError
from procgroup.groups.group import ProcessGroup
from procgroup.torch_plugin import sparse
from procgroup.torch_plugin.arguments import limit_of, listed, only, options, reduce_op
from procgroup.torch_plugin.collectives import TorchCollectives
from procgroup.torch_plugin.profiling import is_profiling, profiled, recorded
from procgroup.torch_plugin.work import COMPLETED, TorchWork, completed_work

_CPU = torch.device("cpu")


@untraced
class TorchCalls(TorchCollectives):
    """The calls on ``group``, one of procgroup's; all ranks are group ranks.

    Tensors that are neither in CPU memory nor on a GPU go ``_elsewhere``.
    """

    group: ProcessGroup
    _name: str

    supports_splitting = True
    supports_coalescing = False
    supports_shrinking = False
    supports_time_estimate = False

    def supports_tensor_alloc(self, device: Any) -> bool:
        """Return that tensors cannot be made in memory of this backend: NCCL's would live as long as the group."""
        return False

    def name(self) -> str:
        """Return the backend's name."""
        return self._name

    _get_backend_name = name

    def getBackendName(self) -> str:  # noqa: N802
        """Return the backend's name for torch's C++ code, which takes one that is called gloo for its own Gloo."""
        return "procgroup"

    def rank(self) -> int:
        """Return this process's rank in the group."""
        return self.group.rank()

    def size(self) -> int:
        """Return how many ranks the group has."""
        return self.group.size()

    getRank = rank  # noqa: N815
    getSize = size  # noqa: N815

    def set_timeout(self, timeout: timedelta) -> None:
        """Set how long a call may take when it has no timeout of its own."""
        self.group.set_timeout(timeout)

    _set_default_timeout = set_timeout

    def _set_sequence_number_for_group(self) -> None:
        """Do nothing: the engine numbers the calls of each group by itself."""

    def _elsewhere(self, tensor: Any) -> Any | None:
        """Return what makes the calls on a tensor that is not in CPU memory; None where this does.

        Raises DistBackendError where nothing does.
        """
        if tensor.is_cuda or tensor.is_cpu:  # the first of several may be there
            return None
        kind = tensor.device.type
        if kind == "meta":
            advice = "It has no elements: make it on the CPU, by torch.empty_like(tensor, device='cpu')."
        else:
            advice = f"Pass tensor.cpu(), or name a backend for it: init_process_group('cpu:procgroup,{kind}:NAME')."
        raise DistBackendError(
            f"backend {self._name!r} moves tensors in the memory of CPUs and of NVIDIA's GPUs, and this one is on "
            f"{kind}. {advice}"
        )

    def _elsewhere_at(self, device: Any) -> Any | None:
        """Return what makes a call without tensors for a device; None where this does."""
        return None

    @profiled("all_reduce")
    def allreduce(self, tensors: Any, opts: Any = None, timeout: timedelta | None = None, *, op: Any = None) -> Any:
        """Combine the tensors of all ranks in place; sparse ones are summed."""
        if opts.__class__ is not AllreduceOptions:
            tensors, opts = listed(tensors), options(AllreduceOptions, opts, timeout, reduceOp=op)
        tensor = only(tensors)
        if not tensor.is_cpu and (other := self._elsewhere(tensor)) is not None:
            return other.allreduce(tensors, opts)
        combine, limit = reduce_op(opts.reduceOp), opts.timeout
        limit = None if limit.days < 0 else limit
        if tensor.is_sparse:
            sparse.all_reduce(self.group, tensor, combine, limit)
            return completed_work(tensors)
        call = self.group.all_reduce(tensor, combine, opts.asyncOp, limit)
        return COMPLETED if call is None else TorchWork(call, tensors)

    @profiled("gather_single", inputs=1)
    def gather_single(self, output: Any, input: Any, opts: Any = None) -> Any:
        """Copy the tensors of all ranks, one after the other, into ``output`` on the root."""
        opts = options(GatherOptions, opts, None)
        if not input.is_cpu and (other := self._elsewhere(input)) is not None:
            return other.gather_single(output, input, opts)
        is_root = opts.rootRank == self.group.rank()
        outputs = list(output.reshape(self.group.size(), -1)) if is_root else None
        call = self.group.gather(input, outputs, opts.rootRank, opts.asyncOp, limit_of(opts))
        return COMPLETED if call is None else TorchWork(call, [output])

    def barrier(self, opts: Any = None, timeout: timedelta | None = None) -> Any:
        """Wait until every rank has come here."""
        if is_profiling():
            with recorded(f"{self.name()}:barrier", []):
                return self._barrier(options(BarrierOptions, opts, timeout))
        return self._barrier(opts if opts.__class__ is BarrierOptions else options(BarrierOptions, opts, timeout))

    def _barrier(self, opts: Any) -> Any:
        device = opts.device
        if device is not None and device != _CPU:
            other = self._elsewhere_at(device)
            if other is not None:
                return other.barrier(opts)
        call = self.group.barrier(opts.asyncOp, limit_of(opts))
        return COMPLETED if call is None else TorchWork(call, [])

    def monitored_barrier(self, timeout: Any = None, wait_all_ranks: bool = False) -> None:
        """Wait until every rank has come here; otherwise raise what names those who did not."""
        limit = limit_of(timeout) if isinstance(timeout, BarrierOptions) else timeout
        monitored_barrier(self.group, limit, wait_all_ranks)

    _allgather_base = TorchCollectives.all_gather_single
    allgather_into_tensor_coalesced = TorchCollectives.all_gather_single_coalesced
    _reduce_scatter_base = TorchCollectives.reduce_scatter_single
    reduce_scatter_tensor_coalesced = TorchCollectives.reduce_scatter_single_coalesced
    alltoall_base = TorchCollectives.all_to_all_single

    @profiled("send")
    def send(self, tensors: Sequence[Any], dstRank: int, tag: int) -> Any:
        """Send a tensor to a rank, which receives it with the same tag."""
        tensor = only(tensors)
        if not tensor.is_cpu and (other := self._elsewhere(tensor)) is not None:
            return other.send(tensors, dstRank, tag)
        call = self.group.send(tensor, dstRank, tag, async_op=True)
        assert call is not None
        return TorchWork(call, tensors)

    @profiled("recv")
    def recv(self, tensors: Sequence[Any], srcRank: int, tag: int) -> Any:
        """Receive a tensor from a rank."""
        tensor = only(tensors)
        if not tensor.is_cpu and (other := self._elsewhere(tensor)) is not None:
            return other.recv(tensors, srcRank, tag)
        return TorchWork(self.group.irecv(tensor, srcRank, tag), tensors, self.group.group_rank)

    @profiled("recvAnySource")
    def recv_anysource(self, tensors: Sequence[Any], tag: int) -> Any:
        """Receive a tensor from whichever rank sends one with this tag."""
        tensor = only(tensors)
        if not tensor.is_cpu and (other := self._elsewhere(tensor)) is not None:
            return other.recv_anysource(tensors, tag)
        return TorchWork(self.group.irecv(tensor, None, tag), tensors, self.group.group_rank)
