"""The process that runs the programs of `torch_programs`: it imports torch once, and forks the ranks of each."""

from __future__ import annotations

import dataclasses
import json
import pickle
import random
import sys
import tempfile
import time
import traceback
from collections.abc import Mapping
from contextlib import nullcontext
from datetime import timedelta
from importlib import import_module
from itertools import product
from pathlib import Path
from typing import Any

from parity import forked, torch_groups
from parity.torch_programs import GPUS, SECONDS, Function, Played, Program

SUMS_OF_MANY = 1e-5
"""What float32 sums of three ranks and more may be apart after some steps: their order is each library's own."""


def main(folder: str) -> int:
    import torch
    import torch._dynamo  # or each rank does, when it makes its first DistributedDataParallel

    torch.set_num_threads(1)
    kinds, backends, parts, sample = json.loads(Path(folder, "task").read_text())
    if backends != ["gloo"]:
        import procgroup.torch_plugin

        procgroup.torch_plugin.register()
    chosen = [one for kind in kinds for one in programs(kind) if not parts or any(part in one.name for part in parts)]
    if sample:
        chosen = random.Random(13).sample(chosen, sample)
    for number, (program, backend) in enumerate(product(chosen, backends)):
        partial = Path(folder, f"{number:04}.partial")
        partial.write_bytes(pickle.dumps(dataclasses.asdict(play_one(program, backend, folder))))
        partial.rename(partial.with_suffix(".played"))
    return 0


def programs(kind: str) -> list[Program]:
    """Return the programs of torch_programs_{kind}, which have one phase as (size, function), or several of these."""
    described: Mapping[str, Any] = import_module(f"parity.torch_programs_{kind}").PROGRAMS
    made = []
    for name, value in described.items():
        phases = value if isinstance(value[0], tuple) else (value,)
        many = max(size for size, _ in phases) > 2
        made.append(Program(name, phases, SUMS_OF_MANY if many else 0.0))
    return made


def play_one(program: Program, backend: str, folder: str) -> Played:
    started = time.monotonic()
    played = Played(program.name, backend, program.tolerance, [])
    with tempfile.TemporaryDirectory(dir=folder) as shared:
        for phase, (size, function) in enumerate(program.phases):
            place = Path(shared, f"phase-{phase}")
            place.mkdir()
            codes = forked.run(be_rank, size, place, SECONDS, (function, size, backend, Path(shared)))
            strangers = torch_groups.strangers(place, "torch" if backend == "gloo" else "procgroup")
            if any(codes) or strangers:
                odd = f" and groups of {strangers}" if strangers else ""
                played.failure = f"phase {phase}: exit codes {codes}{odd}\n{forked.output(place, size)}"
                break
            played.results.append([pickle.loads(Path(place, f"{rank}.result").read_bytes()) for rank in range(size)])
    return dataclasses.replace(played, seconds=time.monotonic() - started)


def be_rank(rank: int, place: Path, function: Function, size: int, backend: str, shared: Path) -> None:
    import torch
    import torch.distributed as dist

    torch_groups.write_down(Path(place, f"{rank}.groups"))
    store = dist.FileStore(f"{place}/store", size)
    if backend == GPUS:
        torch.cuda.set_device(rank)
    name = "procgroup" if backend == GPUS else backend
    dist.init_process_group(name, store=store, rank=rank, world_size=size, timeout=timedelta(seconds=SECONDS / 2))
    torch.manual_seed(7)
    try:
        with torch.device("cuda", rank) if backend == GPUS else nullcontext():
            result = plain(function(rank, size, shared))
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        forked.leave(1)
    Path(place, f"{rank}.result").write_bytes(pickle.dumps(result))
    # Gloo's own barrier raises what calls before have raised.
    forked.meet(place, rank, size)
    dist.destroy_process_group()


def plain(value: Any) -> Any:
    """Make arrays of tensors, which another process can read without torch."""
    import torch
    from torch.distributed.tensor import DTensor

    if isinstance(value, DTensor):
        return [[str(placement) for placement in value.placements], plain(value.to_local())]
    if isinstance(value, torch.Tensor):
        value = value.detach().cpu()
        value = value.to_dense() if value.is_sparse else value
        return (value.float() if value.dtype == torch.bfloat16 else value).numpy().copy()
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return value


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
