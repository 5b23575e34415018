"""How torchmetrics synchronises a metric's states between ranks, for every kind of reduction of its documentation."""

from typing import Any

import torch
import torch.distributed as dist
from client_report import BACKEND, DEVICE, report
from torchmetrics import Metric
from torchmetrics.utilities.distributed import gather_all_tensors


class States(Metric):
    """One state of each kind that add_state takes."""

    full_state_update = False

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        for kind in ("sum", "mean", "max", "min"):
            self.add_state(kind, torch.zeros(3), dist_reduce_fx=kind)
        self.add_state("count", torch.tensor(0), dist_reduce_fx="sum")
        self.add_state("largest_count", torch.tensor(0), dist_reduce_fx="max")
        self.add_state("seen", [], dist_reduce_fx="cat")
        self.add_state("rows", [], dist_reduce_fx="cat")
        self.add_state("never", [], dist_reduce_fx="cat")
        self.add_state("stacked", torch.zeros(2), dist_reduce_fx=None)
        self.add_state("kept", [], dist_reduce_fx=None)
        self.add_state("own", torch.zeros(2), dist_reduce_fx=lambda stacked: (stacked**2).sum(0))
        self.add_state("flag", torch.tensor(False), dist_reduce_fx=lambda stacked: stacked.any(0))

    def update(self, values: torch.Tensor) -> None:
        for kind in ("sum", "mean", "max", "min"):
            setattr(self, kind, getattr(self, kind) + values.sum() * torch.tensor([1.0, -1.0, 0.5]))
        self.count += values.numel()
        self.largest_count = torch.maximum(self.largest_count, torch.tensor(values.numel()))
        self.seen.append(values)
        self.rows.append(values.reshape(-1, 1).repeat(1, 3))
        self.stacked = self.stacked + values[:2].sum()
        self.kept.append(values)
        self.own = self.own + values.sum()
        self.flag = self.flag | (values.sum() > 3)

    def compute(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self._defaults}


def main() -> None:
    dist.init_process_group(BACKEND)
    rank, size = dist.get_rank(), dist.get_world_size()
    if DEVICE == "cuda":
        torch.cuda.set_device(rank)
    torch.set_default_device(DEVICE)

    def said(name: str, value: Any) -> None:
        report(rank, name, value)

    states = States()
    for step in range(3):  # another number of elements on each rank and in each step
        states.update(torch.arange(2.0 + rank + step) * (rank + 1))
    said("synchronised", states.compute())
    said("own states afterwards", {name: getattr(states, name) for name in ("sum", "count", "seen")})
    states.sync()
    said("after sync", {name: getattr(states, name) for name in ("mean", "count", "own")})
    states.unsync()
    with states.sync_context():
        said("in sync_context", states.sum)
    states.reset()
    states.update(torch.ones(2) * rank)
    said("after reset", states.compute())

    each_step = States(dist_sync_on_step=True)
    said("dist_sync_on_step", each_step(torch.arange(2.0) + rank))
    apart = States(sync_on_compute=False)
    apart.update(torch.arange(2.0) + rank)
    said("sync_on_compute=False", apart.compute())

    half = dist.new_group([0])
    within = States(process_group=half) if rank == 0 else States(sync_on_compute=False)
    within.update(torch.arange(3.0))
    said("in a group of one", within.compute())

    for dtype in (torch.int32, torch.int64, torch.float16, torch.bfloat16, torch.float64, torch.bool):
        said(f"gather_all_tensors of {dtype}", [one.float() for one in gather_all_tensors(torch.ones(2, dtype=dtype))])
    said("gather_all_tensors of uneven shapes", gather_all_tensors(torch.full((rank + 1, 4 - rank, 2), float(rank))))
    said("gather_all_tensors of a scalar", gather_all_tensors(torch.tensor(float(rank))))
    said("gather_all_tensors of nothing on one rank", gather_all_tensors(torch.ones(3 * rank)))
    with_gradient = torch.ones(2, requires_grad=True)
    gather_all_tensors(with_gradient * (rank + 1))[rank].sum().backward()
    said("gradient through gather_all_tensors", with_gradient.grad)
    assert size == 2
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
