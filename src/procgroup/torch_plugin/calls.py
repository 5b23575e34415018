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
from torch._C._distributed_c10d import (
    AllgatherOptions,
    AllreduceCoalescedOptions,
    AllreduceOptions,
    AllToAllOptions,
    BarrierOptions,
    BroadcastOptions,
    GatherOptions,
    ReduceOptions,
    ReduceScatterOptions,
    ScatterOptions,
)

from procgroup.api.barriers import monitored_barrier
from procgroup.arrays.untraced import untraced
from procgroup.errors import DistBackendError
from procgroup.groups.group import ProcessGroup
from procgroup.torch_plugin import sparse
from procgroup.torch_plugin.arguments import limit_of, listed, nested, only, options, reduce_op
from procgroup.torch_plugin.profiling import is_profiling, profiled, recorded
from procgroup.torch_plugin.work import COMPLETED, TorchWork, completed_work

_CPU = torch.device("cpu")


@untraced
class TorchCalls:
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

    def _gathered(self, output_tensors: Any) -> Any:
        """Return what futures give of the ranks' tensors: a list in a list, as on NCCL."""
        return output_tensors

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

    @profiled("all_reduce_coalesced")
    def allreduce_coalesced(self, tensors: Sequence[Any], opts: Any = None) -> Any:
        """Combine each of the tensors in place."""
        opts = options(AllreduceCoalescedOptions, opts, None)
        if not _on_cpu(tensors) and (other := self._elsewhere(tensors[0])) is not None:
            return other.allreduce_coalesced(tensors, opts)
        call = self.group.all_reduce_coalesced(tensors, reduce_op(opts.reduceOp), opts.asyncOp, limit_of(opts))
        return COMPLETED if call is None else TorchWork(call, tensors)

    @profiled("broadcast")
    def broadcast(self, tensors: Any, opts: Any = None, timeout: timedelta | None = None, *, root: Any = None) -> Any:
        """Copy the tensor of the root to every rank."""
        if opts.__class__ is not BroadcastOptions:
            tensors, opts = listed(tensors), options(BroadcastOptions, opts, timeout, rootRank=root)
        tensor = only(tensors)
        if not tensor.is_cpu and (other := self._elsewhere(tensor)) is not None:
            return other.broadcast(tensors, opts)
        call = self.group.broadcast(tensor, opts.rootRank, opts.asyncOp, limit_of(opts))
        return COMPLETED if call is None else TorchWork(call, tensors)

    @profiled("reduce")
    def reduce(
        self, tensors: Any, opts: Any = None, op: Any = None, timeout: timedelta | None = None, *, root: Any = None
    ) -> Any:
        """Combine the tensors of all ranks into that of the root."""
        if opts.__class__ is not ReduceOptions:
            tensors, opts = listed(tensors), options(ReduceOptions, opts, timeout, rootRank=root, reduceOp=op)
        tensor = only(tensors)
        if not tensor.is_cpu and (other := self._elsewhere(tensor)) is not None:
            return other.reduce(tensors, opts)
        call = self.group.reduce(tensor, opts.rootRank, reduce_op(opts.reduceOp), opts.asyncOp, limit_of(opts))
        return COMPLETED if call is None else TorchWork(call, tensors)

    @profiled("all_gather", inputs=1)
    def allgather(
        self, output_tensors: Any, input_tensors: Any, opts: Any = None, timeout: timedelta | None = None
    ) -> Any:
        """Copy the tensor of each rank ``r`` into ``output_tensors[0][r]`` on every rank; sizes may differ."""
        if opts.__class__ is not AllgatherOptions:
            output_tensors, input_tensors = nested(output_tensors), listed(input_tensors)
            opts = options(AllgatherOptions, opts, timeout)
        tensor = only(input_tensors)
        if not tensor.is_cpu and (other := self._elsewhere(tensor)) is not None:
            return other.allgather(output_tensors, input_tensors, opts)
        call = self.group.all_gather(only(output_tensors), tensor, opts.asyncOp, limit_of(opts))
        return COMPLETED if call is None else TorchWork(call, self._gathered(output_tensors))

    @profiled("all_gather_coalesced", inputs=1)
    def allgather_coalesced(
        self, output_lists: Sequence[Sequence[Any]], input_list: Sequence[Any], opts: Any = None
    ) -> Any:
        """Copy tensor ``i`` of each rank ``r`` into ``output_lists[r][i]`` on every rank."""
        opts = options(AllgatherOptions, opts, None)
        if not _on_cpu(input_list) and (other := self._elsewhere(input_list[0])) is not None:
            return other.allgather_coalesced(output_lists, input_list, opts)
        call = self.group.all_gather_coalesced(output_lists, input_list, opts.asyncOp, limit_of(opts))
        return COMPLETED if call is None else TorchWork(call, output_lists)

    @profiled("all_gather_single", inputs=1)
    def all_gather_single(self, output: Any, input: Any, opts: Any = None, timeout: timedelta | None = None) -> Any:
        """Copy the tensors of all ranks, one after the other, into every rank's ``output``."""
        opts = options(AllgatherOptions, opts, timeout)
        if not input.is_cpu and (other := self._elsewhere(input)) is not None:
            return other.all_gather_single(output, input, opts)
        call = self.group.all_gather_single(output, input, opts.asyncOp, limit_of(opts))
        return COMPLETED if call is None else TorchWork(call, [output])

    @profiled("all_gather_single_coalesced", inputs=1)
    def all_gather_single_coalesced(self, outputs: Sequence[Any], inputs: Sequence[Any], opts: Any = None) -> Any:
        """Make an all_gather_single of each output and input."""
        opts = options(AllgatherOptions, opts, None)
        if not _on_cpu(inputs) and (other := self._elsewhere(inputs[0])) is not None:
            return other.all_gather_single_coalesced(outputs, inputs, opts)
        call = self.group.all_gather_single_coalesced(outputs, inputs, opts.asyncOp, limit_of(opts))
        return COMPLETED if call is None else TorchWork(call, outputs)

    @profiled("gather", inputs=1)
    def gather(
        self,
        output_tensors: Any,
        input_tensors: Any,
        opts: Any = None,
        timeout: timedelta | None = None,
        *,
        root: Any = None,
    ) -> Any:
        """Copy the tensor of each rank ``r`` into ``output_tensors[0][r]`` on the root; the others give none."""
        if opts.__class__ is not GatherOptions:
            output_tensors, input_tensors = nested(output_tensors), listed(input_tensors)
            opts = options(GatherOptions, opts, timeout, rootRank=root)
        tensor = only(input_tensors)
        if not tensor.is_cpu and (other := self._elsewhere(tensor)) is not None:
            return other.gather(output_tensors, input_tensors, opts)
        outputs = only(output_tensors) if output_tensors else None
        call = self.group.gather(tensor, outputs, opts.rootRank, opts.asyncOp, limit_of(opts))
        return COMPLETED if call is None else TorchWork(call, self._gathered(output_tensors))

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

    @profiled("scatter", inputs=1)
    def scatter(
        self,
        output_tensors: Any,
        input_tensors: Any,
        opts: Any = None,
        timeout: timedelta | None = None,
        *,
        root: Any = None,
    ) -> Any:
        """Copy ``input_tensors[0][r]`` of the root into the tensor of each rank ``r``; the others give none."""
        if opts.__class__ is not ScatterOptions:
            output_tensors, input_tensors = listed(output_tensors), nested(input_tensors)
            opts = options(ScatterOptions, opts, timeout, rootRank=root)
        tensor = only(output_tensors)
        if not tensor.is_cpu and (other := self._elsewhere(tensor)) is not None:
            return other.scatter(output_tensors, input_tensors, opts)
        inputs = only(input_tensors) if input_tensors else None
        call = self.group.scatter(tensor, inputs, opts.rootRank, opts.asyncOp, limit_of(opts))
        return COMPLETED if call is None else TorchWork(call, output_tensors)

    @profiled("reduce_scatter", inputs=1)
    def reduce_scatter(
        self,
        output_tensors: Any,
        input_tensors: Any,
        opts: Any = None,
        timeout: timedelta | None = None,
        *,
        op: Any = None,
    ) -> Any:
        """Combine ``input_tensors[0][r]`` of all ranks into the output of each rank ``r``; sizes may differ."""
        if opts.__class__ is not ReduceScatterOptions:
            output_tensors, input_tensors = listed(output_tensors), nested(input_tensors)
            opts = options(ReduceScatterOptions, opts, timeout, reduceOp=op)
        tensor = only(output_tensors)
        if not tensor.is_cpu and (other := self._elsewhere(tensor)) is not None:
            return other.reduce_scatter(output_tensors, input_tensors, opts)
        call = self.group.reduce_scatter(
            tensor, only(input_tensors), reduce_op(opts.reduceOp), opts.asyncOp, limit_of(opts)
        )
        return COMPLETED if call is None else TorchWork(call, output_tensors)

    @profiled("reduce_scatter_single", inputs=1)
    def reduce_scatter_single(self, output: Any, input: Any, opts: Any = None, timeout: timedelta | None = None) -> Any:
        """Combine the inputs of all ranks; part ``r`` of the result goes to the output of rank ``r``."""
        opts = options(ReduceScatterOptions, opts, timeout)
        if not input.is_cpu and (other := self._elsewhere(input)) is not None:
            return other.reduce_scatter_single(output, input, opts)
        call = self.group.reduce_scatter_single(output, input, reduce_op(opts.reduceOp), opts.asyncOp, limit_of(opts))
        return COMPLETED if call is None else TorchWork(call, [output])

    @profiled("reduce_scatter_single_coalesced", inputs=1)
    def reduce_scatter_single_coalesced(self, outputs: Sequence[Any], inputs: Sequence[Any], opts: Any = None) -> Any:
        """Make a reduce_scatter_single of each output and input."""
        opts = options(ReduceScatterOptions, opts, None)
        if not _on_cpu(inputs) and (other := self._elsewhere(inputs[0])) is not None:
            return other.reduce_scatter_single_coalesced(outputs, inputs, opts)
        call = self.group.reduce_scatter_single_coalesced(
            outputs, inputs, reduce_op(opts.reduceOp), opts.asyncOp, limit_of(opts)
        )
        return COMPLETED if call is None else TorchWork(call, outputs)

    @profiled("all_to_all", inputs=1)
    def alltoall(self, output_tensors: Sequence[Any], input_tensors: Sequence[Any], opts: Any = None) -> Any:
        """Send ``input_tensors[r]`` to each rank ``r``, and receive ``output_tensors[r]`` from it."""
        opts = options(AllToAllOptions, opts, None)
        if not _on_cpu(input_tensors) and (other := self._elsewhere(input_tensors[0])) is not None:
            return other.alltoall(output_tensors, input_tensors, opts)
        call = self.group.all_to_all(output_tensors, input_tensors, opts.asyncOp, limit_of(opts))
        return COMPLETED if call is None else TorchWork(call, output_tensors)

    @profiled("all_to_all", inputs=1)
    def all_to_all_single(
        self,
        output: Any,
        input: Any,
        output_split_sizes: Sequence[int],
        input_split_sizes: Sequence[int],
        opts: Any = None,
        timeout: timedelta | None = None,
    ) -> Any:
        """Send part ``r`` of the input to each rank ``r``, and receive part ``r`` of the output from it."""
        opts = options(AllToAllOptions, opts, timeout)
        if not input.is_cpu and (other := self._elsewhere(input)) is not None:
            return other.all_to_all_single(output, input, output_split_sizes, input_split_sizes, opts)
        call = self.group.all_to_all_single(
            output, input, output_split_sizes, input_split_sizes, opts.asyncOp, limit_of(opts)
        )
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

    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single

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


def _on_cpu(tensors: Sequence[Any]) -> bool:
    return all(tensor.is_cpu for tensor in tensors)
