"""ignite.distributed's collectives on tensors, numbers and texts, under a launcher."""

from typing import Any

import ignite.distributed as idist
import torch
from client_report import BACKEND, DEVICE, report


def main(local_rank: int) -> None:
    rank, size = idist.get_rank(), idist.get_world_size()
    values: dict[str, Any] = {"world": [size, idist.get_local_rank(), idist.get_nproc_per_node(), idist.get_nnodes()]}
    assert idist.backend() == BACKEND and idist.device().type == DEVICE and local_rank == rank

    for op in ("SUM", "MAX", "MIN", "PRODUCT"):
        values[f"all_reduce {op}"] = idist.all_reduce(torch.arange(5.0) + 3 * rank, op)
        values[f"all_reduce {op} of integers"] = idist.all_reduce(torch.arange(5) - 3 * rank, op)
        values[f"all_reduce {op} of a number"] = idist.all_reduce(1.25 + rank, op)
        values[f"all_reduce {op} of an int"] = idist.all_reduce(7 + rank, op)
    values["all_gather"] = idist.all_gather(torch.full((2, 3), float(rank)))
    values["all_gather of a number"] = idist.all_gather(0.5 * rank)
    values["all_gather of a text"] = idist.all_gather(f"rank {rank} {'x' * (20 * rank)}")
    values["all_gather of objects"] = idist.all_gather({"rank": rank, "list": list(range(rank))})
    values["all_gather of other shapes"] = idist.all_gather_tensors_with_shapes(
        torch.full((rank + 1, 4 - rank), rank), [[one + 1, 4 - one] for one in range(size)]
    )
    values["broadcast"] = idist.broadcast(torch.arange(4.0) if rank == 0 else None, src=0, safe_mode=True)
    values["broadcast of a number"] = idist.broadcast(3.5 if rank == 1 else None, src=1, safe_mode=True)
    values["broadcast of a text"] = idist.broadcast("a text" if rank == 0 else None, src=0, safe_mode=True)
    idist.barrier()

    group = idist.new_group([0])
    if rank == 0:
        values["all_reduce in a group"] = idist.all_reduce(torch.ones(2), group=group)
    pair = idist.new_group(list(range(size)))
    values["all_gather in a group"] = idist.all_gather(torch.tensor([rank]), group=pair)

    @idist.one_rank_only(rank=1, with_barrier=True)
    def only() -> int:
        return 5

    values["one_rank_only"] = only()
    with idist.one_rank_first():
        values["one_rank_first"] = rank
    values["mean"] = idist.utils.all_reduce(torch.tensor([float(rank)]), "SUM") / size
    for name, value in values.items():
        report(rank, name, value)


def main_by_name() -> None:
    """Ignite refuses the names of backends that it does not know, but takes torch's default group as it is."""
    torch.distributed.init_process_group(BACKEND)
    idist.sync()
    main(idist.get_local_rank())
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    if BACKEND != "procgroup":
        with idist.Parallel(backend=BACKEND) as parallel:
            parallel.run(main)
    else:
        main_by_name()
