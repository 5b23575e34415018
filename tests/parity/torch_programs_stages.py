"""Programs of pipelines, and of checkpoints that other numbers of ranks read."""

from __future__ import annotations

import copy
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from parity.torch_programs_ddp import batch, loss_of
from parity.torch_programs_sharded import STEPS, blocks, sharded, train
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleZBVZeroBubble,
    SplitPoint,
)
from torch.distributed.pipelining import pipeline as trace_pipeline
from torch.distributed.tensor import Shard, distribute_tensor


def pipeline(schedule: Any, rank: int, size: int, folder: Path) -> Any:
    stage = PipelineStage(blocks(size)[rank], rank, size, torch.get_default_device())
    return _steps(schedule(stage, 4, loss_fn=lambda out, target: loss_of(out - target)), stage, rank, size - 1)


def pipeline_traced(rank: int, size: int, folder: Path) -> Any:
    """Cut a model into stages by what torch.export sees of it."""
    splits = {str(number): SplitPoint.BEGINNING for number in range(1, size)}
    stage = trace_pipeline(blocks(size), mb_args=(batch(0, 0),), split_spec=splits).build_stage(
        rank, torch.get_default_device()
    )
    schedule = ScheduleGPipe(stage, 2, loss_fn=lambda out, target: loss_of(out - target))
    return _steps(schedule, stage, rank, size - 1)


def pipeline_of_loops(rank: int, size: int, folder: Path) -> Any:
    parts = blocks(2 * size)
    numbers = [rank, rank + size]
    stages = [PipelineStage(parts[number], number, 2 * size, torch.get_default_device()) for number in numbers]
    schedule = ScheduleInterleaved1F1B(stages, 2 * size, loss_fn=lambda out, target: loss_of(out - target))
    return _steps(schedule, *stages, rank, size - 1)


def pipeline_of_zero_bubble(rank: int, size: int, folder: Path) -> Any:
    parts = blocks(2 * size)
    numbers = [rank, 2 * size - 1 - rank]
    stages = [PipelineStage(parts[number], number, 2 * size, torch.get_default_device()) for number in numbers]
    schedule = ScheduleZBVZeroBubble(stages, 2 * size, loss_fn=lambda out, target: loss_of(out - target))
    return _steps(schedule, *stages, rank, 0)


def _steps(schedule: Any, *rest: Any) -> Any:
    """Take steps through a pipeline whose last stage is on rank ``last``; return the losses and all gradients."""
    *stages, rank, last = rest
    losses: list[torch.Tensor] = []
    for step in range(2):
        x, target = torch.cat([batch(0, step), batch(1, step)]), torch.cat([batch(2, step), batch(3, step)])
        here: list[torch.Tensor] = []
        arguments = (x,) if rank == 0 else ()
        schedule.step(*arguments, **({"target": target, "losses": here} if rank == last else {}))
        losses += here
    return losses, [parameter.grad for stage in stages for parameter in stage.submod.parameters()]


def saved(rank: int, size: int, folder: Path) -> Any:
    model = sharded((size,))
    optimizer, losses = train(model, rank)
    values, states = get_state_dict(model, optimizer)
    dcp.save({"model": values, "optimizer": states, "step": STEPS}, checkpoint_id=folder / "checkpoint")
    return losses, get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))


def loaded(rank: int, size: int, folder: Path) -> Any:
    model = sharded((size,))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    values, states = get_state_dict(model, optimizer)
    read = {"model": values, "optimizer": states, "step": 0}
    dcp.load(read, checkpoint_id=folder / "checkpoint")
    set_state_dict(model, optimizer, model_state_dict=values, optim_state_dict=states)
    whole = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    loss = loss_of(model(batch(0, 9)))
    return read["step"], copy.deepcopy(whole), loss


def saved_beside(rank: int, size: int, folder: Path) -> Any:
    mesh = init_device_mesh(torch.get_default_device().type, (size,))
    state = {"rows": distribute_tensor(torch.arange(24.0).reshape(6, 4), mesh, [Shard(0)]), "rank 0": rank * 0}
    dcp.async_save(state, checkpoint_id=folder / "beside", process_group=dist.new_group()).result()
    read = {"rows": distribute_tensor(torch.zeros(6, 4), mesh, [Shard(1)]), "rank 0": -1}
    dcp.load(read, checkpoint_id=folder / "beside")
    return read


PROGRAMS: dict[str, Any] = {
    "pipeline gpipe": (2, partial(pipeline, ScheduleGPipe)),
    "pipeline 1f1b": (3, partial(pipeline, Schedule1F1B)),
    "pipeline interleaved": (2, pipeline_of_loops),
    "pipeline traced": (2, pipeline_traced),
    "pipeline zero bubble": (2, pipeline_of_zero_bubble),
    "checkpoint loaded by as many ranks": ((2, saved), (2, loaded)),
    "checkpoint loaded by more ranks": ((2, saved), (3, loaded)),
    "checkpoint loaded by fewer ranks": ((3, saved), (1, loaded)),
    "checkpoint saved beside": (2, saved_beside),
}
