"""send and recv of torch.distributed on one of procgroup's groups; and who moves tensors that it does not move."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from procgroup.arrays.untraced import untraced
from procgroup.errors import DistBackendError
from procgroup.torch_plugin.facts import TorchFacts
from procgroup.torch_plugin.forms import only
from procgroup.torch_plugin.profiling import profiled
from procgroup.torch_plugin.side_streams import can_stage
from procgroup.torch_plugin.staging import StagedCalls
from procgroup.torch_plugin.work import TorchWork


@untraced
class TorchMessages(TorchFacts):
    """Messages between the ranks of ``group``. Tensors that are not in CPU memory go ``_elsewhere``."""

    def _elsewhere(self, tensor: Any) -> Any:
        """Return what makes the calls on a tensor that is not in CPU memory. Raises DistBackendError for none."""
        if tensor.is_cpu or can_stage(tensor.device):  # the first of several can lie there, which are refused in words
            return StagedCalls(self)
        kind = tensor.device.type
        if kind == "meta":
            advice = "It has no elements: make it on the CPU, by torch.empty_like(tensor, device='cpu')."
        else:
            advice = f"Pass tensor.cpu(), or name a backend for it: init_process_group('cpu:procgroup,{kind}:NAME')."
        raise DistBackendError(
            f"backend {self._name!r} moves tensors in CPU memory, and this one lies on {kind}. {advice}"
        )

    def _elsewhere_at(self, device: Any) -> Any | None:
        """Return what makes a call without tensors for a device; None where this does."""
        return None

    @profiled("send")
    def send(self, tensors: Sequence[Any], dstRank: int, tag: int) -> Any:
        """Send a tensor to a rank, which receives it with the same tag."""
        tensor = only(tensors)
        if not tensor.is_cpu:
            return self._elsewhere(tensor).send(tensors, dstRank, tag)
        call = self.group.send(tensor, dstRank, tag, async_op=True)
        assert call is not None
        return TorchWork(call, tensors)

    @profiled("recv")
    def recv(self, tensors: Sequence[Any], srcRank: int, tag: int) -> Any:
        """Receive a tensor from a rank."""
        tensor = only(tensors)
        if not tensor.is_cpu:
            return self._elsewhere(tensor).recv(tensors, srcRank, tag)
        return TorchWork(self.group.irecv(tensor, srcRank, tag), tensors, self.group.group_rank)

    @profiled("recvAnySource")
    def recv_anysource(self, tensors: Sequence[Any], tag: int) -> Any:
        """Receive a tensor from whichever rank sends one with this tag."""
        tensor = only(tensors)
        if not tensor.is_cpu:
            return self._elsewhere(tensor).recv_anysource(tensors, tag)
        return TorchWork(self.group.irecv(tensor, None, tag), tensors, self.group.group_rank)
